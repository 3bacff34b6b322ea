"""In the all-to-all test, processes of one machine exchange data, over NVLink or PCIe if the machine has GPUs.

If nccl-tests is installed and the machine has several GPUs, its ``alltoall_perf`` is run. Otherwise torch.distributed
is used, with NCCL between GPUs and with gloo between processors.

A row of the table that nccl-tests prints begins with size, count, type, redop and root. Four columns for out-of-place
operations follow, and then the same four columns for in-place operations: the time in microseconds, algbw and busbw in
GB/s, and the number of wrong values (``N/A``: the values were not compared).
"""

from __future__ import annotations

import re
import shutil
import time
from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import Field

from agent.diagnoser.diagnostic import DiagnosticLimits, DiagnosticTest
from agent.diagnoser.kind import gpus, hardware
from agent.diagnoser.ranks import OWN, Meeting, RanksFailed, gpu_of, listening, run_ranks
from agent.monitor import programs
from everstep.errors import CannotInspect
from everstep.model.diagnosis import Diagnostic, DiagnosticResult
from everstep.model.finding import Health, Owner, Reason, Remedy

ALL_TO_ALL = "alltoall_perf"
_FIGURES = r"\s+(?P<time{0}>[\d.]+)\s+(?P<algbw{0}>[\d.]+)\s+(?P<busbw{0}>[\d.]+)\s+(?P<wrong{0}>\d+|N/A)"
ROW = re.compile(r"^\s*\d+\s+\d+\s+\w+\s+\w+\s+-?\d+" + _FIGURES.format(0) + _FIGURES.format(1) + r"\s*$")
OUT_OF_BOUNDS = re.compile(r"^# Out of bounds values\s*:\s*(\d+)")
DAMAGED = Reason(
    "all-to-all-damaged",
    "bytes that the machine's processes exchange arrive changed",
    remedy=Remedy.REPLACE,
    sure=True,
    source="ByteRobust, section 4.2",
)
FAILED = Reason(
    "all-to-all-failed",
    "processes of the machine cannot exchange bytes",
    owner=Owner.UNKNOWN,
    remedy=Remedy.CHECK_SETUP,
    verdict=Health.UNKNOWN,
)


@dataclass(frozen=True, slots=True)
class NcclRun:
    """The result of a program of nccl-tests."""

    bus_bytes_per_second: float
    """The highest bus bandwidth of all rows, which does not depend on the number of GPUs."""
    wrong: int
    """Number of wrong values."""


class AllToAllLimits(DiagnosticLimits):
    """Limits of all-to-all."""

    ranks: int = Field(default=0, ge=0)
    """Number of processes; 0: one for each GPU, or 4 without GPUs."""
    mb: float = Field(default=16.0, gt=0)
    """Data that each process sends in one exchange, megabytes."""
    rounds: int = Field(default=5, ge=1)
    """Number of exchanges; the fastest one counts."""
    answer_s: float = Field(default=20.0, gt=0)
    """Longest wait of a process for another process, seconds."""
    command: str = ALL_TO_ALL
    """Name or path of the program of nccl-tests."""


