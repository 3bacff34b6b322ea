"""The inspection of InfiniBand ports, with files like those of drivers in /sys/class/infiniband."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from agent.monitor.inspection import InspectionResult, RankSeen, Site
from agent.monitor.network.infiniband import InfinibandInspection, InfinibandLimits
from agent.monitor.network.infiniband_ports import number_at_start
from everstep.model.finding import Health, Owner

NAME = "mlx5_0 port 1"


class Machine:
    """A machine with InfiniBand ports and their inspection. The test moves the inspection's clock."""

    def __init__(self, sys: Path) -> None:
        self.sys = sys
        self.ranks: list[RankSeen] = []
        self.variables: dict[str, str] = {}
        self.now_s = 1000.0
        self.add("mlx5_0")
        self.inspection = self.inspecting({})

    def add(self, device: str, **files: str) -> None:
        defaults = {"state": "4: ACTIVE", "phys_state": "5: LinkUp", "rate": "400 Gb/sec (4X NDR)"}
        counters = dict.fromkeys(("link_downed", "symbol_error", "port_rcv_data", "port_xmit_data"), "0")
        for name, text in (defaults | {"link_layer": "InfiniBand"}).items():
            self.write(device, name, files.get(name, text))
        for name, text in counters.items():
            self.write(device, f"counters/{name}", text)

    def write(self, device: str, name: str, text: str) -> None:
        path = self.sys / "class/infiniband" / device / "ports/1" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")

    def set(self, **files: Any) -> None:
        for name, value in files.items():
            self.write("mlx5_0", name if name in ("state", "rate") else f"counters/{name}", str(value))

    def restart(self, *, same_boot: bool = True, **limits: Any) -> None:
        kept = json.loads(json.dumps(self.inspection.kept))
        self.inspection = self.inspecting(kept, same_boot=same_boot, **limits)

    def inspecting(self, kept: dict[str, Any], *, same_boot: bool = True, **limits: Any) -> InfinibandInspection:
        site = Site(sys=self.sys, ranks=lambda: self.ranks, variables=lambda: [self.variables])
        settings = InfinibandLimits(**({"interval_s": 0.001} | limits))
        inspection = InfinibandInspection(site, settings, kept, same_boot=same_boot)
        inspection.clock_ns = lambda: round(self.now_s * 1e9)
        return inspection

    def inspect(self, after_s: float = 0.0) -> InspectionResult:
        self.now_s += after_s
        return self.inspection.inspect()

    def verdicts(self, after_s: float = 0.0) -> dict[tuple[str, str], Health]:
        return {(found.reason, found.item): found.verdict for found in self.inspect(after_s).findings}


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_a_healthy_port_is_measured_and_data_are_counted_in_words(machine: Machine) -> None:
    machine.set(port_xmit_data=1000)

    result = machine.inspect()

    label = '{device="mlx5_0",port="1"}'
    assert result.findings == []
    assert result.measures[f"node_infiniband_state_id{label}"] == 4
    assert result.measures[f"node_infiniband_rate_bytes_per_second{label}"] == 50e9
    assert result.measures[f"node_infiniband_port_data_transmitted_bytes_total{label}"] == 4000


def test_a_machine_without_infiniband_has_nothing_to_inspect(tmp_path: Path) -> None:
    result = InfinibandInspection(Site(sys=tmp_path), InfinibandLimits(), {}, same_boot=True).inspect()

    assert (result.findings, result.note) == ([], "no InfiniBand or RoCE device")


def test_a_port_that_stays_down_is_faulty_after_a_grace_period(machine: Machine) -> None:
    machine.inspect()
    machine.set(state="1: DOWN", link_downed=1)

    assert machine.verdicts() == {("ib-port-flap", NAME): Health.UNKNOWN}
    assert machine.verdicts(10) == {("ib-port-down", NAME): Health.FAULTY}
    machine.set(state="4: ACTIVE")
    assert machine.verdicts() == {("ib-port-flap", NAME): Health.UNKNOWN}
    assert machine.verdicts(300) == {}


