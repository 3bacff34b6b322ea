"""Samples all ranks of a job, on all machines at once, judges several samples, and keeps samples in the ledger.

A machine that does not answer is left out, and no conclusion is drawn from its silence.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from temporalio import activity

from activities.heartbeat import Say
from activities.turns import gathered
from agent.client import AgentClients
from agent.tracer.dump_files import files_of
from agent.v1 import agent_pb2 as pb
from everstep.decisions.blame.hang.analysis import found_of, judge_hang
from everstep.decisions.blame.hang.conclusions import HangLimits
from everstep.decisions.blame.hang.progress import HangCheck, UsedUp, check_hang, work_of
from everstep.decisions.blame.hang.rank_samples import JobSamples
from everstep.dumps.folder import STOPPED, FolderReader, samples_of
from everstep.dumps.py_spy import StackReader
from everstep.errors import EverstepError, LedgerError
from everstep.model.hang import HangResult
from everstep.model.job import JobSpec
from everstep.model.machine import Machine

if TYPE_CHECKING:
    from activities.ledger.ledger import Ledger

LOOK_S = 5.0
"""The time limit of one sample, seconds."""
ANSWERS_S = 1.0
"""The extra time for an agent's answer, seconds."""
PROBLEMS_SHOWN = 2
"""Number of reasons for missing stacks that the evidence of a hang names."""
KEEP_S = 0.2
"""The longest wait for the ledger, seconds; the write continues after that."""

_writing: set[asyncio.Future[None]] = set()
"""Writes that continue after the wait for them has ended."""


@dataclass
class RankLook:
    """A sample: the answers of all machines at about the same moment."""

    at_s: float
    """The time of the sample on the steady clock, seconds."""
    replies: dict[str, pb.StacksReply] = field(default_factory=dict)
    silent: dict[str, str] = field(default_factory=dict)
    """Machine → why it gave no answer."""

    @property
    def generation(self) -> int:
        """The newest generation in the sample; 0: there is none."""
        return max((reply.generation for reply in self.replies.values()), default=0)

    def used(self) -> Iterator[UsedUp]:
        """Yield what each process has used: CPU time, I/O and waits."""
        for reply in self.replies.values():
            for one in reply.processes:
                yield UsedUp(one.rank, one.pid, one.cpu_s, one.waited_s, one.io_bytes, one.switches, one.state)

    def stopped(self) -> list[int]:
        """Return the ranks whose process is stopped."""
        processes = (one for reply in self.replies.values() for one in reply.processes)
        return sorted(one.rank for one in processes if one.role == "trainer" and one.state in STOPPED)


async def look(
    agents: AgentClients,
    job: str,
    machines: Sequence[Machine],
    *,
    generation: int = 0,
    limit_s: float = LOOK_S,
    ranks_only: bool = False,
) -> RankLook:
    """Sample all ranks of a job once; no machine is asked twice.

    Args:
        agents: Clients by address.
        job: The name of the job.
        machines: The machines on which the job runs.
        generation: A machine that runs another generation counts as silent; 0: any generation is accepted.
        limit_s: The time limit of the sample on each machine, seconds.
        ranks_only: Leave out helper processes and flight records.
    """
    found = RankLook(time.monotonic())
    request = pb.StacksRequest(job=job, limit_s=limit_s, ranks_only=ranks_only)

    async def ask(machine: Machine) -> None:
        try:
            reply = await agents.get(machine.address).stacks(request, timeout_s=limit_s + ANSWERS_S)
        except EverstepError as error:
            found.silent[machine.name] = str(error)
            return
        if generation and reply.generation != generation:
            found.silent[machine.name] = f"it runs generation {reply.generation}"
            return
        reply.machine = machine.name
        found.replies[machine.name] = reply

    await gathered(ask(machine) for machine in machines)
    return found


@dataclass(frozen=True)
class Judged:
    """The result of several samples."""

    check: HangCheck
    evidence: JobSamples