class AllToAllTest(DiagnosticTest):
    """Lets each process send bytes to every other process, and compares the received bytes with the expected bytes."""

    name: ClassVar[Diagnostic] = Diagnostic.ALL_TO_ALL
    does: ClassVar[str] = (
        "processes of the machine, one for each GPU, send each other bytes; compares them and measures the bandwidth"
    )
    reasons: ClassVar[tuple[Reason, ...]] = (DAMAGED, FAILED)
    limits_type: ClassVar[type[DiagnosticLimits]] = AllToAllLimits
    imports: ClassVar[tuple[str, ...]] = ("torch",)

    def run(self) -> DiagnosticResult:
        """Test once."""
        if gpus() > 1 and shutil.which(self.limits.command):
            return self._by_nccl_tests()
        ranks = self.limits.ranks or gpus() or 4
        if ranks == 1:
            return self.nothing("the machine has a single GPU, which cannot exchange bytes with others")
        listener, port = listening()
        backend = "nccl" if gpus() >= ranks else "gloo"
        meeting = Meeting(OWN, port, ranks, listener=listener, timeout_s=self.limits.answer_s, backend=backend)
        try:
            answers = run_ranks(ranks, meeting, self._exchange, within_s=self.limits.deadline_s * 0.9)
        except RanksFailed as error:
            return self.result(self.finding(FAILED, backend, str(error), text=f"{FAILED.means}: {error}"))
        if wrong := [f"rank {rank['rank']}: {rank['wrong']} numbers differ" for rank in answers if rank["wrong"]]:
            return self.result(self.finding(DAMAGED, backend, *wrong))
        slowest = max(rank["seconds"] for rank in answers)
        # As in nccl-tests, data that a rank sends to itself does not count.
        moved = answers[0]["bytes"] * (ranks - 1) / ranks
        measures = {f'bytes_per_second{{backend="{backend}",ranks="{ranks}"}}': moved / slowest}
        return self.result(kind=hardware(), measures=measures)

    def _exchange(self, rank: int) -> dict[str, Any]:
        import torch
        import torch.distributed as dist

        ranks = dist.get_world_size()
        device = gpu_of(rank) if dist.get_backend() == "nccl" else torch.device("cpu")
        part = max(1, int(self.limits.mb * 1e6 / 4 / ranks))
        numbers = torch.arange(part, dtype=torch.int32, device=device)
        sent = torch.cat([numbers * ranks * ranks + rank * ranks + other for other in range(ranks)])
        expected = torch.cat([numbers * ranks * ranks + other * ranks + rank for other in range(ranks)])
        wrong, fastest = 0, float("inf")
        for _ in range(self.limits.rounds + 1):  # the first round opens connections
            received = torch.zeros_like(sent)
            dist.barrier()
            began = time.monotonic()
            dist.all_to_all_single(received, sent)
            if device.type == "cuda":
                torch.cuda.synchronize()
            fastest = min(fastest, time.monotonic() - began)
            wrong += int((received != expected).sum())
        return {"rank": rank, "wrong": wrong, "seconds": fastest, "bytes": sent.numel() * sent.element_size()}

    def _by_nccl_tests(self) -> DiagnosticResult:
        size = f"{max(1, int(self.limits.mb))}M"
        words = [self.limits.command, "-g", str(gpus()), "-b", size, "-e", size, "-n", "20", "-c", "1"]
        ran = programs.run(words, self.limits.deadline_s * 0.9)
        result = parsed(ran.output)
        if result is None:
            last = ran.output.strip().rpartition("\n")[2]
            raise CannotInspect(f"{self.limits.command} ended with code {ran.code}: {last or 'no output'}")
        if result.wrong:
            return self.result(self.finding(DAMAGED, "NCCL", f"{self.limits.command}: {result.wrong} wrong values"))
        if ran.code:
            return self.result(self.finding(FAILED, "NCCL", f"{self.limits.command} ended with code {ran.code}"))
        measures = {f'bytes_per_second{{backend="nccl-tests",ranks="{gpus()}"}}': result.bus_bytes_per_second}
        return self.result(kind=hardware(), measures=measures)


def parsed(text: str) -> NcclRun | None:
    """Parse the output of a program; None: it has no result."""
    best, wrong, rows = 0.0, 0, 0
    for line in text.splitlines():
        if row := ROW.match(line):
            rows += 1
            best = max(best, float(row["busbw0"]), float(row["busbw1"]))
            wrong += sum(int(row[name]) for name in ("wrong0", "wrong1") if row[name] != "N/A")
        elif bounds := OUT_OF_BOUNDS.match(line):
            wrong = max(wrong, int(bounds[1]))
    return NcclRun(best * 1e9, wrong) if rows else None