@pytest.mark.parametrize(
    ("variables", "limits", "verdict"),
    [
        ({}, {}, Health.FAULTY),  # NCCL uses every active port
        ({"NCCL_IB_HCA": "=mlx5_0"}, {}, Health.FAULTY),
        ({"NCCL_IB_HCA": "^mlx5_0"}, {}, Health.UNKNOWN),
        ({"NCCL_IB_HCA": "mlx5_0:2"}, {}, Health.UNKNOWN),
        ({"NCCL_IB_DISABLE": "1"}, {}, Health.UNKNOWN),
        ({"NCCL_IB_HCA": "mlx5_1"}, {"interfaces": ["mlx5_0"]}, Health.FAULTY),
    ],
)
def test_a_port_that_no_job_uses_is_no_fault(
    machine: Machine, variables: dict[str, str], limits: dict[str, Any], verdict: Health
) -> None:
    machine.variables = variables
    machine.restart(**limits)
    machine.inspect()
    machine.set(state="1: DOWN", link_downed=1)
    machine.inspect(after_s=1)
    [found] = [each for each in machine.inspect(after_s=20).findings if each.reason == "ib-port-down"]
    assert found.verdict is verdict
    assert (found.owner is Owner.NETWORK) == (verdict is Health.FAULTY)


def test_a_port_without_traffic_while_ranks_run_counts_as_unused(machine: Machine) -> None:
    machine.add("mlx5_9")
    machine.ranks = [RankSeen("gpt", 0, 4711, alive=True)]
    machine.inspect()
    machine.set(port_xmit_data=10**9)
    machine.inspect(after_s=30)
    for device in ("mlx5_0", "mlx5_9"):
        machine.write(device, "state", "1: DOWN")
    machine.ranks = []
    machine.restart()
    machine.inspect(after_s=1)
    verdicts = machine.verdicts(after_s=20)
    assert verdicts["ib-port-down", NAME] is Health.FAULTY, "this port carried the job's traffic before it went down"
    assert verdicts["ib-port-down", "mlx5_9 port 1"] is Health.UNKNOWN


def test_a_port_that_may_be_down_is_inspected_again_soon(machine: Machine) -> None:
    machine.restart(interval_s=30)
    machine.inspect()
    assert machine.inspection._wait_s() == 30
    machine.inspection._must_wait = False
    machine.set(state="2: INIT")
    machine.inspect()

    assert machine.inspection._wait_s() == 10


def test_a_port_that_was_never_active_is_not_judged(machine: Machine) -> None:
    machine.add("mlx5_1", state="1: DOWN")

    assert machine.verdicts() == {}
    assert machine.verdicts(100) == {}


def test_flaps_between_looks_and_between_agents_are_counted(machine: Machine) -> None:
    machine.inspect()
    machine.set(link_downed=2)
    found, repeated = machine.inspect().findings
    machine.restart()
    machine.set(link_downed=3)
    later, _ = machine.inspect(30).findings

    assert (found.reason, found.verdict) == ("ib-port-flap", Health.UNKNOWN)
    assert (repeated.reason, repeated.verdict) == ("ib-port-flap-repeated", Health.UNKNOWN)
    assert "2 times" in found.text and "3 times" in later.text


def test_after_a_reboot_counters_begin_again(machine: Machine) -> None:
    machine.set(link_downed=7)
    machine.inspect()
    machine.set(link_downed=9)
    machine.restart(same_boot=False)

    assert machine.verdicts() == {}


def test_a_counter_that_falls_leads_to_no_finding(machine: Machine) -> None:
    machine.set(link_downed=7, symbol_error=5000)
    machine.inspect()
    machine.set(link_downed=0, symbol_error=0)

    assert machine.verdicts(30) == {}


@pytest.mark.parametrize("text", ["N/A (no PMA)", "", "what"])
def test_a_counter_that_the_driver_lacks_leads_to_no_finding(machine: Machine, text: str) -> None:
    machine.inspect()
    machine.set(link_downed=text, symbol_error=text)
    result = machine.inspect(30)

    assert result.findings == []
    assert not [name for name in result.measures if "symbol" in name]


@pytest.mark.parametrize(
    ("counter", "by", "after_s", "reason"),
    [
        ("local_link_integrity_errors", 1, 30, "ib-link-errors"),
        ("excessive_buffer_overrun_errors", 1, 30, "ib-link-errors"),
        ("symbol_error", 121, 30, "ib-link-errors"),
        ("symbol_error", 120, 30, ""),
        ("link_error_recovery", 6, 30, "ib-errors"),
        ("link_error_recovery", 5, 30, ""),
        ("port_rcv_errors", 301, 30, "ib-errors"),
        ("port_rcv_errors", 300, 30, ""),
        ("port_xmit_discards", 3001, 30, "ib-errors"),
    ],
)
def test_errors_beyond_the_limits_are_findings(
    machine: Machine, counter: str, by: int, after_s: float, reason: str
) -> None:
    machine.set(**{counter: 1000})
    machine.inspect()
    machine.set(**{counter: 1000 + by})

    found = machine.inspect(after_s).findings

    assert [one.reason for one in found] == ([reason] if reason else [])
    assert all(one.evidence == [f"{counter} grew by {by} in 30 s"] for one in found)
    if reason:
        assert machine.verdicts(299), "the errors count for five minutes"
        assert machine.verdicts(2) == {}


