"""Inspections of fake GPUs over several looks, restarts and reboots. Some tests use the real reading process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agent.monitor.gpu import pci
from agent.monitor.gpu.fake import FakeReader
from agent.monitor.gpu.inspection import SURE_FROM_MISS, TEARDOWN_S, GpuInspection
from agent.monitor.gpu.process import GpuProcess, GpusSilent
from agent.monitor.gpu.reading import GpuReading, GpusReading, GpuTrouble
from agent.monitor.gpu.rules.rule import GpuLimits
from agent.monitor.inspection import Inspection, InspectionResult, RankSeen, Site
from agent.monitor.kept import KeptStates
from agent.monitor.monitor import Monitor
from agent.monitor.settings import MonitorSettings
from agent.needs import GPUS
from everstep.errors import CannotInspect, ConfigError
from everstep.model.finding import Finding, Health
from everstep.system import procfs

SECOND_NS = 10**9
HANGS_S = 0.2


class Machine:
    """A machine with fake GPUs, and the inspection of its agent, which may restart."""

    def __init__(self, root: Path) -> None:
        self.path = root / "gpus.json"
        self.now_ns = 10**18
        self.site = Site(sys=root / "sys", proc=root / "proc", fake_gpus=self.path, now_ns=lambda: self.now_ns)
        self.inspection = GpuInspection(self.site, GpuLimits(consecutive=1), {}, same_boot=True)

    def inspect(self, *gpus: dict[str, Any], **described: Any) -> list[Finding]:
        """Let 10 s pass, give the machine these GPUs, and return the findings."""
        self.path.write_text(json.dumps({"gpus": list(gpus)} | described))
        self.now_ns += 10 * SECOND_NS
        return self.inspection.inspect().findings

    def end(self) -> None:
        assert self.inspection._process.end()

    def restart(self, *, reboot: bool = False, **limits: Any) -> None:
        self.end()
        kept = json.loads(json.dumps(self.inspection.kept))
        self.inspection = GpuInspection(self.site, GpuLimits(consecutive=1, **limits), kept, same_boot=not reboot)


class Direct:
    """Replaces the reading process. The same reader runs in this process instead."""

    pid = 0

    def __init__(self, arguments: Sequence[str] = ()) -> None:
        self._arguments = [*arguments]

    def read(self, answer_s: float, start_s: float) -> GpusReading:
        assert self._arguments[0] == "--fake"
        return FakeReader(Path(self._arguments[1])).read()

    def end(self) -> bool:
        return True


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setattr("agent.monitor.gpu.inspection.GpuProcess", Direct)
    return Machine(tmp_path)


@pytest.fixture
def whole(tmp_path: Path) -> Iterator[Machine]:
    """A machine with the real reading process."""
    made = Machine(tmp_path)
    yield made
    made.end()


def said(findings: list[Finding]) -> set[tuple[str, str, Health]]:
    return {(found.reason, found.item, found.verdict) for found in findings}


COUNT = {("gpu-count", "GPU 0000:02:00", Health.FAULTY)}
HOT: dict[str, Any] = {"temperature_c": 90}
OK: dict[str, Any] = {}


def test_a_cleared_finding_about_missing_parts_does_not_come_back(machine: Machine) -> None:
    machine.inspect(OK, {"nvlinks_down": []})
    found = said(machine.inspect({"nvlinks_down": [3]}))
    assert {reason for reason, *_ in found} == {"gpu-count", "gpu-nvlink-down"}
    machine.inspection.forget("gpu-count")
    assert {reason for reason, *_ in said(machine.inspect({"nvlinks_down": [3]}))} == {"gpu-nvlink-down"}
    machine.inspection.forget("gpu-nvlink-down")
    assert machine.inspect({"nvlinks_down": [3]}) == []
    assert {reason for reason, *_ in said(machine.inspect({"nvlinks_down": [3, 4]}))} == {"gpu-nvlink-down"}


def test_healthy_gpus(machine: Machine) -> None:
    assert machine.inspect(OK, OK) == []
    result = machine.inspection.inspect()
    labels = '{gpu="1",UUID="GPU-fake-0000:02:00.0",pci_bus_id="0000:02:00.0",modelName="Fake H100 80GB HBM3"}'
    assert result.measures["gpu_count"] == 2
    assert result.measures[f"DCGM_FI_DEV_GPU_TEMP{labels}"] == 45
    assert result.measures[f"DCGM_FI_DEV_FB_USED{labels}"] == 0
    assert result.measures[f"gpu_nvlinks_up{labels}"] == 18
    assert result.facts == {"nvidia driver": "fake", "gpus": "2 Fake H100 80GB HBM3", "gpu power limit": "700 W"}


def test_a_lost_gpu_keeps_its_name(machine: Machine) -> None:
    machine.inspect(OK, OK, OK)
    (found,) = machine.inspect(OK, {"lost": True}, OK)
    assert said([found]) == {("gpu-lost", "GPU 0000:02:00", Health.FAULTY)}
    assert found.sure


def test_a_lost_gpu_that_was_never_readable_gets_the_only_unused_address(machine: Machine) -> None:
    assert said(machine.inspect(OK, {"lost": True}, OK)) == {("gpu-lost", "GPU 0000:02:00", Health.FAULTY)}
    machine.inspection.kept.clear()
    found = machine.inspect(OK, {"lost": True}, {"lost": True})
    assert {one.item for one in found} == {"GPU 1", "GPU 2"}, "it is unknown which lost GPU has which PCI address"


def test_several_lost_gpus_keep_their_names(machine: Machine) -> None:
    machine.inspect(OK, OK, OK)
    for _ in range(3):
        found = machine.inspect(OK, {"lost": True}, {"lost": True})
        assert {one.item for one in found} == {"GPU 0000:02:00", "GPU 0000:03:00"}


def test_a_lost_gpu_does_not_get_the_name_of_another_gpu(machine: Machine) -> None:
    """If a GPU is missing, the driver gives the others new numbers.

    Here number 0 then has the address that number 1 had before.
    """
    machine.inspect(OK, OK, OK)
    found = {one.reason: one.item for one in machine.inspect({"missing": True}, OK, {"lost": True})}
    assert found == {"gpu-lost": "GPU 1", "gpu-count": ""}


def test_a_gpu_that_the_driver_does_not_list_is_missing(machine: Machine) -> None:
    machine.inspect(OK, OK)
    (found,) = machine.inspect(OK, {"missing": True})
    assert said([found]) == COUNT
    assert (found.sure, found.evidence) == (True, ["1 of 2 GPUs are present"])
    assert machine.inspect(OK, OK) == []


@pytest.mark.parametrize("reboot", [False, True])
def test_a_gpu_that_left_the_bus_is_missing_also_after_a_restart_or_reboot(machine: Machine, reboot: bool) -> None:
    machine.inspect(OK, OK)
    assert said(machine.inspect(OK)) == COUNT
    machine.restart(reboot=reboot)
    assert said(machine.inspect(OK)) == COUNT


def test_the_settings_can_give_the_expected_number_of_gpus(machine: Machine) -> None:
    machine.inspect(OK, OK)
    machine.restart(gpus=1)
    assert machine.inspect(OK) == []
    machine.restart(gpus=3)
    (found,) = machine.inspect(OK, OK)
    assert (found.reason, found.item, found.text) == ("gpu-count", "", "GPUs are missing: 2 of 3 GPUs are present")


def test_a_memory_error_counts_until_the_gpu_is_reset(machine: Machine) -> None:
    ecc = {("gpu-ecc", "GPU 0000:01:00", Health.FAULTY)}
    assert machine.inspect({"ecc_uncorrected": 2}) == []
    assert said(machine.inspect({"ecc_uncorrected": 3})) == ecc
    machine.restart()
    assert said(machine.inspect({"ecc_uncorrected": 3})) == ecc
    assert machine.inspect({"ecc_uncorrected": 0}) == []


def test_a_memory_error_between_two_agents_is_found_unless_the_machine_rebooted(machine: Machine) -> None:
    machine.inspect({"ecc_uncorrected": 2})
    machine.restart()
    assert len(machine.inspect({"ecc_uncorrected": 4})) == 1
    machine.restart(reboot=True)
    assert machine.inspect({"ecc_uncorrected": 9}) == []


def test_nvlinks_are_expected_again_after_a_reboot(machine: Machine) -> None:
    machine.inspect(OK)
    machine.restart(reboot=True)
    assert said(machine.inspect({"nvlinks_down": [3]})) == {("gpu-nvlink-down", "GPU 0000:01:00", Health.FAULTY)}


def test_a_driver_that_does_not_answer_is_first_unknown_and_then_faulty(whole: Machine) -> None:
    whole.inspect(HOT)
    whole.inspection.limits = GpuLimits(answer_s=0.05, start_s=0.1)
    found = whole.inspect(HOT, hang_s=1000)
    assert said(found) == {
        ("gpu-driver-hangs", "", Health.UNKNOWN),
        ("gpu-hot", "GPU 0000:01:00", Health.FAULTY),
    }, "a known finding stays while the GPUs cannot be read"
    found = whole.inspect(HOT, hang_s=1000)
    assert ("gpu-driver-hangs", "", Health.FAULTY) in said(found)
    assert not any(one.sure for one in found), "SIGKILL could end the reading process, so it did not wait in the driver"
    whole.inspection.limits = GpuLimits()
    assert whole.inspect(OK) == []
    whole.inspection.limits = GpuLimits(answer_s=0.05, start_s=0.1)
    assert said(whole.inspect(OK, hang_s=1000)) == {("gpu-driver-hangs", "", Health.UNKNOWN)}, (
        "after a good look, silent looks are counted from 1 again"
    )


def test_an_unkillable_reading_process_is_a_sure_fault_and_is_not_replaced(
    whole: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later agent does not start a second process either."""
    whole.inspect(OK)
    pid = whole.inspection._process.pid

    def silent(self: GpuProcess, answer_s: float, start_s: float) -> GpusReading:
        raise GpusSilent("no answer", stuck=True)

    with monkeypatch.context() as patched:
        patched.setattr(GpuProcess, "read", silent)
        (first,) = whole.inspect(OK)
        later = [whole.inspect(OK)[0] for _ in range(SURE_FROM_MISS - 1)]
    assert (first.verdict, first.sure) == (Health.UNKNOWN, False)
    assert {found.verdict for found in later} == {Health.FAULTY}
    assert [found.sure for found in later] == [False] * (SURE_FROM_MISS - 2) + [True]
    assert whole.inspection.kept["stuck"][0] == pid
    kept = json.loads(json.dumps(whole.inspection.kept))
    next_agent = GpuInspection(whole.site, GpuLimits(), kept, same_boot=True)
    (found,) = next_agent.inspect().findings
    assert found.sure
    assert next_agent._process.pid == 0
    whole.inspection._process.end()
    assert next_agent.inspect().findings == []
    assert next_agent._process.end()


