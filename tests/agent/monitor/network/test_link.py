"""Links really go down, come back and disappear. They are a veth pair in a separate network namespace."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from agent.monitor.inspection import InspectionResult, Site
from agent.monitor.network.link import LinkInspection, LinkLimits
from everstep.model.finding import Health
from tests.agent.monitor.network.conftest import Ip

SITE = Site(host="10.98.0.1")
Make = Callable[..., "Looker"]


class Looker:
    """One inspection. Its clock moves only when the test moves it."""

    def __init__(self, kept: dict[str, Any], *, same_boot: bool, **limits: Any) -> None:
        self.inspection = LinkInspection(SITE, LinkLimits(**limits), kept, same_boot=same_boot)
        self.now_s = 1000.0
        self.inspection.clock_ns = lambda: round(self.now_s * 1e9)

    def inspect(self, after_s: float = 0.0) -> InspectionResult:
        self.now_s += after_s
        return self.inspection.inspect()

    def verdicts(self, after_s: float = 0.0) -> dict[tuple[str, str], Health]:
        return {(found.reason, found.item): found.verdict for found in self.inspect(after_s).findings}


@pytest.fixture
def make(ip: Ip) -> Iterator[Make]:
    made = []

    def new(kept: dict[str, Any] | None = None, *, same_boot: bool = True, **limits: Any) -> Looker:
        # The kept state has been written and read as JSON.
        state = json.loads(json.dumps(kept or {}))
        made.append(Looker(state, same_boot=same_boot, **({"interval_s": 0.05} | limits)))
        return made[-1]

    yield new
    for looker in made:
        looker.inspection.close()


def test_the_interface_with_the_agents_address_is_looked_at_and_no_other_virtual_one(make: Make) -> None:
    result = make().inspect()

    assert result.findings == []
    assert result.measures['node_network_up{device="eth0"}'] == 1
    assert not [name for name in result.measures if "far0" in name or '"lo"' in name]


def test_a_link_that_stays_down_is_faulty_after_a_grace_and_then_over(make: Make, ip: Ip) -> None:
    looker = make(down_s=10)
    looker.inspect()
    ip("link set far0 down")

    assert looker.verdicts() == {("nic-flap", "eth0"): Health.UNKNOWN}
    found = looker.inspect(10).findings
    assert [(one.reason, one.verdict, one.item) for one in found] == [("nic-down", Health.FAULTY, "eth0")]
    assert found[0].owner == "network" and not found[0].sure
    ip("link set far0 up")
    assert looker.verdicts(20) == {("nic-flap", "eth0"): Health.UNKNOWN}
    assert looker.verdicts(300) == {}


@pytest.mark.parametrize("reason", ["nic-flap", "nic-down"])
def test_what_was_repaired_begins_anew(make: Make, ip: Ip, reason: str) -> None:
    looker = make(down_s=10)
    looker.inspect()
    ip("link set far0 down")
    if reason == "nic-flap":
        ip("link set far0 up")
    assert reason in {code for code, _ in looker.verdicts() | looker.verdicts(10)}
    looker.inspection.forget(reason)
    assert looker.verdicts() == {}
    ip("link set far0 up")
    looker.inspect()
    ip("link set far0 down")
    assert looker.verdicts() == {("nic-flap", "eth0"): Health.UNKNOWN}


def test_a_look_that_is_hurried_does_not_wait(make: Make) -> None:
    looker = make(interval_s=3600)
    looker.inspect()
    for _ in range(2):
        looker.inspection.hurry()
        assert looker.inspect().findings == []


def test_a_look_waits_no_longer_than_an_open_outage_needs(make: Make, ip: Ip) -> None:
    looker = make(down_s=10, interval_s=30)
    looker.inspect()
    assert looker.inspection._wait_s() == 30
    ip("link set far0 down")
    looker.inspect()

    looker.now_s += 4
    assert looker.inspection._wait_s() == 6
    looker.now_s += 6
    assert looker.inspection._wait_s() == 30


def test_flaps_shorter_than_the_look_are_counted(make: Make, ip: Ip) -> None:
    looker = make()
    looker.inspect()
    for _ in range(3):
        ip("link set far0 down")
        ip("link set far0 up")

    first, repeated = looker.inspect().findings

    assert (first.reason, first.verdict) == ("nic-flap", Health.UNKNOWN)
    assert (repeated.reason, repeated.verdict) == ("nic-flap-repeated", Health.UNKNOWN)
    assert "3 times" in first.text


def test_the_second_flap_within_five_minutes_is_a_finding_of_its_own(make: Make, ip: Ip) -> None:
    """A finding is reported only once. So the second flap needs its own finding to be reported."""
    looker = make()
    looker.inspect()
    for after_s, told in ((0, ["nic-flap"]), (299, ["nic-flap", "nic-flap-repeated"]), (2, ["nic-flap"])):
        if after_s != 2:
            ip("link set far0 down")
            ip("link set far0 up")
        found = looker.inspect(after_s).findings
        assert [one.reason for one in found] == told


def test_a_flap_while_no_agent_lived_is_found_by_the_next_one(make: Make, ip: Ip) -> None:
    first = make()
    first.inspect()
    ip("link set far0 down")
    ip("link set far0 up")

    assert make(first.inspection.kept).verdicts() == {("nic-flap", "eth0"): Health.UNKNOWN}


def test_an_outage_goes_on_over_an_agents_restart(make: Make, ip: Ip) -> None:
    first = make(down_s=10)
    first.inspect()
    ip("link set far0 down")
    first.inspect()

    second = make(first.inspection.kept, down_s=10)

    assert second.verdicts(12) == {("nic-down", "eth0"): Health.FAULTY}


@pytest.mark.parametrize("same_boot", [True, False])
def test_a_reboot_is_told_from_a_restart(make: Make, ip: Ip, same_boot: bool) -> None:
    first = make()
    first.inspect()
    ip("link set far0 down")
    ip("link set far0 up")

    found = make(first.inspection.kept, same_boot=same_boot).inspect().findings

    assert bool(found) == same_boot


def test_another_network_namespace_is_no_outage(make: Make) -> None:
    first = make()
    first.inspect()
    kept = {**first.inspection.kept, "namespace": 1, "links": {"eth9": {"index": 1, "downs": 0, "down_ns": None}}}

    assert make(kept).verdicts(100) == {}


def test_an_interface_that_is_gone_is_missing_and_one_made_anew_was_away(make: Make, ip: Ip) -> None:
    looker = make(down_s=10)
    looker.inspect()
    ip("link del eth0")

    assert looker.verdicts() == {("nic-flap", "eth0"): Health.UNKNOWN}
    assert looker.verdicts(10) == {("nic-missing", "eth0"): Health.FAULTY}
    ip("link add eth0 type veth peer name far0")
    ip("link set eth0 up")
    ip("link set far0 up")
    assert looker.verdicts() == {("nic-flap", "eth0"): Health.UNKNOWN}


def test_an_interface_that_is_switched_off_is_said_to_be(make: Make, ip: Ip) -> None:
    looker = make(down_s=0)
    looker.inspect()
    ip("link set eth0 down")

    (found,) = looker.inspect().findings

    assert found.reason == "nic-down" and "switched off" in found.text


def test_a_change_is_seen_at_once(make: Make, ip: Ip) -> None:
    looker = make(interval_s=600)
    looker.inspect()
    seen: list[InspectionResult] = []
    waiting = threading.Thread(target=lambda: seen.append(looker.inspect()))
    waiting.start()

    ip("link set far0 down")

    waiting.join(60)
    assert [found.reason for result in seen for found in result.findings] == ["nic-flap"]


def test_a_slower_link_is_faulty_and_one_whose_speed_is_not_known_is_not(make: Make) -> None:
    looker = make()
    looker.inspection.speeds = lambda: {"eth0": 400_000}
    measures = looker.inspect().measures
    looker.inspection.speeds = lambda: {"eth0": 200_000}
    (found,) = looker.inspect().findings
    looker.inspection.speeds = dict

    assert measures['node_network_speed_bytes{device="eth0"}'] == 50e9
    assert (found.reason, found.verdict, found.item) == ("nic-slow", Health.FAULTY, "eth0")
    assert "200000 Mbit/s, 400000 before" in found.evidence[0]
    assert looker.verdicts() == {}


def test_the_drivers_speed_is_asked(make: Make) -> None:
    assert make().inspect().measures['node_network_speed_bytes{device="eth0"}'] > 0


def test_a_site_names_its_interfaces_and_those_to_ignore(make: Make, ip: Ip) -> None:
    ip("link add ib0 type veth peer name ib1")
    ip("link set ib0 up")
    ip("link set ib1 up")
    result = make(interfaces=["ib*", "eth7"]).inspect()

    assert [(found.reason, found.item, found.verdict) for found in result.findings] == [
        ("nic-not-found", "eth7", Health.UNKNOWN)
    ]
    assert 'node_network_up{device="ib0"}' in result.measures
    assert make(ignore=["eth*"]).inspect().note == "no network interface to inspect"


def test_what_a_site_ignores_is_not_missing_any_more(make: Make, ip: Ip) -> None:
    first = make()
    first.inspect()
    ip("link del eth0")

    assert make(first.inspection.kept, ignore=["eth0"], down_s=0).verdicts() == {}