def test_a_site_may_ignore_counters_and_devices(machine: Machine) -> None:
    machine.restart(ignore_counters=["symbol_error"])
    machine.inspect()
    machine.set(symbol_error=10_000)
    assert machine.verdicts(30) == {}

    machine.restart(ignore=["mlx5_*"])
    machine.set(state="1: DOWN")
    result = machine.inspect(100)
    assert (result.findings, result.measures) == ([], {})


def test_a_device_in_the_settings_that_was_never_present_is_a_finding(machine: Machine) -> None:
    machine.restart(interfaces=["mlx5_0", "mlx5_9"])

    assert machine.verdicts() == {("ib-port-missing", "mlx5_9"): Health.UNKNOWN}


def test_a_slower_port_is_faulty(machine: Machine) -> None:
    machine.inspect()
    machine.set(rate="200 Gb/sec (2X NDR)")

    (found,) = machine.inspect().findings

    assert (found.reason, found.verdict) == ("ib-rate", Health.FAULTY)
    assert found.evidence == ["200 Gbit/s, 400 before"]


def test_a_device_that_disappeared_is_missing(machine: Machine) -> None:
    machine.inspect()
    shutil.rmtree(machine.sys / "class/infiniband/mlx5_0")
    machine.inspect()

    assert machine.verdicts(10) == {("ib-port-missing", NAME): Health.FAULTY}


def test_an_unreadable_state_does_not_count_as_down(machine: Machine) -> None:
    machine.inspect()
    machine.set(state="")

    assert machine.verdicts(100) == {("ib-unreadable", NAME): Health.UNKNOWN}


def test_an_end_of_traffic_while_the_same_ranks_live_is_a_finding(machine: Machine) -> None:
    machine.ranks = [RankSeen("gpt", 0, 41, alive=True)]
    machine.inspect()
    machine.set(port_xmit_data=10**9)
    assert machine.verdicts(30) == {}
    machine.set(port_xmit_data=10**9 + 100)
    assert machine.verdicts(599) == {}
    machine.restart()

    assert machine.verdicts(1) == {("rdma-idle", ""): Health.UNKNOWN}
    machine.set(port_xmit_data=2 * 10**9)
    assert machine.verdicts(30) == {}


@pytest.mark.parametrize("pids", [[], [42]])
def test_new_ranks_may_have_no_traffic(machine: Machine, pids: list[int]) -> None:
    machine.ranks = [RankSeen("gpt", 0, 41, alive=True)]
    machine.inspect()
    machine.set(port_rcv_data=10**9)
    machine.inspect(30)
    machine.ranks = [RankSeen("gpt", 0, pid, alive=True) for pid in pids]

    assert machine.verdicts(700) == {}
    assert machine.verdicts(700) == {}


def test_a_waiting_look_returns_when_the_inspection_is_closed(machine: Machine) -> None:
    machine.restart(interval_s=600)
    machine.inspect()
    waiting = threading.Thread(target=machine.inspect)
    waiting.start()

    machine.inspection.close()

    waiting.join(60)
    assert not waiting.is_alive()


@pytest.mark.parametrize(
    ("text", "number"), [("4: ACTIVE", 4), ("400 Gb/sec (4X NDR)", 400), ("2.5 Gb/sec", 2.5), ("N/A (no PMA)", None)]
)
def test_values_in_driver_files_are_parsed(text: str, number: float | None) -> None:
    assert number_at_start(text) == number


def test_a_repaired_fault_is_counted_from_the_repair(machine: Machine) -> None:
    machine.restart(down_s=10)
    machine.inspect()
    machine.set(symbol_error=1000, rate="200 Gb/sec (4X HDR)", link_downed=1)
    found = {reason for reason, _ in machine.verdicts(1)}
    assert found == {"ib-link-errors", "ib-errors", "ib-rate", "ib-port-flap"}
    for reason in sorted(found):
        machine.inspection.forget(reason)
        found.discard(reason)
        assert {one for one, _ in machine.verdicts(1)} == found
    machine.set(state="1: DOWN")
    machine.inspect(1)
    assert {reason for reason, _ in machine.verdicts(20)} == {"ib-port-down"}
    machine.inspection.forget("ib-port-down")
    assert machine.verdicts(20) == {}


def test_a_hurried_look_does_not_wait(machine: Machine) -> None:
    machine.restart(interval_s=3600)
    machine.inspect()
    for _ in range(2):
        machine.inspection.hurry()
        machine.inspect()
