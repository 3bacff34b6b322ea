"""Collects the records of a job's ranks: the reports of their steps, and lines in their logs."""

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
    """A rank's report of one step."""

    step: int
    generation: int
    time_ns: int
    bits: bytes
    """The loss: the 64 bits of a double."""
    version: int = 0
    """Version of the job's code; 0: not known."""


@dataclass(slots=True)
class Records:
    """The reports of a job's steps."""

    of: dict[int, list[ReportedStep]] = field(default_factory=dict)
    """Rank → its reports, in the order in which they were made."""
    final: dict[int, str] = field(default_factory=dict)
    """Rank → digest of its state at the end of the loop."""
    unknown: list[str] = field(default_factory=list)
    """Machines and ranks whose records are not known, each with the reason."""

    @property
    def steps(self) -> int:
        """The number of different steps that were reported."""
        return len({record.step for records in self.of.values() for record in records})

    def add(self, replies: Iterable[pb.StepsReply]) -> None:
        """Append the records in an agent's replies."""
        for reply in replies:
            self.of.setdefault(reply.rank, []).extend(
                ReportedStep(r.step, r.generation, r.time_ns, struct.pack("<d", r.loss), r.version)
                for r in reply.records
            )

    def join(self, more: Records) -> None:
        """Append the records of another object."""
        for rank, records in more.of.items():
            self.of.setdefault(rank, []).extend(records)
        self.final |= more.final
        self.unknown += more.unknown

    def between(self, begin: int, end: int) -> Records:
        """Return the records of steps from ``begin`` to before ``end``, without final states."""
        kept = {rank: [r for r in records if begin <= r.step < end] for rank, records in self.of.items()}
        return Records({rank: records for rank, records in kept.items() if records}, unknown=list(self.unknown))

    def newest(self) -> Records:
        """Return only the report of the last generation for each rank and step: a fault may have spoilt earlier
        numbers."""
        ordered = {rank: sorted(records, key=lambda r: r.generation) for rank, records in self.of.items()}
        last = {rank: list({r.step: r for r in records}.values()) for rank, records in ordered.items()}
        return Records(last, dict(self.final), list(self.unknown))

    def redone(self) -> int | None:
        """Return the number of repeated reports, for the rank that has most of them; None: there are no reports."""
        again = [sum(n - 1 for n in Counter(r.step for r in records).values()) for records in self.of.values()]
        return max(again, default=None)

    def overlaps(self) -> list[str]:
        """Return the ranks that had two processes: an older generation stepped after a newer one had stepped."""
        found = []
        for rank, records in sorted(self.of.items()):
            began: dict[int, int] = {}
            ended: dict[int, int] = {}
            for record in records:
                began[record.generation] = min(began.get(record.generation, record.time_ns), record.time_ns)
                ended[record.generation] = max(ended.get(record.generation, record.time_ns), record.time_ns)
            for older, newer in pairwise(sorted(began)):
                if ended[older] > began[newer]:
                    found.append(
                        f"rank {rank} made a step in generation {older} after its first step in generation {newer}"
                    )
        return found

    def step_s(self, begin_ns: int, end_ns: int) -> float | None:
        """Return the median duration of the steps between two times, over all ranks, seconds; None: there are too few
        reports."""
        gaps = []
        for records in self.of.values():
            times = sorted(r.time_ns for r in records if begin_ns < r.time_ns < end_ns)
            gaps += [(after - before) / 1e9 for before, after in pairwise(times)]
        return statistics.median(gaps) if gaps else None

    def stepped_between(self, begin_ns: int, end_ns: int) -> int:
        """Return the smallest number of steps that a rank reported between two times."""
        return min(
            (sum(begin_ns < r.time_ns < end_ns for r in records) for records in self.of.values() if records), default=0
        )


async def collect(
    agents: AgentClients, job: str, machines: Sequence[Machine], rescued: Records | None = None, *, from_step: int = 0
) -> Records:
    """Ask the agents for the step records of a job.

    Args:
        agents: Clients of the agents.
        job: Name of the job.
        machines: Machines on which it ran.
        rescued: Records that were read before a machine's disk was emptied; they are added to the result.
        from_step: The first step.
    """
    found = Records()
    if rescued:
        found.join(rescued)
    for machine in machines:
        try:
            request = pb.StepsRequest(job=job, rank=-1, from_step=from_step)
            found.add([reply async for reply in agents.get(machine.address).steps(request)])
        except AgentError as error:
            found.unknown.append(f"{machine.name} did not report its step records: {error}")
    return found


def rescue(job: str, state: Path, shm: Path) -> Records:
    """Return the step records of a machine that is off and about to be emptied.

    The reports that lie in its shared memory are first moved to the archive on its disk, as its agent would have done.

    Args:
        job: Name of the job.
        state: State folder of the agent.
        shm: Folder of the agent in shared memory.
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
    """Read the final states from the ranks' logs into ``records``; return how often a rank had two processes.

    Args:
        agents: Clients of the agents.
        job: Name of the job.
        machines: Machines on which it ran.
        ranks: For each of these machines, the ranks on it.
        records: Receives the final states, and the ranks whose log could not be read.
    """
    twice = 0
    for machine, ranks_here in zip(machines, ranks, strict=False):
        for rank in ranks_here:
            data = b""
            try:
                request = pb.ReadLogRequest(job=job, rank=rank, stream=pb.ReadLogRequest.STDERR)
                async for chunk in agents.get(machine.address).read_log(request):
                    data += chunk.data
            except AgentError as error:
                records.unknown.append(f"{machine.name} did not send the log of rank {rank}: {error}")
            text = data.decode(errors="replace")
            twice += copies_in(text)
            if states := _FINAL.findall(text):
                records.final[rank] = states[-1]
    return twice


def copies_in(log: str) -> int:
    """Return how often a rank's log shows a second process: a generation began twice, or began while an older one was
    alive."""
    begun = _MARKER.findall(log)
    again = sum(count - 1 for count in Counter((rank, generation) for rank, generation, _ in begun).values())
    return again + sum(BESIDE in rest for _, _, rest in begun)
