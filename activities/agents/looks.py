"""Samples all ranks of a job, on all machines at once, judges several samples, and keeps examples in the ledger.

A machine answers with the signatures of its ranks. They are small, and are judged as one sample of the job. The whole
stacks and records are fetched only of the ranks that matter. A machine that does not answer is left out, and no
conclusion is drawn from its silence.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from temporalio import activity

from activities.heartbeat import Say
from activities.turns import gathered
from agent.client import AgentClients
from agent.tracer.signatures import samples_of
from agent.v1 import agent_pb2 as pb
from everstep.base.text import listed
from everstep.decisions.blame.hang.analysis import found_of, judge_hang
from everstep.decisions.blame.hang.conclusions import HangLimits
from everstep.decisions.blame.hang.examples import examples
from everstep.decisions.blame.hang.progress import HangCheck, check_hang, work_of
from everstep.decisions.blame.hang.rank_samples import JobSamples, compared, merged
from everstep.errors import EverstepError, LedgerError
from everstep.model.hang import HangResult
from everstep.model.job import JobSpec, PlacedJob
from everstep.model.machine import Machine

if TYPE_CHECKING:
    from activities.tools import Tools

LOOK_S = 5.0
"""The time limit of one sample, seconds."""
ANSWERS_S = 1.0
"""The extra time for an agent's answer, seconds."""
PROBLEMS_SHOWN = 2
"""Number of reasons for missing stacks that the evidence of a hang names."""
FETCH_S = 5.0
"""The time limit for fetching whole stacks from a machine, seconds."""
KEEP_S = 0.2
"""The longest wait for the ledger, seconds; the samples are stored after that."""

_keeping: set[asyncio.Future[str]] = set()
"""Samples that are still being stored after the wait for them has ended."""


@dataclass
class RankLook:
    """A sample: the answers of all machines at about the same moment."""

    at_s: float
    """The time of the sample on the steady clock, seconds."""
    parts: dict[str, JobSamples] = field(default_factory=dict)
    """Machine → what the sample shows of its ranks."""
    times_ns: dict[str, int] = field(default_factory=dict)
    """Machine → the time of its part, nanoseconds. The machine finds its whole stacks by it."""
    silent: dict[str, str] = field(default_factory=dict)
    """Machine → why it gave no answer."""
    generation: int = 0
    """The newest generation in the sample; 0: there is none."""

    def samples(self) -> JobSamples:
        """Return what the sample shows of the job."""
        return merged(self.parts.values())

    def has_stopped_rank(self) -> bool:
        """Return whether the process of a rank is stopped."""
        return any(sample.is_stopped for part in self.parts.values() for sample in part.ranks.values())


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
    request = pb.SampleRequest(job=job, limit_s=limit_s, ranks_only=ranks_only)

    async def ask(machine: Machine) -> None:
        try:
            reply = await agents.get(machine.address).sample(request, timeout_s=limit_s + ANSWERS_S)
            if generation and reply.generation != generation:
                found.silent[machine.name] = f"it runs generation {reply.generation}"
                return
            found.parts[machine.name] = samples_of(reply)
        except EverstepError as error:
            found.silent[machine.name] = str(error)
            return
        found.times_ns[machine.name] = reply.time_ns
        found.generation = max(found.generation, reply.generation)

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
    first = last = looks[0].samples()
    if len(looks) > 1:
        last = looks[-1].samples()
    evidence = replace(compared(first, last) if len(looks) > 1 else last, is_hung=is_hung)
    names = [machine.name for machine in machines]
    verdict = judge_hang(evidence, spec.topology(), limits, names)
    work = work_of(first, last, looks[-1].at_s - looks[0].at_s)
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
        if len(looks) > 1 or looks[-1].has_stopped_rank():
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
    evidence = [*found.evidence, *_without_stacks(judged.evidence)]
    return found.model_copy(update={"silent": sorted(last.silent)[:8], "evidence": evidence})


def _without_stacks(samples: JobSamples) -> list[str]:
    """Return the most frequent reasons why processes have no stacks, e.g. a right that the agents do not have."""
    processes = [process for sample in samples.ranks.values() for process in sample.processes]
    problems = Counter(process.problem for process in processes if process.problem)
    return [f"{count} of {len(processes)} processes: {why}" for why, count in problems.most_common(PROBLEMS_SHOWN)]


async def whole_stacks(
    agents: AgentClients, job: str, machines: Sequence[Machine], look: RankLook, ranks: Collection[int] = ()
) -> list[pb.StacksReply]:
    """Fetch the whole stacks and flight records of a sample; machines that do not answer are left out.

    Args:
        agents: Clients by address.
        job: The name of the job.
        machines: The machines on which the job runs.
        look: The sample.
        ranks: The ranks that are wanted; empty: all.
    """
    found: list[pb.StacksReply] = []

    async def fetch(machine: Machine) -> None:
        wanted = [rank for rank in look.parts[machine.name].ranks if not ranks or rank in ranks]
        if not wanted:
            return
        request = pb.StacksRequest(job=job, time_ns=look.times_ns[machine.name], ranks=wanted)
        with contextlib.suppress(EverstepError):
            reply = await agents.get(machine.address).stacks(request, timeout_s=FETCH_S)
            reply.machine = machine.name
            found.append(reply)

    await gathered(fetch(machine) for machine in machines if machine.name in look.parts)
    return found


async def keep_looks(
    tools: Tools, incident: str, job: PlacedJob, looks: Sequence[RankLook], *, named: Sequence[int], first: int = 1
) -> str:
    """Write whole stacks and records of the ranks that matter into the ledger, and wait at most ``KEEP_S`` for it.

    Args:
        tools: The agents and the ledger.
        incident: The incident that the samples belong to.
        job: The job.
        looks: The samples, in order.
        named: The ranks that the verdict names.
        first: The first sample's number within the incident.

    Returns:
        Why stacks may be missing; empty: none are.
    """
    keeping = asyncio.ensure_future(_keep(tools, incident, job, looks, named=named, first=first))
    _keeping.add(keeping)
    keeping.add_done_callback(_kept)
    await asyncio.wait([keeping], timeout=KEEP_S)
    if not keeping.done():
        return "the ledger did not store the samples in time"
    return str(keeping.exception() or keeping.result())


async def _keep(
    tools: Tools, incident: str, job: PlacedJob, looks: Sequence[RankLook], *, named: Sequence[int], first: int
) -> str:
    """Fetch and write; returns which machines did not send their stacks."""
    from activities.ledger.ledger import Ledger

    samples = await asyncio.to_thread(looks[-1].samples)
    kept = examples(samples, named)
    if not kept:
        return ""
    rows, missing = [], set[str]()
    for number, one in enumerate(looks, first):
        replies = await whole_stacks(tools.agents, job.spec.name, job.machines, one, kept.keys())
        asked = {name for name, part in one.parts.items() if part.ranks.keys() & kept.keys()}
        missing |= asked - {reply.machine for reply in replies}
        for reply in replies:
            if len(kept) < len(samples.ranks):
                reply.alike.update({rank: kept[rank] for rank in one.parts[reply.machine].ranks if rank in kept})
            rows.append((number, reply.machine, reply.time_ns, reply.SerializeToString()))
    await tools.ledger.call(Ledger.add_samples, incident, rows)
    return f"no stacks came from {listed(sorted(missing))}" if missing else ""


def _kept(keeping: asyncio.Future[str]) -> None:
    _keeping.discard(keeping)
    if not keeping.cancelled() and isinstance(error := keeping.exception(), LedgerError):
        activity.logger.warning("the ledger did not store the samples", extra={"error": str(error)})
