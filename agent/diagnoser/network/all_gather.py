"""In the all-gather test, every process of two machines receives the data of all processes of both machines."""

from __future__ import annotations

import os
import time
from typing import Any, ClassVar

from pydantic import Field

from agent.diagnoser.diagnostic import DiagnosticLimits, DiagnosticTest
from agent.diagnoser.kind import gpus, hardware
from agent.diagnoser.ranks import Meeting, RanksFailed, gpu_of, listening, run_ranks
from everstep.model.diagnosis import Diagnostic, DiagnosticResult
from everstep.model.finding import Health, Owner, Reason

FAILED = Reason(
    "all-gather-failed",
    "processes of this machine and another one cannot exchange bytes",
    owner=Owner.NETWORK,
    verdict=Health.UNKNOWN,
    source="ByteRobust, section 4.2",
)
DAMAGED = Reason(
    "all-gather-damaged",
    "bytes that this machine and another one exchange arrive changed",
    owner=Owner.NETWORK,
    verdict=Health.UNKNOWN,
    source="ByteRobust, section 4.2",
)


class AllGatherLimits(DiagnosticLimits):
    """Limits of all-gather."""

    deadline_s: float = Field(default=60.0, gt=0)
    """The test is killed after this time, seconds."""
    ranks: int = Field(default=0, ge=0)
    """Number of processes on each machine; 0: one for each GPU, or a single one without GPUs."""
    mb: float = Field(default=16.0, gt=0)
    """Data of each process, megabytes."""
    rounds: int = Field(default=5, ge=1)
    """Number of rounds; the fastest one counts."""
    answer_s: float = Field(default=10.0, gt=0)
    """Longest wait of a process for another process, seconds."""


class AllGatherTest(DiagnosticTest):
    """Gathers the data of all processes of two machines, and compares the received data with the expected data."""

    name: ClassVar[Diagnostic] = Diagnostic.ALL_GATHER
    does: ClassVar[str] = (
        "processes of two machines, one for each GPU, gather the data of all; compares them and measures the bandwidth"
    )
    reasons: ClassVar[tuple[Reason, ...]] = (FAILED, DAMAGED)
    limits_type: ClassVar[type[DiagnosticLimits]] = AllGatherLimits
    imports: ClassVar[tuple[str, ...]] = ("torch",)

    def run(self) -> DiagnosticResult:
        """Test once."""
        os.environ.update(self.bench.environment)
        ranks, position = self.limits.ranks or gpus() or 1, self.peer.position
        host, listener, port = self.peer.host, -1, self.peer.port
        if position == 0:
            host = self.bench.host
            listener, port = listening(host)
            self.bench.waits_at(port)
        backend = "nccl" if gpus() >= ranks else "gloo"
        meeting = Meeting(host, port, 2 * ranks, position * ranks, listener, backend, self.limits.answer_s)
        try:
            answers = run_ranks(ranks, meeting, self._gather, within_s=self.limits.deadline_s * 0.9)
        except RanksFailed as error:
            return self.result(self.finding(FAILED, backend, str(error), text=f"{FAILED.means}: {error}"))
        if wrong := [f"rank {rank['rank']}: {rank['wrong']} numbers differ" for rank in answers if rank["wrong"]]:
            return self.result(self.finding(DAMAGED, backend, *wrong))
        # Each rank receives this much from the other machine.
        moved, slowest = answers[0]["bytes"] * ranks, max(rank["seconds"] for rank in answers)
        return self.result(kind=hardware(), measures={"bytes_per_second": moved / slowest})

    def _gather(self, rank: int) -> dict[str, Any]:
        import torch
        import torch.distributed as dist

        ranks = dist.get_world_size()
        device = gpu_of(rank % (ranks // 2)) if dist.get_backend() == "nccl" else torch.device("cpu")
        numbers = torch.arange(max(1, int(self.limits.mb * 1e6 / 4)), dtype=torch.int32, device=device)
        own = numbers * ranks + rank
        expected = torch.cat([numbers * ranks + other for other in range(ranks)])
        wrong, fastest = 0, float("inf")
        for _ in range(self.limits.rounds + 1):  # the first round opens connections
            received = torch.zeros_like(expected)
            dist.barrier()
            began = time.monotonic()
            dist.all_gather_into_tensor(received, own)
            if device.type == "cuda":
                torch.cuda.synchronize()
            fastest = min(fastest, time.monotonic() - began)
            wrong += int((received != expected).sum())
        return {"rank": rank, "wrong": wrong, "seconds": fastest, "bytes": own.numel() * own.element_size()}