@pytest.mark.parametrize("is_ending", [True, False])
def test_a_driver_that_does_not_answer_while_ranks_end_is_busy(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, is_ending: bool
) -> None:
    def silent(self: Direct, answer_s: float, start_s: float) -> GpusReading:
        raise GpusSilent("no answer", stuck=True)

    rank = procfs.ProcessInfo(4711, "python3", "D", 1, 1, 1, flags=procfs.EXITING if is_ending else 0)
    monkeypatch.setattr("agent.monitor.gpu.inspection.procfs.process_of", lambda pid, *_: rank if pid == 4711 else None)
    monkeypatch.setattr(Direct, "read", silent)
    machine.path.write_text("{}")
    machine.site = replace(machine.site, ranks=lambda: [RankSeen("gpt", 0, 4711, alive=True)])
    machine.inspection = GpuInspection(machine.site, GpuLimits(), {}, same_boot=True)
    verdicts = []
    for _ in range(20):
        machine.now_ns += 10 * SECOND_NS
        [found] = machine.inspection.inspect().findings
        verdicts.append((found.verdict, found.sure))
    busy = round(TEARDOWN_S / 10) if is_ending else 0
    assert verdicts[: busy + 1] == [(Health.UNKNOWN, False)] * (busy + 1)
    assert verdicts[busy + 1] == (Health.FAULTY, False), "a driver that hangs is found although ranks are still ending"
    assert verdicts[-1] == (Health.FAULTY, True)


