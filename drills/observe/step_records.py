"""The data of a job for a comparison: its step records, and lines in its ranks' logs."""

from __future__ import annotations

import re
import statistics
import struct
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from agent.client import AgentClients
from agent.launcher.rank_process import BESIDE
from agent.reporting.step_archive import StepArchive
from agent.state.job_record import FILE as JOB_FILE
from agent.state.job_record import JobRecord
from agent.v1 import agent_pb2 as pb
from everstep.errors import AgentError, EverstepError
from everstep.model.machine import Machine
from everstep.rank.step_reports import ReportFile

_MARKER = re.compile(r"^--- everstep: rank (\d+), generation (\d+),(.*)$", re.MULTILINE)
_FINAL = re.compile(r"^--- everstep: state after step \d+: (\w+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class ReportedStep:
    """One report of one step by one rank."""

    step: int
    generation: int
    time_ns: int
    bits: bytes
    """The loss, as all 64 bits of a double."""
    version: int = 0
    """Version of the job's code; 0: not known."""


@dataclass(slots=True)
class Records:
    """All reports of a job, by rank, in the order in which they were made."""

    of: dict[int, list[ReportedStep]] = field(default_factory=dict)
    final: dict[int, str] = field(default_factory=dict)
    """Rank → digest of its state at the end of the loop."""
    unknown: list[str] = field(default_factory=list)
    """Machines and ranks that did not answer, with the reason: their records are not known."""

    @property
    def steps(self) -> int:
        """The number of different steps."""
        return len({record.step for records in self.of.values() for record in records})

    def add(self, replies: Iterable[pb.StepsReply]) -> None:
        """Append the records in an agent's reply."""
        for reply in replies:
            self.of.setdefault(reply.rank, []).extend(
                ReportedStep(r.step, r.generation, r.time_ns, struct.pack("<d", r.loss), r.version)
                for r in reply.records
            )

    def join(self, others: Records) -> None:
        """Append the records of another object."""
        for rank, records in others.of.items():
            self.of.setdefault(rank, []).extend(records)
        self.final |= others.final
        self.unknown += others.unknown

    def between(self, begin: int, end: int) -> Records:
        """The records of steps from ``begin`` to before ``end``, without final states."""
        some = {rank: [record for record in found if begin <= record.step < end] for rank, found in self.of.items()}
        return Records({rank: found for rank, found in some.items() if found}, unknown=list(self.unknown))

    def newest(self) -> Records:
        """Only the last report of each rank's step: earlier reports may have the wrong numbers of a fault."""
        ordered = {rank: sorted(found, key=lambda record: record.generation) for rank, found in self.of.items()}
        last = {rank: list({record.step: record for record in found}.values()) for rank, found in ordered.items()}
        return Records(last, dict(self.final), list(self.unknown))

    def redone(self) -> int | None:
        """Most steps that any rank reported more than once; None without reports."""
        again = [sum(n - 1 for n in Counter(r.step for r in records).values()) for records in self.of.values()]
        return max(again, default=None)

    def overlaps(self) -> list[str]:
        """Ranks with two copies at work: an older generation stepped after a newer one had stepped."""
        found = []
        for rank, records in sorted(self.of.items()):
            began: dict[int, int] = {}
            ended: dict[int, int] = {}
            for record in records:
                began[record.generation] = min(began.get(record.generation, record.time_ns), record.time_ns)
                ended[record.generation] = max(ended.get(record.generation, record.time_ns), record.time_ns)
            for one, other in pairwise(sorted(began)):
                if ended[one] > began[other]:
                    found.append(f"rank {rank} stepped in generation {one} after generation {other} had begun to")
        return found

    def step_s(self, begin_ns: int, end_ns: int) -> float | None:
        """Median time of a step between two times, over all ranks that report, seconds; None: too few reports."""
        gaps = []
        for records in self.of.values():
            times = sorted(r.time_ns for r in records if begin_ns < r.time_ns < end_ns)
            gaps += [(after - before) / 1e9 for before, after in pairwise(times)]
        return statistics.median(gaps) if gaps else None

    def stepped_between(self, begin_ns: int, end_ns: int) -> int:
        """The smallest number of steps that a rank reported between two times."""
        return min(
            (sum(begin_ns < r.time_ns < end_ns for r in records) for records in self.of.values() if records), default=0
        )


async def collect(
    agents: AgentClients, job: str, machines: Sequence[Machine], known: Records | None = None, *, from_step: int = 0
) -> Records:
    """Ask the agents for all step records of a job from a step on.

    Args:
        agents: clients of the agents.
        job: name of the job.
        machines: machines on which it ran.
        known: records of machines that were emptied since.
        from_step: the first step.
    """
    found = Records()
    if known:
        found.join(known)
    for machine in machines:
        try:
            request = pb.StepsRequest(job=job, rank=-1, from_step=from_step)
            found.add([reply async for reply in agents.get(machine.address).steps(request)])
        except AgentError as error:
            found.unknown.append(f"{machine.name} did not tell its step records: {error}")
    return found


def rescue(job: str, state: Path, shm: Path) -> Records:
    """The step records of a machine that is off and about to be emptied, after its mapped reports are on its disk.

    Args:
        job: name of the job.
        state: state folder of the agent.
        shm: folder of the agent in shared memory.
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
    record = JobRecord.model_validate_json((folder / JOB_FILE).read_bytes()) if (folder / JOB_FILE).exists() else None
    for rank in archive.ranks():
        found.add(archive.read(rank, 0, record.version_of) if record else archive.read(rank, 0))
    return found


async def read_logs(
    agents: AgentClients, job: str, machines: Sequence[Machine], ranks: Sequence[Sequence[int]], records: Records
) -> int:
    """Read the ranks' own log lines into ``records``; returns how often a rank existed twice.

    A rank existed twice if one of its generations began twice, or began while an older one was alive.
    """
    twice = 0
    for machine, here in zip(machines, ranks, strict=False):
        for rank in here:
            data = b""
            try:
                request = pb.ReadLogRequest(job=job, rank=rank, stream=pb.ReadLogRequest.STDERR)
                async for chunk in agents.get(machine.address).read_log(request):
                    data += chunk.data
            except AgentError as error:
                records.unknown.append(f"{machine.name} did not tell the log of rank {rank}: {error}")
            text = data.decode(errors="replace")
            twice += copies_in(text)
            if found := _FINAL.findall(text):
                records.final[rank] = found[-1]
    return twice


def copies_in(log: str) -> int:
    """How often a rank's log shows two copies of it."""
    begun = _MARKER.findall(log)
    again = sum(count - 1 for count in Counter((rank, generation) for rank, generation, _ in begun).values())
    return again + sum(BESIDE in more for _, _, more in begun)
