"""All inspections together: when they report a finding, and that they report each once, even if the agent dies."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest

from agent.monitor.inspection import InspectionResult
from agent.monitor.monitor import AGAIN_S, MOST_REPORTED, OVER_S, Monitor
from agent.monitor.network.link import DOWN
from everstep.errors import CannotInspect
from everstep.model.finding import Finding, Health
from tests.agent.monitor.sites import BROKEN, UNCLEAR, Scripted, SimulatedMachine, scripted
from tests.agent.monitor.test_inspector import until

Told = list[tuple[str, str, bool]]


class Watched:
    """A monitor with one inspection, which looks only when the test wants it."""

    def __init__(self, machine: SimulatedMachine, told: Told) -> None:
        self.seen: InspectionResult | Exception = InspectionResult()
        self.inspection: Scripted = scripted(machine, self._look)
        self.monitor = Monitor([self.inspection], machine.kept(), self._tell)
        self._told = told
        self.inspector = self.monitor.inspectors[0]

    def _look(self) -> InspectionResult:
        if isinstance(self.seen, Exception):
            raise self.seen
        return self.seen

    def _tell(self, finding: Finding, over: bool) -> None:
        self._told.append((finding.reason, finding.item, over))

    def at(self, now_s: float, *items: str) -> None:
        self.seen = InspectionResult([self.inspection.finding(BROKEN, item) for item in items])
        self.again(now_s)

    def again(self, now_s: float) -> None:
        self.inspector._result = self.inspector.inspect_once()
        self.monitor.report_changes(now_s)


@pytest.fixture
def told() -> Told:
    return []


def test_a_finding_is_reported_once_and_is_over_after_a_long_absence(machine: SimulatedMachine, told: Told) -> None:
    watched = Watched(machine, told)
    watched.at(0, "a")
    watched.at(1, "a")
    assert told == [("part-broken", "a", False)]
    watched.at(2)
    watched.at(1 + OVER_S / 2, "a")  # the finding was absent only for a short time
    watched.at(OVER_S)
    assert len(told) == 1
    watched.at(2 + 2 * OVER_S)
    assert told == [("part-broken", "a", False), ("part-broken", "a", True)]


def test_a_finding_that_comes_and_goes_is_reported_less_and_less_often(machine: SimulatedMachine, told: Told) -> None:
    watched, times = Watched(machine, told), []
    for second in range(3 * 3600):
        before = len(told)
        watched.at(second, *(["a"] if second % 20 < 10 else []))  # "a" is never absent long enough to be over
        if len(told) > before:
            times.append(second)
    assert {over for _, _, over in told} == {False}
    assert times[:4] == [0, 40, 100, 220]  # the pauses are at least 30, 60 and 120 s
    apart = [later - earlier for earlier, later in pairwise(times)]
    assert apart == sorted(apart)
    assert apart[-1] <= AGAIN_S + 20
    assert len(times) < 12


def test_each_outage_of_a_link_is_reported_even_shortly_after_another(machine: SimulatedMachine, told: Told) -> None:
    watched = Watched(machine, told)
    for second in range(400):
        is_down = second < 60 or 80 <= second < 100 or second >= 300
        began = next(start for start in (300, 80, 0) if second >= start)
        since_ns = machine.clock.ns + began * 10**9
        down = [watched.inspection.finding(DOWN, "eth0", since_ns=since_ns)] if is_down else []
        watched.seen = InspectionResult(down)
        before = len(told)
        watched.again(second)
        assert (len(told) > before) == (second in {0, 80, 300, 129})  # the second outage counts as over at 129 s
    assert [over for _, _, over in told] == [False, False, True, False]


def test_a_lasting_finding_is_not_reported_again(machine: SimulatedMachine, told: Told) -> None:
    watched = Watched(machine, told)
    for second in range(0, 3600, 5):
        watched.at(second, "a")
    assert len(told) == 1


def test_a_finding_that_gets_worse_is_reported_again(machine: SimulatedMachine, told: Told) -> None:
    watched = Watched(machine, told)
    for verdict in (Health.UNKNOWN, Health.UNKNOWN, Health.FAULTY, Health.FAULTY):
        watched.seen = InspectionResult([watched.inspection.finding(BROKEN, "a", verdict=verdict)])
        watched.again(0)
    assert told == [("part-broken", "a", False)] * 2


def test_a_finding_after_a_clearing_is_a_new_one(machine: SimulatedMachine, told: Told) -> None:
    watched = Watched(machine, told)
    watched.at(0, "a")
    assert watched.monitor.clear("part-broken") == 1
    machine.clock.pass_s(1)
    watched.at(1, "a")
    assert told == [("part-broken", "a", False), ("part-broken", "a", True), ("part-broken", "a", False)]
    watched.monitor.clear("part-broken")
    watched.at(2)
    assert told[3:] == [("part-broken", "a", True)]


@pytest.mark.parametrize(("boot", "passed_s"), [("boot-1", 0), ("boot-2", 90)])
def test_a_finding_keeps_its_begin_over_a_restart_of_the_agent_but_not_over_a_reboot(
    machine: SimulatedMachine, boot: str, passed_s: int
) -> None:
    began = machine.clock()
    Watched(machine, []).at(0, "a")
    machine.clock.pass_s(90)
    machine.boot = boot

    watched = Watched(machine, [])
    watched.seen = InspectionResult([watched.inspection.finding(BROKEN, "a")])
    watched.inspector.start()
    until(lambda: watched.inspector.inspections > 1)
    watched.inspector.stop()
    assert [found.since_ns for found in watched.monitor.findings()] == [began + passed_s * 1_000_000_000]


def test_a_finding_after_a_reboot_is_a_new_one(machine: SimulatedMachine, told: Told) -> None:
    Watched(machine, told).at(0, "a", "b")
    told.clear()
    machine.boot = "boot-2"
    machine.clock.pass_s(60)
    Watched(machine, told).at(0, "a")
    assert sorted(told) == [("part-broken", "a", False), ("part-broken", "a", True), ("part-broken", "b", True)]


def test_a_finding_is_not_over_while_the_inspection_fails(machine: SimulatedMachine, told: Told) -> None:
    watched = Watched(machine, told)
    watched.at(0, "a")
    watched.seen = CannotInspect("no tool")
    watched.again(10 * OVER_S)
    assert ("part-broken", "a", True) not in told
    watched.at(20 * OVER_S)
    assert ("part-broken", "a", True) in told


def test_the_next_agent_reports_only_the_end_of_a_known_finding(machine: SimulatedMachine, told: Told) -> None:
    Watched(machine, told).at(0, "a")
    told.clear()
    later = Watched(machine, told)
    later.at(0, "a")
    assert told == []
    later.at(1e12)
    assert told == [("part-broken", "a", True)]


def test_no_finding_is_over_before_the_next_agents_first_look(machine: SimulatedMachine, told: Told) -> None:
    Watched(machine, told).at(0, "a")
    told.clear()
    Watched(machine, told).monitor.report_changes(1e12)
    assert told == []


def test_of_thousands_of_findings_only_some_are_reported(machine: SimulatedMachine, told: Told) -> None:
    watched = Watched(machine, told)
    watched.at(0, *(f"part {number}" for number in range(10_000)))
    assert len(told) == MOST_REPORTED


async def test_a_clearing_is_complete_after_the_next_look(machine: SimulatedMachine, told: Told) -> None:
    seen = [BROKEN]
    inspection = scripted(
        machine, lambda: InspectionResult([inspection.finding(one, "a") for one in seen]), interval_s=3600.0
    )
    monitor = Monitor([inspection], machine.kept(), lambda finding, over: None)
    running = asyncio.create_task(monitor.run())
    try:
        while not monitor.findings():  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(0.01)
        seen.clear()
        assert monitor.clear("part-broken") == 1
        assert await monitor.cleared(20)
        assert monitor.findings() == []
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_the_wait_for_a_clearing_ends_although_the_look_hangs(machine: SimulatedMachine, told: Told) -> None:
    watched = Watched(machine, told)
    watched.at(0, "a")
    watched.monitor.clear("part-broken")
    assert not await watched.monitor.cleared(0.05)


async def test_a_silenced_finding_is_neither_reported_nor_shown(machine: SimulatedMachine, told: Told) -> None:
    inspection = scripted(
        machine, lambda: InspectionResult([inspection.finding(UNCLEAR), inspection.finding(BROKEN, "a")])
    )
    both = asyncio.Event()

    def tell(finding: Finding, over: bool) -> None:
        told.append((finding.reason, finding.item, over))
        both.set()

    monitor = Monitor([inspection], machine.kept(), tell, silence=["part-unclear"])
    running = asyncio.create_task(monitor.run())
    try:
        await both.wait()
        assert told == [("part-broken", "a", False)]
        assert [found.reason for found in monitor.findings()] == ["part-broken"]
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_findings_are_reported_at_once_and_the_worst_is_shown_first(machine: SimulatedMachine) -> None:
    told = asyncio.Queue[Finding]()
    inspection = scripted(
        machine, lambda: InspectionResult([inspection.finding(UNCLEAR), inspection.finding(BROKEN, "a")])
    )
    monitor = Monitor([inspection], machine.kept(), lambda finding, over: told.put_nowait(finding))
    running = asyncio.create_task(monitor.run())
    try:
        assert {(await told.get()).reason, (await told.get()).reason} == {"part-unclear", "part-broken"}
        assert [found.reason for found in monitor.findings()] == ["part-broken", "part-unclear"]
        [state] = monitor.states()
        assert state.verdict == "faulty"
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