def test_a_missing_gpu_that_was_never_seen_may_belong_to_another_tenant(machine: Machine) -> None:
    (found,) = machine.inspect(OK, {"missing": True})
    assert (found.reason, found.verdict, found.sure) == ("gpu-count", Health.UNKNOWN, False)
    machine.restart(gpus=2)
    (found,) = machine.inspect(OK, {"missing": True})
    assert (found.verdict, found.sure) == (Health.FAULTY, True), (
        "the settings expect two GPUs for jobs, so the missing one is a fault"
    )


def test_a_gpu_is_noted_as_healthy_if_its_driver_requests_no_recovery(machine: Machine) -> None:
    machine.inspect({"recovery_action": 1}, OK, {"temperature_c": 95})
    assert machine.site.healthy_gpus == {"GPU 0000:02:00": machine.now_ns}
    machine.inspect(OK, {"lost": True}, OK)
    assert machine.site.healthy_gpus["GPU 0000:01:00"] == machine.now_ns
    assert machine.site.healthy_gpus["GPU 0000:02:00"] < machine.now_ns


def test_a_crash_in_the_driver_is_no_verdict(whole: Machine) -> None:
    whole.inspect(OK)
    with pytest.raises(CannotInspect, match="the process that reads GPUs ended"):
        whole.inspect(OK, crash=True)
    assert whole.inspect(OK) == []


