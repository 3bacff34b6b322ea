"""This module inspects GPUs with NVML: it reads them through a process, and applies rules to each reading."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from agent.exposition import Described, described
from agent.monitor.gpu import pci
from agent.monitor.gpu.process import GpuProcess, GpusSilent
from agent.monitor.gpu.reading import EXPORTED, GpuReading, GpusReading, GpuTrouble, facts, item_of, measures
from agent.monitor.gpu.rules import available, heat, links, memory
from agent.monitor.gpu.rules.rule import GpuKnown, GpuLimits, GpuProblem, GpuRule
from agent.monitor.inspection import Inspection, InspectionResult, Limits, Site
from agent.needs import GPUS
from everstep.model.finding import Finding, Health, Reason
from everstep.system import procfs

RULES: tuple[GpuRule, ...] = (
    available.recovery_action,
    available.unreadable,
    memory.ecc,
    memory.rows,
    heat.hot,
    heat.memory_hot,
    heat.throttled,
    links.pcie_width,
    links.pcie_replays,
    links.nvlink_down,
    links.nvlink_errors,
    links.fabric,
)
FAULT_FROM_MISS = 2
"""After this many consecutive readings without an answer, the driver is faulty; before that, the verdict is unknown."""
SURE_FROM_MISS = 6
"""After this many such readings, which take about a minute, the finding names the machine for sure. Until then, the
driver may still be freeing the memory of processes that ended."""
TEARDOWN_S = 120.0
"""While ranks of this machine are ending, a driver that does not answer counts as busy for this long, seconds."""
LOADED = (GpuTrouble.MISMATCH, GpuTrouble.LOST, GpuTrouble.RESET_REQUIRED, GpuTrouble.OTHER)
"""Troubles that a process with the loaded library reports even after a repair, so that the process has to be ended."""
FAKE, REAL = "fake", "nvml"


class GpuInspection(Inspection):
    """Reads all GPUs in a process of its own, and compares them with earlier readings and with their earlier number.

    The kept state has: ``most``, the largest number of GPUs so far; ``places``, their PCI addresses by number;
    ``known``, the state of each GPU's ``GpuKnown``; active events; the number of consecutive readings without an
    answer; and the process that hangs in the driver.
    """

    name: ClassVar[str] = "gpu"
    inspects: ClassVar[str] = "GPUs by NVML: missing, unusable, memory, heat, power, PCIe, NVLink, fabric, driver"
    reasons: ClassVar[tuple[Reason, ...]] = (*available.REASONS, *memory.REASONS, *heat.REASONS, *links.REASONS)
    metrics: ClassVar[Mapping[str, Described]] = described(
        ("gpu_count", "", "GPUs of the machine"),
        ("gpu_processes", "gpu UUID pci_bus_id modelName", "processes that compute on the GPU"),
        ("gpu_nvlinks_up", "gpu UUID pci_bus_id modelName", "NVLinks of the GPU that are up"),
        *((name, "gpu UUID pci_bus_id modelName", "as in dcgm-exporter") for name in EXPORTED),
    )
    limits_type: ClassVar[type[Limits]] = GpuLimits
    baselines: ClassVar[Mapping[str, tuple[str, ...]]] = {available.COUNT.code: ("most", "places")}
    dev: ClassVar[Path] = Path("/dev")

    def __init__(self, site: Site, limits: Limits, kept: Mapping[str, Any], *, same_boot: bool) -> None:
        super().__init__(site, limits, kept, same_boot=same_boot)
        self._source = ""
        self._process = GpuProcess()
        self._last: list[Finding] = []

    def after_reboot(self, kept: Mapping[str, Any]) -> dict[str, Any]:
        """Keep which GPUs and links are expected. Counters begin anew, and events are over."""
        known = {uuid: {"links": gpu.get("links", [])} for uuid, gpu in kept.get("known", {}).items()}
        return {name: kept[name] for name in ("source", "most", "places") if name in kept} | {"known": known}

    def forget(self, reason: str) -> None:
        """Also forget which links of each GPU were up, if the reason is that a link is down."""
        super().forget(reason)
        self._last = [finding for finding in self._last if finding.reason != reason]
        if reason == links.NVLINK_DOWN.code:
            for known in self.kept.get("known", {}).values():
                known["links"] = []

    def inspect(self) -> InspectionResult:
        """Read all GPUs once, and apply the rules."""
        self._choose()
        if self._source == REAL and not pci.worth_reading(self.site.sys, self.site.proc, self.dev):
            if not self._expected([]):
                return InspectionResult(note="no NVIDIA GPU")
            reading = GpusReading()
        else:
            try:
                reading = self._read()
            except GpusSilent as silent:
                return self._hangs(silent)
        self.kept["missed"] = self.kept["missed_ns"] = 0
        no_library = reading.trouble is GpuTrouble.LIBRARY_MISSING
        if no_library and not self._expected([]) and self._source == REAL and pci.all_have_drivers(self.site.sys):
            return InspectionResult(note=f"the machine has NVIDIA GPUs, but the agent may not use any; {GPUS.remedy()}")
        return self._judged(reading)

    def close(self) -> None:
        """End the reading process."""
        self._process.close()

    def _choose(self) -> None:
        """Read simulated GPUs if a file describes them. The state of real GPUs is not compared with them."""
        fake = self.site.fake_gpus
        source = FAKE if fake and fake.exists() else REAL
        if source == self._source:
            return
        self._process.end()
        arguments = ["--fake", str(fake)] if source == FAKE else []
        self._process = GpuProcess([*arguments, "--sys", str(self.site.sys), "--proc", str(self.site.proc)])
        self._source, self._last = source, []
        if self.kept.get("source", source) != source:
            self.kept = {}
        self.kept["source"] = source

    def _read(self) -> GpusReading:
        pid, start = self.kept.get("stuck", (0, 0))
        if pid and pid != self._process.pid and procfs.is_alive(pid, start):
            # An earlier agent started the process that hangs. Another process would hang too.
            raise GpusSilent(f"process {pid} still waits in the driver", stuck=True)
        return self._process.read(self.limits.answer_s, self.limits.start_s)

    def _hangs(self, silent: GpusSilent) -> InspectionResult:
        """Return the finding that the driver hangs, together with all earlier findings, which nothing has refuted."""
        now_ns = self.site.now_ns()
        since_ns = self.kept["missed_ns"] = self.kept.get("missed_ns") or now_ns
        if self._ranks_are_ending() and now_ns - since_ns < TEARDOWN_S * 1e9:
            busy = replace(available.HANGS, verdict=Health.UNKNOWN)
            text = "the GPU driver does not answer while it ends the work of this machine's ranks"
            return self._with_earlier(GpuProblem(busy, text, str(silent)))
        missed = self.kept["missed"] = self.kept.get("missed", 0) + 1
        if silent.stuck and (stuck := procfs.process_of(self._process.pid)):
            self.kept["stuck"] = [stuck.pid, stuck.start]
        reason, sure = available.HANGS, silent.stuck and missed >= SURE_FROM_MISS
        verdict = reason.verdict if missed >= FAULT_FROM_MISS else Health.UNKNOWN
        text = f"{reason.means}, {missed} times in a row"
        problem = GpuProblem(
            replace(reason, sure=sure, verdict=verdict), text if missed > 1 else reason.means, str(silent)
        )
        return self._with_earlier(problem)

    def _with_earlier(self, problem: GpuProblem) -> InspectionResult:
        before = [finding for finding in self._last if finding.reason != problem.reason.code]
        return InspectionResult([self._finding(problem, ""), *before])

    def _ranks_are_ending(self) -> bool:
        """Return whether a process of a rank on this machine is ending, and the driver may free its memory."""
        processes = (procfs.process_of(rank.pid, self.site.proc) for rank in self.site.ranks())
        return any(process is not None and (process.is_ending or process.state == "Z") for process in processes)

    def _judged(self, reading: GpusReading) -> InspectionResult:
        now_ns = self.site.now_ns()
        findings: list[Finding] = []
        if reading.trouble:
            had_gpus = self._expected([]) > 0
            findings += [self._finding(problem, "") for problem in available.of_all(reading, had_gpus=had_gpus)]
        else:
            for gpu, address in self._with_addresses(reading):
                item = item_of(address, gpu.index)
                if gpu.trouble:
                    findings += [self._finding(problem, item) for problem in available.of_one(gpu)]
                    continue
                for problem in self._problems(gpu, item, now_ns):
                    if problem.lasts_s:
                        self.note(self._finding(problem, item), at_ns=now_ns, lasts_s=problem.lasts_s)
                    else:
                        findings.append(self._finding(problem, item))
            findings += self._missing(reading)
            self._remember(reading)
        if self._must_end_process(reading, findings):
            self._process.end()
        self._last = [*findings, *self.noted()]
        faulty = {finding.item for finding in self._last if finding.verdict is Health.FAULTY}
        for gpu, address in self._with_addresses(reading):
            if gpu.recovery_action == 0 and (item := item_of(address, gpu.index)) not in faulty:
                self.site.healthy_gpus[item] = now_ns
        return InspectionResult(self._last, measures(reading), facts(reading))

    def _problems(self, gpu: GpuReading, item: str, now_ns: int) -> Iterator[GpuProblem]:
        """Apply the rules to one GPU that could be read, and update its kept state."""
        name = gpu.uuid or item
        known = GpuKnown(self.kept.setdefault("known", {}).get(name, {}))
        if known.went_back("ecc", gpu.ecc_uncorrected):  # the GPU was reset, so its memory errors are over
            ended = (self.name, memory.ECC.code, item)
            kept = self.kept.get("events", [])
            self.kept["events"] = [event for event in kept if Finding.model_validate(event["finding"]).key != ended]
        seconds = max(now_ns - known.seen_ns, 0) / 1e9 if known.seen_ns else 0.0
        for rule in RULES:
            yield from rule(gpu, known, self.limits, seconds)
        known.seen_ns = now_ns
        self.kept["known"][name] = known.kept()

    def _with_addresses(self, reading: GpusReading) -> list[tuple[GpuReading, str]]:
        """Return each GPU with its PCI address, empty if it is not known.

        A lost GPU does not report its address. Then its address is the only one that no other GPU has, or else the
        address that it had before.
        """
        taken = {gpu.bus_id for gpu in reading.gpus if gpu.bus_id}
        free = [address for address in reading.on_bus if address not in taken]
        silent = [gpu for gpu in reading.gpus if not gpu.bus_id]
        only = free[0] if len(free) == len(silent) == 1 else ""
        result = []
        for gpu in reading.gpus:
            earlier = self.kept.get("places", {}).get(str(gpu.index), "")
            result.append((gpu, gpu.bus_id or only or (earlier if earlier not in taken else "")))
        return result

    def _expected(self, on_bus: list[str]) -> int:
        """Return how many GPUs there should be."""
        if self.limits.gpus is not None:
            return int(self.limits.gpus)
        return max(int(self.kept.get("most", 0)), len(on_bus))

    def _missing(self, reading: GpusReading) -> list[Finding]:
        """Return findings about GPUs that the driver does not list, although they are on the PCI bus or were before."""
        short = self._expected(reading.on_bus) - len(reading.gpus)
        if short <= 0:
            return []
        present = {address for _, address in self._with_addresses(reading)}
        gone = sorted(({*reading.on_bus, *self.kept.get("places", {}).values()}) - present)
        evidence = f"{len(reading.gpus)} of {len(reading.gpus) + short} GPUs are present"
        if len(gone) != short:  # it is not known which GPUs are missing
            return [self._finding(GpuProblem(available.COUNT, f"GPUs are missing: {evidence}", evidence), "")]
        text = f"{available.COUNT.means}: {evidence}"
        return [
            self._finding(GpuProblem(self._count_reason(address), text, evidence), item_of(address, -1))
            for address in gone
        ]

    def _count_reason(self, address: str) -> Reason:
        """Return the reason for one missing GPU. A GPU that was never seen, and has a driver, may be for others."""
        was_seen = self.limits.gpus is not None or address in self.kept.get("places", {}).values()
        if was_seen or pci.on_bus(self.site.sys).get(address) == "":
            return available.COUNT
        return replace(available.COUNT, verdict=Health.UNKNOWN, sure=False)

    def _remember(self, reading: GpusReading) -> None:
        most = self.kept["most"] = max(self.kept.get("most", 0), len(reading.gpus))
        if len(reading.gpus) == most and all(gpu.bus_id for gpu in reading.gpus):
            self.kept["places"] = {str(gpu.index): gpu.bus_id for gpu in reading.gpus}
            present = {gpu.uuid or item_of(gpu.bus_id, gpu.index) for gpu in reading.gpus}
            self.kept["known"] = {name: known for name, known in self.kept["known"].items() if name in present}

    def _must_end_process(self, reading: GpusReading, findings: list[Finding]) -> bool:
        """Return whether the reading process must end: it may prevent a reset of a GPU, and does not see new GPUs."""
        are_missing = any(finding.reason == available.COUNT.code for finding in findings)
        need_reset = any(gpu.trouble or gpu.recovery_action or gpu.remap_pending for gpu in reading.gpus)
        return are_missing or need_reset or reading.trouble in LOADED

    def _finding(self, problem: GpuProblem, item: str) -> Finding:
        evidence = [problem.evidence] if problem.evidence else []
        return self.finding(problem.reason, item, *evidence, text=problem.text)
