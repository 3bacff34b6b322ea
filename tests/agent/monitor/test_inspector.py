"""One inspection at work: what goes wrong in a look is a finding, and never the agent's trouble."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import cast

import pytest
import structlog

from agent.monitor.inspection import Look
from agent.monitor.monitor import HANGS, UNABLE, Inspector
from everstep.errors import CannotInspect
from everstep.model.finding import Finding, Health, verdict_of
from tests.agent.monitor.sites import BROKEN, UNCLEAR, Place, reasons, scripted


def inspector_of(place: Place, does: Callable[[], Look], **limits: float) -> Inspector:
    return Inspector(scripted(place, does, **limits), place.kept(), lambda: None)


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize("error", [CannotInspect("no tool"), PermissionError(13, "denied"), ValueError("odd output")])
def test_what_cannot_be_looked_at_is_unknown(place: Place, error: Exception) -> None:
    def fails() -> Look:
        raise error

    seen = inspector_of(place, fails).look_once()

    assert reasons(seen) == [(UNABLE.code, "")]
    assert verdict_of(seen.findings) is Health.UNKNOWN
    assert str(error) in seen.findings[0].text


def test_an_inspection_that_fails_at_every_look_is_logged_once_for_each_kind_of_error(place: Place) -> None:
    errors: list[Exception] = [ValueError("number 1"), ValueError("number 2"), KeyError("x"), ValueError("number 3")]

    def fails() -> Look:
        raise errors.pop(0)

    inspector = inspector_of(place, fails)
    with structlog.testing.capture_logs() as logged:
        seen = [inspector.look_once() for _ in range(4)]

    assert len(logged) == 2
    assert "ValueError: number 3" in seen[-1].findings[0].text
    assert seen[-1].findings[0].verdict is Health.UNKNOWN


@pytest.mark.parametrize("seen", [None, Look([cast(Finding, "odd")])])
def test_what_is_no_look_is_a_failed_one(place: Place, seen: Look) -> None:
    assert reasons(inspector_of(place, lambda: seen).look_once()) == [(UNABLE.code, "")]


def test_since_when_it_is_unknown_holds(place: Place) -> None:
    def fails() -> Look:
        raise CannotInspect("no tool")

    inspector = inspector_of(place, fails)
    began = inspector.look_once().findings[0].since_ns
    place.clock.pass_s(60)

    assert inspector.look_once().findings[0].since_ns == began


def test_a_look_that_hangs_is_said_to_hang_and_what_was_seen_before_stays(place: Place) -> None:
    go_on = threading.Event()
    looks = 0

    def hangs_at_the_second() -> Look:
        nonlocal looks
        looks += 1
        if looks > 1:
            go_on.wait()
        return Look([inspector.inspection.finding(BROKEN, "part 1")])

    inspector = inspector_of(place, hangs_at_the_second, deadline_s=0.05)
    inspector.start()
    try:
        until(lambda: inspector.hangs_s > 0)
        assert reasons(inspector.look) == [(BROKEN.code, "part 1"), (HANGS.code, "")]
        assert not inspector.knows
        go_on.set()
        until(lambda: inspector.hangs_s == 0 and inspector.looks > 2)
        assert reasons(inspector.look) == [(BROKEN.code, "part 1")]
        assert inspector.knows
    finally:
        go_on.set()
        inspector.stop()


def test_what_was_repaired_counts_no_more_and_what_is_still_so_is_found_again(place: Place) -> None:
    def told() -> Look:
        return Look([*inspector.inspection.noted(), inspector.inspection.finding(UNCLEAR)])

    inspector = inspector_of(place, told)
    broken = inspector.inspection.finding(BROKEN, "part 1")
    inspector.inspection.note(broken, at_ns=0, lasts_s=None)
    inspector._look = inspector.look_once()
    assert (inspector.clear(BROKEN.code), inspector.clear(UNCLEAR.code), inspector.clear("other")) == (1, 1, 0)
    assert reasons(inspector.look_once()) == [(UNCLEAR.code, "")]


@pytest.mark.parametrize("waits", [False, True])
def test_what_is_cleared_is_looked_at_again_at_once(place: Place, waits: bool) -> None:
    """And what is still so then, or happens again in that very look, begins anew."""

    def told() -> Look:
        place.clock.pass_s(1)
        if waits and inspector.looks:
            hurried.wait()
            hurried.clear()
        return Look([*inspector.inspection.noted(), inspector.inspection.finding(UNCLEAR)])

    inspector, hurried = inspector_of(place, told, interval_s=3600.0), threading.Event()
    inspector.inspection.hurry = hurried.set  # type: ignore[method-assign]
    type(inspector.inspection).waits = waits
    inspector.inspection.note(inspector.inspection.finding(BROKEN, "part 1"), at_ns=0, lasts_s=None)
    inspector.start()
    try:
        until(lambda: inspector.looks == 1 and len(inspector.look.findings) == 2)
        began = inspector.look.findings[1].since_ns
        assert (inspector.clear(BROKEN.code), inspector.clear(UNCLEAR.code)) == (1, 1)
        until(lambda: not inspector.clearing)
        assert reasons(inspector.look) == [(UNCLEAR.code, "")]
        assert inspector.look.findings[0].since_ns > began
    finally:
        type(inspector.inspection).waits = False
        inspector.stop()
        hurried.set()


def test_since_when_something_is_broken_holds_from_look_to_look(place: Place) -> None:
    def broken() -> Look:
        place.clock.pass_s(1)
        return Look([inspector.inspection.finding(BROKEN, "part 1")])

    inspector = inspector_of(place, broken)
    began = place.clock() + 1_000_000_000
    inspector.start()
    until(lambda: inspector.looks > 3)
    inspector.stop()

    assert inspector.look.findings[0].since_ns == began


@pytest.mark.parametrize("step_s", [-45, 90])
def test_what_lasts_began_when_it_was_told_though_the_clock_is_set_and_a_look_fails(place: Place, step_s: int) -> None:
    """Network alerts are told apart by when they began."""
    looks = 0

    def broken() -> Look:
        nonlocal looks
        looks += 1
        if looks == 2:
            place.clock.pass_s(step_s)
            raise CannotInspect("no tool")
        return Look([inspector.inspection.finding(BROKEN, "part 1")])

    inspector = inspector_of(place, broken)
    began = place.clock()
    inspector.start()
    until(lambda: inspector.looks > 3)
    inspector.stop()

    assert [found.since_ns for found in inspector.look.findings] == [began]


def test_what_comes_back_began_anew(place: Place) -> None:
    looks = 0

    def comes_back() -> Look:
        nonlocal looks
        looks += 1
        place.clock.pass_s(1)
        return Look([inspector.inspection.finding(BROKEN, "part 1")] if looks != 2 else [])

    inspector = inspector_of(place, comes_back)
    began = place.clock()
    inspector.start()
    until(lambda: inspector.looks > 3)
    inspector.stop()

    assert [found.since_ns for found in inspector.look.findings] == [began + 3_000_000_000]
