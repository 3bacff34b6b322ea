"""Outages of interfaces that jobs use, and of interfaces that no job uses. The interfaces are simulated."""

from __future__ import annotations

import time
from typing import Any

import pytest

from agent.monitor.inspection import Site
from agent.monitor.network import interfaces
from agent.monitor.network.link import LinkInspection, LinkLimits
from agent.monitor.network.netlink import Link, LinkChanges
from everstep.model.finding import Finding, Health, MachineFinding, Owner
from tests.everstep.decisions.act.evict.evict_facts import plan

OWN, BMC, RAIL = "eth0", "enxb03af2b6059f", "eth4"


class Interfaces:
    """A machine with three interfaces. One of them has the agent's address."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], **limits: Any) -> None:
        self.links = {name: Link(index, name) for index, name in enumerate((OWN, BMC, RAIL), 2)}
        site = Site(host="10.0.4.17", variables=lambda: [variables])
        self.inspection = LinkInspection(site, LinkLimits(interval_s=0.01, **limits), {}, same_boot=True)
        self.now_ns = time.monotonic_ns()
        monkeypatch.setattr(interfaces, "looked_at", self._looked_at)
        monkeypatch.setattr(LinkChanges, "open", lambda _: None)
        monkeypatch.setattr(LinkChanges, "wait", lambda *_: False)
        self.inspection.clock_ns = lambda: self.now_ns
        self.inspection.speeds = dict
        self.inspect()

    def _looked_at(self, _host: str, known: dict[str, Any], limits: LinkLimits) -> tuple[dict[str, Link], set[str]]:
        return interfaces.chosen(self.links.values(), known, 2, limits), set(self.links)

    def inspect(self, after_s: float = 0.0) -> list[Finding]:
        self.now_ns += round(after_s * 1e9)
        return self.inspection.inspect().findings

    def goes_down(self, name: str, for_s: float) -> list[Finding]:
        before = self.links[name]
        self.links[name] = Link(before.index, name, carrier=False, downs=before.downs + 1)
        self.inspect(after_s=60)
        found = self.inspect(after_s=for_s)
        self.links[name] = Link(before.index, name, downs=before.downs + 1)
        return found


def leaves(found: list[Finding]) -> bool:
    return bool(plan(*(MachineFinding(machine="m0", finding=each) for each in found), now_ns=time.time_ns()).evict)


@pytest.mark.parametrize(
    ("name", "variables", "limits", "is_used"),
    [
        (OWN, {}, {}, True),
        (BMC, {}, {}, False),
        (BMC, {"NCCL_SOCKET_IFNAME": "^docker,lo"}, {}, False),
        (RAIL, {}, {}, False),
        (RAIL, {"NCCL_SOCKET_IFNAME": "=eth4"}, {}, True),
        (RAIL, {"NCCL_SOCKET_IFNAME": "=eth"}, {}, False),
        (RAIL, {}, {"interfaces": [RAIL]}, True),
    ],
)
def test_only_an_outage_of_an_interface_that_a_job_uses_can_evict(
    monkeypatch: pytest.MonkeyPatch, name: str, variables: dict[str, str], limits: dict[str, Any], is_used: bool
) -> None:
    machine = Interfaces(monkeypatch, variables, **limits)
    down = machine.goes_down(name, for_s=20)
    assert {(each.reason, each.item) for each in down} == {("nic-down", name)}
    assert {(each.verdict, each.owner) for each in down} == {
        (Health.FAULTY, Owner.NETWORK) if is_used else (Health.UNKNOWN, Owner.UNKNOWN)
    }
    assert leaves(down) is is_used
    machine.inspect(after_s=3)
    again = machine.goes_down(name, for_s=3)
    assert "nic-flap-repeated" in {each.reason for each in again}
    assert leaves(again) is is_used


def test_the_agents_interface_counts_as_used_after_it_disappeared(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Interfaces(monkeypatch, {})
    del machine.links[OWN]
    machine.inspect(after_s=60)
    found = machine.inspect(after_s=20)
    assert [(each.reason, each.verdict) for each in found] == [("nic-missing", Health.FAULTY)]
    assert leaves(found)
