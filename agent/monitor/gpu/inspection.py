"""The inspection of GPUs: asks the process that reads them, and applies rules to each reading."""

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
"""The driver hangs from this many readings on that were missed one after the other; before, nothing is concluded."""
LOADED = (GpuTrouble.MISMATCH, GpuTrouble.LOST, GpuTrouble.RESET_REQUIRED, GpuTrouble.OTHER)
"""A process in which the library said this says it again, whatever was done about it."""
FAKE, REAL = "fake", "nvml"


class GpuInspection(Inspection):
    """Reads all GPUs in a process of its own, compares with what is known of each, and with how many there were.

    What it keeps: ``most``, the number of GPUs there once were, and ``places``, where; of each GPU what ``GpuKnown``
    has; events that count for some time; how many readings were missed in a row, and the process that is stuck in the
    driver.
    """

    name: ClassVar[str] = "gpu"
    inspects: ClassVar[str] = "GPUs by NVML: there, usable, memory errors, heat, power, PCIe, NVLink, fabric, driver"
    reasons: ClassVar[tuple[Reason, ...]] = (*available.REASONS, *memory.REASONS, *heat.REASONS, *links.REASONS)
    metrics: ClassVar[Mapping[str, Described]] = described(
        ("gpu_count", "", "GPUs of the machine"),
        ("gpu_processes", "gpu UUID pci_bus_id modelName", "processes that compute on the GPU"),
        ("gpu_nvlinks_up", "gpu UUID pci_bus_id modelName", "NVLinks of the GPU that are up"),
        *((name, "gpu UUID pci_bus_id modelName", "as of dcgm-exporter") for name in EXPORTED),
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
        """GPUs and links that were there are expected again; counters begin anew, and events are over."""
        known = {uuid: {"links": gpu.get("links", [])} for uuid, gpu in kept.get("known", {}).items()}
        return {name: kept[name] for name in ("source", "most", "places") if name in kept} | {"known": known}

    def forget(self, reason: str) -> None:
        """Which links were up is known of each GPU."""
        super().forget(reason)
        self._last = [found for found in self._last if found.reason != reason]
        if reason == links.NVLINK_DOWN.code:
            for known in self.kept.get("known", {}).values():
                known["links"] = []

    def inspect(self) -> InspectionResult:
        """Read once."""
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
        self.kept["missed"] = 0
        no_library = reading.trouble is GpuTrouble.LIBRARY_MISSING
        if no_library and not self._expected([]) and self._source == REAL and pci.all_have_drivers(self.site.sys):
            return InspectionResult(note="the machine has NVIDIA GPUs, and none is given to the agent")
        return self._judged(reading)

    def close(self) -> None:
        """End the process that reads."""
        self._process.close()

    def _choose(self) -> None:
        """Take fake GPUs where a file describes them; what is known of real ones says nothing of those."""
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
            # An earlier agent started it; another process would wait for the same.
            raise GpusSilent(f"process {pid} still waits in the driver", stuck=True)
        return self._process.read(self.limits.answer_s, self.limits.start_s)

    def _hangs(self, silent: GpusSilent) -> InspectionResult:
        """The findings of before stay: the GPUs could not be read."""
        missed = self.kept["missed"] = self.kept.get("missed", 0) + 1
        if silent.stuck and (stuck := procfs.process_of(self._process.pid)):
            self.kept["stuck"] = [stuck.pid, stuck.start]
        reason, sure = available.HANGS, silent.stuck and missed >= FAULT_FROM_MISS
        verdict = reason.verdict if missed >= FAULT_FROM_MISS else Health.UNKNOWN
        text = f"{reason.means}, {missed} times in a row"
        seen = GpuProblem(
            replace(reason, sure=sure, verdict=verdict), text if missed > 1 else reason.means, str(silent)
        )
        before = [found for found in self._last if found.reason != reason.code]
        return InspectionResult([self._finding(seen, ""), *before])

    def _judged(self, reading: GpusReading) -> InspectionResult:
        now_ns = self.site.now_ns()
        now: list[Finding] = []
        if reading.trouble:
            had_gpus = self._expected([]) > 0
            now += [self._finding(seen, "") for seen in available.of_all(reading, had_gpus=had_gpus)]
        else:
            for gpu, place in self._placed(reading):
                item = item_of(place, gpu.index)
                if gpu.trouble:
                    now += [self._finding(seen, item) for seen in available.of_one(gpu)]
                    continue
                for seen in self._seen(gpu, item, now_ns):
                    if seen.lasts_s:
                        self.note(self._finding(seen, item), at_ns=now_ns, lasts_s=seen.lasts_s)
                    else:
                        now.append(self._finding(seen, item))
            now += self._missing(reading)
            self._remember(reading)
        if self._holds_up(reading, now):
            self._process.end()
        self._last = [*now, *self.noted()]
        return InspectionResult(self._last, measures(reading), facts(reading))

    def _seen(self, gpu: GpuReading, item: str, now_ns: int) -> Iterator[GpuProblem]:
        """What the rules report of one GPU that could be read; brings up to date what is known of it."""
        name = gpu.uuid or item
        known = GpuKnown(self.kept.setdefault("known", {}).get(name, {}))
        if known.went_back("ecc", gpu.ecc_uncorrected):  # it was reset: what was is over
            mine = (self.name, memory.ECC.code, item)
            kept = self.kept.get("events", [])
            self.kept["events"] = [event for event in kept if Finding.model_validate(event["finding"]).key != mine]
        seconds = max(now_ns - known.seen_ns, 0) / 1e9 if known.seen_ns else 0.0
        for rule in RULES:
            yield from rule(gpu, known, self.limits, seconds)
        known.seen_ns = now_ns
        self.kept["known"][name] = known.kept()

    def _placed(self, reading: GpusReading) -> list[tuple[GpuReading, str]]:
        """Each GPU with its place on PCI. One that is lost does not say it: it is where it was, or what is left."""
        taken = {gpu.bus_id for gpu in reading.gpus if gpu.bus_id}
        left = [place for place in reading.on_bus if place not in taken]
        silent = [gpu for gpu in reading.gpus if not gpu.bus_id]
        placed = []
        for gpu in reading.gpus:
            was = self.kept.get("places", {}).get(str(gpu.index), "")
            only = left[0] if len(left) == len(silent) == 1 else ""
            placed.append((gpu, gpu.bus_id or only or (was if was not in taken else "")))
        return placed

    def _expected(self, on_bus: list[str]) -> int:
        """How many GPUs there should be."""
        if self.limits.gpus is not None:
            return int(self.limits.gpus)
        return max(int(self.kept.get("most", 0)), len(on_bus))

    def _missing(self, reading: GpusReading) -> list[Finding]:
        """GPUs that are on PCI and not shown by the driver, or that were there and are not."""
        short = self._expected(reading.on_bus) - len(reading.gpus)
        if short <= 0:
            return []
        present = {place for _, place in self._placed(reading)}
        gone = sorted(({*reading.on_bus, *self.kept.get("places", {}).values()}) - present)
        evidence = f"{len(reading.gpus)} of {len(reading.gpus) + short} GPUs are there"
        if len(gone) != short:  # which ones are missing is not known
            return [self._finding(GpuProblem(available.COUNT, f"GPUs are missing: {evidence}", evidence), "")]
        text = f"{available.COUNT.means}: {evidence}"
        return [self._finding(GpuProblem(available.COUNT, text, evidence), item_of(place, -1)) for place in gone]

    def _remember(self, reading: GpusReading) -> None:
        most = self.kept["most"] = max(self.kept.get("most", 0), len(reading.gpus))
        if len(reading.gpus) == most and all(gpu.bus_id for gpu in reading.gpus):
            self.kept["places"] = {str(gpu.index): gpu.bus_id for gpu in reading.gpus}
            present = {gpu.uuid or item_of(gpu.bus_id, gpu.index) for gpu in reading.gpus}
            self.kept["known"] = {name: one for name, one in self.kept["known"].items() if name in present}

    def _holds_up(self, reading: GpusReading, now: list[Finding]) -> bool:
        """Whether the process is better ended: a GPU cannot be reset while it is open, nor what is new be seen."""
        counted = any(found.reason == available.COUNT.code for found in now)
        asked = any(gpu.trouble or gpu.recovery_action or gpu.remap_pending for gpu in reading.gpus)
        return counted or asked or reading.trouble in LOADED

    def _finding(self, seen: GpuProblem, item: str) -> Finding:
        return self.finding(seen.reason, item, *([seen.evidence] if seen.evidence else []), text=seen.text)
