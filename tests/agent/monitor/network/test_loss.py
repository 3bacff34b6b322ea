"""Lost segments and packets of a machine, from counters of a simulated machine and from real ones."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agent.monitor.inspection import InspectionResult, Site
from agent.monitor.network import netlink
from agent.monitor.network.loss import LossLimits, PacketLossInspection, tcp_counters
from agent.monitor.network.netlink import Link
from everstep.errors import CannotInspect
from everstep.model.finding import Health
from tests.agent.monitor.network.conftest import Ip

NO_TRAFFIC = dict.fromkeys(netlink.STATISTICS, 0)


class Machine:
    """A machine whose network counters a test sets."""

    def __init__(self, proc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.proc = proc
        (proc / "net").mkdir()
        self.link = Link(4, "eth0", statistics=NO_TRAFFIC)
        monkeypatch.setattr(netlink, "links", lambda: {"eth0": self.link})
        monkeypatch.setattr(netlink, "addresses", dict)
        self.tcp(0, 0)
        self.inspection = PacketLossInspection(Site(proc=proc), LossLimits(), {}, same_boot=True)

    def restart(self, *, same_boot: bool = True, **limits: Any) -> None:
        kept = json.loads(json.dumps(self.inspection.kept))
        self.inspection = PacketLossInspection(Site(proc=self.proc), LossLimits(**limits), kept, same_boot=same_boot)

    def tcp(self, sent: int, again: int) -> None:
        text = f"Ip: Forwarding\nIp: 1\nTcp: InSegs OutSegs RetransSegs\nTcp: 5 {sent} {again}\n"
        (self.proc / "net/snmp").write_text(text)

    def counters(self, **counters: int) -> None:
        self.link = replace(self.link, statistics={**self.link.statistics, **counters})

    def inspect(self) -> InspectionResult:
        return self.inspection.inspect()

    def reasons(self) -> list[str]:
        return [found.reason for found in self.inspect().findings]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


def test_loss_is_told_when_two_looks_in_a_row_see_it_and_blames_nobody(machine: Machine) -> None:
    machine.inspect()
    machine.tcp(100_000, 2_000)
    assert machine.reasons() == []
    machine.restart()
    machine.tcp(200_000, 4_000)

    (found,) = machine.inspect().findings

    assert (found.reason, found.verdict, found.owner) == ("packet-loss", Health.UNKNOWN, "network")
    assert found.evidence == ["2000 of 100000 segments were retransmitted (2.0%)"]
    machine.tcp(300_000, 4_000)
    assert machine.reasons() == []
    machine.tcp(400_000, 6_000)
    assert machine.reasons() == [], "the count of looks with loss began again"


def test_few_segments_say_nothing(machine: Machine) -> None:
    machine.restart(consecutive=1)
    machine.inspect()
    machine.tcp(9_999, 9_999)

    assert machine.reasons() == []


def test_counters_that_fall_and_a_reboot_conclude_nothing(machine: Machine) -> None:
    machine.restart(consecutive=1)
    machine.tcp(10**6, 10**5)
    machine.inspect()
    machine.tcp(10**5, 5 * 10**4)
    assert machine.reasons() == []
    machine.tcp(2 * 10**5, 10**5)
    machine.restart(consecutive=1, same_boot=False)
    assert machine.reasons() == []


def test_damaged_and_dropped_packets_of_an_interface_are_told(machine: Machine) -> None:
    machine.restart(consecutive=1)
    machine.inspect()
    machine.counters(rx_packets=100_000, rx_errors=200, rx_missed_errors=2_000, tx_dropped=5)

    found = machine.inspect().findings

    assert [(one.reason, one.item, one.verdict) for one in found] == [
        ("nic-errors", "eth0", Health.UNKNOWN),
        ("nic-drops", "eth0", Health.UNKNOWN),
    ]
    assert "rx_missed_errors grew by 2000, tx_dropped grew by 5" in found[1].evidence[0]


def test_packets_that_nobody_wants_are_no_loss(machine: Machine) -> None:
    machine.restart(consecutive=1)
    machine.inspect()
    machine.counters(rx_packets=100_000, rx_dropped=50_000)

    assert machine.reasons() == []


def test_an_interface_that_was_made_anew_is_not_compared(machine: Machine) -> None:
    machine.restart(consecutive=1)
    machine.inspect()
    machine.link = replace(machine.link, index=9)
    machine.counters(rx_packets=100_000, rx_errors=90_000)

    assert machine.reasons() == []


@pytest.mark.parametrize("text", ["", "Tcp: OutSegs\n", "Tcp: OutSegs RetransSegs\nTcp: 1\n", "Tcp: A B\nTcp: 1 2\n"])
def test_a_kernel_that_does_not_count_is_told(text: str, tmp_path: Path) -> None:
    (tmp_path / "net").mkdir()
    (tmp_path / "net/snmp").write_text(text)
    with pytest.raises(CannotInspect, match="no counters of TCP segments"):
        tcp_counters(tmp_path)


def test_real_counters_are_measured(ip: Ip) -> None:
    result = PacketLossInspection(Site(host="10.98.0.1"), LossLimits(), {}, same_boot=True).inspect()

    assert result.measures['node_network_receive_bytes_total{device="eth0"}'] >= 0
    assert result.measures["node_netstat_Tcp_OutSegs"] >= 0
    assert result.findings == []