def judge_looks(
    looks: Sequence[RankLook],
    spec: JobSpec,
    machines: Sequence[Machine],
    *,
    is_hung: bool = False,
    limits: HangLimits | None = None,
) -> Judged:
    """Judge samples of one job, oldest first. This takes CPU time: call it in a thread.

    Args:
        looks: One or more samples; the last has the current state.
        spec: The specification of the job.
        machines: The job's machines, in order.
        is_hung: It is known from elsewhere that the job does not step.
        limits: The limits of the analysis.
    """
    stacks, readers = StackReader(), []
    for one in (looks[0], looks[-1]) if len(looks) > 1 else looks:
        reader = FolderReader(stacks)
        for reply in one.replies.values():
            reader.read(files_of(reply))
        readers.append(reader)
    evidence = samples_of(readers)
    if is_hung:
        evidence = replace(evidence, is_hung=True)
    names = [machine.name for machine in machines]
    verdict = judge_hang(evidence, spec.topology(), limits, names)
    work = work_of(looks[0].used(), looks[-1].used(), looks[-1].at_s - looks[0].at_s)
    return Judged(check_hang(verdict, evidence, work), evidence)


async def trace(
    agents: AgentClients,
    spec: JobSpec,
    machines: Sequence[Machine],
    *,
    apart_s: float,
    generation: int = 0,
    is_hung: bool = False,
    limit_s: float = LOOK_S,
    say: Say = lambda _: None,
) -> tuple[list[RankLook], Judged]:
    """Take two samples and judge them. The second is not taken if the first has a stopped rank and already shows which
    machine to evict.

    Args:
        agents: Clients by address.
        spec: The specification of the job.
        machines: The job's machines, in order.
        apart_s: The time between the two samples, seconds.
        generation: The generation of the ranks; 0: the newest.
        is_hung: It is known from elsewhere that the job does not step.
        limit_s: The time limit of each sample, seconds.
        say: Shows the progress.
    """
    looks: list[RankLook] = []
    while True:
        say(f"sample {len(looks) + 1} of the ranks on {len(machines)} machines")
        looks.append(await look(agents, spec.name, machines, generation=generation, limit_s=limit_s))
        if len(looks) > 1 or looks[-1].stopped():
            judged = await asyncio.to_thread(judge_looks, looks, spec, machines, is_hung=is_hung)
            if len(looks) > 1 or judged.check.verdict.evicts:
                return looks, judged
        await asyncio.sleep(apart_s)


def hang_found(looks: Sequence[RankLook], judged: Judged, spec: JobSpec, machines: Sequence[Machine]) -> HangResult:
    """Return the result of the samples in the form that the incident keeps."""
    verdict = judged.check.verdict
    last = looks[-1]
    found = found_of(
        verdict,
        spec.topology(),
        [machine.name for machine in machines],
        generation=last.generation,
        looks=len(looks),
        seconds=time.monotonic() - looks[0].at_s,
    )
    evidence = [*found.evidence, *_without_stacks(last)]
    return found.model_copy(update={"silent": sorted(last.silent)[:8], "evidence": evidence})


def _without_stacks(look: RankLook) -> list[str]:
    """Return the most frequent reasons why processes have no stacks, e.g. a right that the agents do not have."""
    processes = [process for reply in look.replies.values() for process in reply.processes]
    problems = Counter(process.problem for process in processes if process.problem)
    return [f"{count} of {len(processes)} processes: {why}" for why, count in problems.most_common(PROBLEMS_SHOWN)]


async def keep_looks(ledger: Ledger, incident: str, looks: Sequence[RankLook], first: int = 1) -> str:
    """Write samples into the ledger, and wait at most ``KEEP_S`` for it; returns why samples may be missing.

    Args:
        ledger: The cluster's ledger.
        incident: The incident that the samples belong to.
        looks: The samples, in order.
        first: The first sample's number within the incident.
    """
    from activities.ledger.ledger import Ledger

    rows = [
        (number, machine, reply.time_ns, reply.SerializeToString())
        for number, look in enumerate(looks, first)
        for machine, reply in look.replies.items()
    ]
    writing = asyncio.ensure_future(ledger.call(Ledger.add_samples, incident, rows))
    _writing.add(writing)
    writing.add_done_callback(_written)
    await asyncio.wait([writing], timeout=KEEP_S)
    if not writing.done():
        return "the ledger did not store the samples in time"
    return str(writing.exception() or "")


def _written(writing: asyncio.Future[None]) -> None:
    _writing.discard(writing)
    if not writing.cancelled() and isinstance(error := writing.exception(), LedgerError):
        activity.logger.warning("the ledger did not store the samples", extra={"error": str(error)})