def test_the_reading_process_is_ended_if_a_gpu_has_to_be_reset(whole: Machine) -> None:
    """A GPU cannot be reset while a process has it open."""
    whole.inspect(HOT)
    pid = whole.inspection._process.pid
    whole.inspect(HOT)
    assert whole.inspection._process.pid == pid
    whole.inspect({"reset_required": True})
    assert whole.inspection._process.pid == 0


def test_knowledge_about_fake_gpus_is_not_applied_to_real_gpus(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GpuInspection, "dev", tmp_path)
    machine.inspect(OK, OK)
    machine.path.unlink()
    assert machine.inspection.inspect() == InspectionResult(note="no NVIDIA GPU")
    assert machine.inspection._process.pid == 0, "without GPUs there is no reading process"


def test_all_gpus_gone_from_the_bus_are_missing(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GpuInspection, "dev", tmp_path)
    machine.path.unlink(missing_ok=True)
    machine.inspection.kept.update(source="nvml", most=2, places={"0": "0000:01:00.0", "1": "0000:02:00.0"})
    assert {found.item for found in machine.inspection.inspect().findings} == {"GPU 0000:01:00", "GPU 0000:02:00"}


def test_gpus_that_the_agent_may_not_use_do_not_count(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container may have no access to the machine's GPUs. That is a fault only if the settings expect GPUs."""
    reading = GpusReading(GpuTrouble.LIBRARY_MISSING, "no library")
    monkeypatch.setattr(pci, "worth_reading", lambda *_: True)
    monkeypatch.setattr(Direct, "read", lambda *_: reading)
    machine.path.unlink(missing_ok=True)
    note = f"the machine has NVIDIA GPUs, but the agent may not use any; {GPUS.remedy()}"
    assert machine.inspection.inspect().note == note
    machine.restart(gpus=8)
    assert said(machine.inspection.inspect().findings) == {("gpu-driver-missing", "", Health.FAULTY)}


def test_every_reason_that_is_found_is_declared(machine: Machine) -> None:
    sick = {"remap_pending": True, "recovery_action": 1, "pcie_width": 8, "clocks_event_reasons": 64}
    found = machine.inspect(sick, {"clocks_event_reasons": 128, "fabric_status": 5}, {"remap_failed": True})
    declared = {reason.code for reason in GpuInspection.reasons}
    assert len(declared) == len(GpuInspection.reasons)
    assert len({one.reason for one in found}) == 7
    assert {one.reason for one in found} <= declared


def test_settings_are_checked() -> None:
    with pytest.raises(ConfigError, match="deadline_s must be more than start_s"):
        MonitorSettings.parse({"gpu": {"start_s": 60}}, {"gpu": GpuLimits}, set(), "monitor.toml")


class _Quick(Inspection):
    name = "quick"
    inspects = "nothing"
    reasons = ()

    def inspect(self) -> InspectionResult:
        return InspectionResult()


async def test_a_driver_that_hangs_delays_no_other_inspection(whole: Machine, tmp_path: Path) -> None:
    whole.path.write_text(json.dumps({"hang_s": 1000}))
    limits = GpuLimits(interval_s=0.01, answer_s=HANGS_S, start_s=HANGS_S)
    whole.inspection = GpuInspection(whole.site, limits, {}, same_boot=True)
    quick = _Quick(whole.site, GpuLimits(interval_s=0.01), {}, same_boot=True)
    folder = tmp_path / "live"
    folder.mkdir(mode=0o700)
    told: list[tuple[str, Health]] = []
    faulty = asyncio.Event()

    def tell(found: Finding, over: bool) -> None:
        told.append((found.reason, found.verdict))

    monitor = Monitor([whole.inspection, quick], KeptStates(folder), tell)
    task = asyncio.create_task(monitor.run())
    async with asyncio.timeout(60):
        while not any(found.verdict is Health.FAULTY for found in monitor.findings()):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.01):
                    await faulty.wait()
    gpu, other = monitor.states()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    for inspector in monitor.inspectors:
        inspector._thread.join()
    assert gpu.inspections >= 2
    assert other.inspections > gpu.inspections
    assert told[0] == ("gpu-driver-hangs", Health.UNKNOWN)


def test_a_gpu_without_any_readings_has_no_findings(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """An old GPU supports no reading except its name."""
    machine.path.write_text("{}")
    monkeypatch.setattr(Direct, "read", lambda *_: GpusReading(gpus=[GpuReading(0, "0000:01:00.0", name="Old")]))
    assert [machine.inspection.inspect().findings for _ in range(4)] == [[]] * 4
