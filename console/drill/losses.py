"""The step records of a job, and whether two runs of it are equal bit for bit."""

from __future__ import annotations

import math
import re
import statistics
import struct
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from agent.client import AgentPool
from agent.steps import StepArchive
from agent.v1 import agent_pb2 as pb
from everstep.errors import AgentError, EverstepError
from everstep.machine import Machine
from everstep.reports import ReportFile

_MARKER = re.compile(r"^--- everstep: rank (\d+), generation (\d+),", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Record:
    """One report of one step by one rank."""

    step: int
    generation: int
    time_ns: int
    bits: bytes
    """The loss, all 64 bits."""


@dataclass(slots=True)
class Records:
    """All reports of a job, by rank, in the order in which they were made."""

    of: dict[int, list[Record]] = field(default_factory=dict)

    @property
    def steps(self) -> int:
        """Number of different steps."""
        return len({record.step for records in self.of.values() for record in records})

    def add(self, replies: Iterable[pb.StepsReply]) -> None:
        """Take what an agent tells, after what is known already."""
        for reply in replies:
            self.of.setdefault(reply.rank, []).extend(
                Record(r.step, r.generation, r.time_ns, struct.pack("<d", r.loss)) for r in reply.records
            )

    def join(self, others: Records) -> None:
        """Take what others know, after what is known already."""
        for rank, records in others.of.items():
            self.of.setdefault(rank, []).extend(records)

    def redone(self) -> int | None:
        """Most steps that any rank reported more than once; None without reports."""
        again = [sum(n - 1 for n in Counter(r.step for r in records).values()) for records in self.of.values()]
        return max(again, default=None)

    def step_s(self, begin_ns: int, end_ns: int) -> float | None:
        """Median time of a step between two times, over all ranks that report, seconds; None with too few."""
        gaps = []
        for records in self.of.values():
            times = sorted(r.time_ns for r in records if begin_ns < r.time_ns < end_ns)
            gaps += [(after - before) / 1e9 for before, after in pairwise(times)]
        return statistics.median(gaps) if gaps else None

    def stepped_between(self, begin_ns: int, end_ns: int) -> int:
        """Fewest steps that any reporting rank reported between two times."""
        return min(
            (sum(begin_ns < r.time_ns < end_ns for r in records) for records in self.of.values() if records), default=0
        )


async def collect(agents: AgentPool, job: str, machines: Sequence[Machine], known: Records | None = None) -> Records:
    """Ask the agents for all step records of a job.

    Args:
        agents: the connections.
        job: its name.
        machines: where it ran.
        known: what machines had recorded that were emptied since.
    """
    found = Records()
    if known:
        found.join(known)
    for machine in machines:
        with suppress(AgentError):
            found.add([one async for one in agents.get(machine.address).steps(pb.StepsRequest(job=job, rank=-1))])
    return found


def rescue(job: str, state: Path, shm: Path) -> Records:
    """The step records of a machine that is off and about to be emptied, those in mapped reports written to its disk.

    Args:
        job: whose.
        state: the agent's state folder.
        shm: the agent's folder in shared memory.
    """
    found, folder = Records(), state / "jobs" / job
    if not folder.is_dir():
        return found
    archive = StepArchive(folder)
    reports = [path for path in (shm / job).glob("report-*") if path.name.rpartition("-")[2].isdecimal()]
    for path in sorted(reports, key=lambda path: int(path.name.rpartition("-")[2])):
        with suppress(OSError, EverstepError):
            report = ReportFile.open(path)
            archive.drain(report)
            report.close()
    for rank in archive.ranks():
        found.add(archive.read(rank, 0))
    return found


def differences(reference: Records, run: Records) -> list[str] | None:
    """Where a run differs from the one without a fault; None when there are no losses to compare.

    Every rank that reports must have every step, with the same bits as the
    reference, each time that it did the step.
    """
    if not any(math.isfinite(struct.unpack("<d", r.bits)[0]) for rs in reference.of.values() for r in rs):
        return None
    found = []
    for rank, expected in sorted(reference.of.items()):
        right = {record.step: record.bits for record in expected}
        seen = {record.step for record in run.of.get(rank, [])}
        if missing := sorted(right.keys() - seen):
            found.append(f"rank {rank} has no report of step {_some(missing)}")
        if extra := sorted(seen - right.keys()):
            found.append(f"rank {rank} reported step {_some(extra)}, which the run without a fault has not")
        wrong = {r.step for r in run.of.get(rank, []) if r.step in right and r.bits != right[r.step]}
        if wrong:
            found.append(f"rank {rank} has another loss at step {_some(sorted(wrong))}")
    return found


async def launches(agents: AgentPool, job: str, machines: Sequence[Machine], ranks: Sequence[Sequence[int]]) -> int:
    """How many launches of a rank were one too many: each generation of a rank begins its log once."""
    too_many = 0
    for machine, here in zip(machines, ranks, strict=False):
        for rank in here:
            data = b""
            with suppress(AgentError):
                request = pb.ReadLogRequest(job=job, rank=rank, stream=pb.ReadLogRequest.STDERR)
                async for chunk in agents.get(machine.address).read_log(request):
                    data += chunk.data
            begun = Counter(_MARKER.findall(data.decode(errors="replace")))
            too_many += sum(count - 1 for count in begun.values())
    return too_many


def _some(steps: Sequence[int]) -> str:
    return ", ".join(map(str, steps[:5])) + (" …" if len(steps) > 5 else "")
