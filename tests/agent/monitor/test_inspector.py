"""The loop of one inspection. A look that fails becomes a finding, and never harms the agent."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import cast

import pytest
import structlog

from agent.monitor.inspection import InspectionResult
from agent.monitor.monitor import HANGS, UNABLE, Inspector
from everstep.errors import CannotInspect
from everstep.model.finding import Finding, Health, verdict_of
from tests.agent.monitor.sites import BROKEN, UNCLEAR, SimulatedMachine, reasons, scripted


def inspector_of(machine: SimulatedMachine, does: Callable[[], InspectionResult], **limits: float) -> Inspector:
    return Inspector(scripted(machine, does, **limits), machine.kept(), lambda: None)


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize("error", [CannotInspect("no tool"), PermissionError(13, "denied"), ValueError("odd output")])
def test_an_inspection_that_fails_is_unknown(machine: SimulatedMachine, error: Exception) -> None:
    def fails() -> InspectionResult:
        raise error

    seen = inspector_of(machine, fails).inspect_once()

    assert reasons(seen) == [(UNABLE.code, "")]
    assert verdict_of(seen.findings) is Health.UNKNOWN
    assert str(error) in seen.findings[0].text


def test_an_inspection_that_fails_at_every_look_is_logged_once_for_each_kind_of_error(
    machine: SimulatedMachine,
) -> None:
    errors: list[Exception] = [ValueError("number 1"), ValueError("number 2"), KeyError("x"), ValueError("number 3")]

    def fails() -> InspectionResult:
        raise errors.pop(0)

    inspector = inspector_of(machine, fails)
    with structlog.testing.capture_logs() as logged:
        seen = [inspector.inspect_once() for _ in range(4)]

    assert len(logged) == 2
    assert "ValueError: number 3" in seen[-1].findings[0].text
    assert seen[-1].findings[0].verdict is Health.UNKNOWN


@pytest.mark.parametrize("seen", [None, InspectionResult([cast(Finding, "odd")])])
def test_an_invalid_result_counts_as_a_failed_look(machine: SimulatedMachine, seen: InspectionResult) -> None:
    assert reasons(inspector_of(machine, lambda: seen).inspect_once()) == [(UNABLE.code, "")]


def test_the_begin_of_an_unknown_state_stays_the_same(machine: SimulatedMachine) -> None:
    def fails() -> InspectionResult:
        raise CannotInspect("no tool")

    inspector = inspector_of(machine, fails)
    began = inspector.inspect_once().findings[0].since_ns
    machine.clock.pass_s(60)

    assert inspector.inspect_once().findings[0].since_ns == began


def test_a_hanging_look_is_a_finding_and_earlier_findings_stay(machine: SimulatedMachine) -> None:
    go_on = threading.Event()
    looks = 0

    def hangs_at_the_second() -> InspectionResult:
        nonlocal looks
        looks += 1
        if looks > 1:
            go_on.wait()
        return InspectionResult([inspector.inspection.finding(BROKEN, "part 1")])

    inspector = inspector_of(machine, hangs_at_the_second, deadline_s=0.05)
    inspector.start()
    try:
        until(lambda: inspector.hangs_s > 0)
        assert reasons(inspector.result) == [(BROKEN.code, "part 1"), (HANGS.code, "")]
        assert not inspector.is_certain
        go_on.set()
        until(lambda: inspector.hangs_s == 0 and inspector.inspections > 2)
        assert reasons(inspector.result) == [(BROKEN.code, "part 1")]
        assert inspector.is_certain
    finally:
        go_on.set()
        inspector.stop()


def test_a_cleared_finding_comes_back_only_if_it_is_still_true(machine: SimulatedMachine) -> None:
    def told() -> InspectionResult:
        return InspectionResult([*inspector.inspection.noted(), inspector.inspection.finding(UNCLEAR)])

    inspector = inspector_of(machine, told)
    broken = inspector.inspection.finding(BROKEN, "part 1")
    inspector.inspection.note(broken, at_ns=0, lasts_s=None)
    inspector._result = inspector.inspect_once()
    assert (inspector.clear(BROKEN.code), inspector.clear(UNCLEAR.code), inspector.clear("other")) == (1, 1, 0)
    assert reasons(inspector.inspect_once()) == [(UNCLEAR.code, "")]


@pytest.mark.parametrize("waits", [False, True])
def test_a_clearing_leads_to_a_new_look_at_once(machine: SimulatedMachine, waits: bool) -> None:
    """If the finding is still true at the new look, it gets a new begin."""

    def told() -> InspectionResult:
        machine.clock.pass_s(1)
        if waits and inspector.inspections:
            hurried.wait()
            hurried.clear()
        return InspectionResult([*inspector.inspection.noted(), inspector.inspection.finding(UNCLEAR)])

    inspector, hurried = inspector_of(machine, told, interval_s=3600.0), threading.Event()
    inspector.inspection.hurry = hurried.set  # type: ignore[method-assign]
    type(inspector.inspection).waits = waits
    inspector.inspection.note(inspector.inspection.finding(BROKEN, "part 1"), at_ns=0, lasts_s=None)
    inspector.start()
    try:
        until(lambda: inspector.inspections == 1 and len(inspector.result.findings) == 2)
        began = inspector.result.findings[1].since_ns
        assert (inspector.clear(BROKEN.code), inspector.clear(UNCLEAR.code)) == (1, 1)
        until(lambda: not inspector.clearing)
        assert reasons(inspector.result) == [(UNCLEAR.code, "")]
        assert inspector.result.findings[0].since_ns > began
    finally:
        type(inspector.inspection).waits = False
        inspector.stop()
        hurried.set()


def test_the_begin_of_a_finding_stays_the_same_in_later_looks(machine: SimulatedMachine) -> None:
    def broken() -> InspectionResult:
        machine.clock.pass_s(1)
        return InspectionResult([inspector.inspection.finding(BROKEN, "part 1")])

    inspector = inspector_of(machine, broken)
    began = machine.clock() + 1_000_000_000
    inspector.start()
    until(lambda: inspector.inspections > 3)
    inspector.stop()

    assert inspector.result.findings[0].since_ns == began


@pytest.mark.parametrize("step_s", [-45, 90])
def test_the_begin_of_a_finding_survives_a_failed_look_and_a_set_clock(machine: SimulatedMachine, step_s: int) -> None:
    """The time at which a network alert began distinguishes it from other alerts."""
    looks = 0

    def broken() -> InspectionResult:
        nonlocal looks
        looks += 1
        if looks == 2:
            machine.clock.pass_s(step_s)
            raise CannotInspect("no tool")
        return InspectionResult([inspector.inspection.finding(BROKEN, "part 1")])

    inspector = inspector_of(machine, broken)
    began = machine.clock()
    inspector.start()
    until(lambda: inspector.inspections > 3)
    inspector.stop()

    assert [found.since_ns for found in inspector.result.findings] == [began]


def test_a_finding_that_comes_back_has_a_new_begin(machine: SimulatedMachine) -> None:
    looks = 0

    def comes_back() -> InspectionResult:
        nonlocal looks
        looks += 1
        machine.clock.pass_s(1)
        return InspectionResult([inspector.inspection.finding(BROKEN, "part 1")] if looks != 2 else [])

    inspector = inspector_of(machine, comes_back)
    began = machine.clock()
    inspector.start()
    until(lambda: inspector.inspections > 3)
    inspector.stop()

    assert [found.since_ns for found in inspector.result.findings] == [began + 3_000_000_000]
