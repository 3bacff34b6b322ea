"""The analysis of a hang: which machines should leave the job."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from everstep.base.text import cut, listed
from everstep.decisions.blame.hang.by_waiting import by_waiting, judge_mismatch
from everstep.decisions.blame.hang.conclusions import (
    HangCase,
    HangLimits,
    describe_collectives,
    named,
    over_evicted,
    unknown,
)
from everstep.decisions.blame.hang.outliers import find_outliers
from everstep.decisions.blame.hang.picture import picture
from everstep.decisions.blame.hang.rank_samples import JobSamples
from everstep.decisions.blame.hang.shared_group import shared_group
from everstep.decisions.blame.hang.verdict import HangVerdict, names_of
from everstep.decisions.blame.hang.wait_for import wait_graph
from everstep.model.finding import Finding, FindingSource, MachineFinding
from everstep.model.hang import HangConclusion, HangMethod, HangResult
from everstep.model.topology import Topology

ONE_SAMPLE = "there was only one sample: whether the job hangs is not certain, and a second sample would show it"


def judge_hang(
    samples: JobSamples, topology: Topology, limits: HangLimits | None = None, names: Sequence[str] = ()
) -> HangVerdict:
    """Judge a job that does not step; the conclusion is UNKNOWN if the samples show no reason.

    Args:
        samples: The samples of the job's ranks.
        topology: The topology of the job.
        limits: The limits of the analysis.
        names: The names of the machines, in their order; for people.
    """
    activities = {rank: sample.activity for rank, sample in samples.ranks.items() if sample.trainer}
    differing = find_outliers(activities, topology)
    case = HangCase(samples, topology, limits or HangLimits(), names, wait_graph(samples, topology), differing)
    verdict = _unless_outside(case, _allowed_by_samples(case, _conclude(case)))
    drawn = picture(
        topology,
        differing.groups,
        named=verdict.ranks if verdict.conclusion is HangConclusion.NAMES else (),
        evicted=verdict.machines,
    )
    silent = tuple(rank for rank in range(topology.world_size) if not samples.of(rank).is_known)
    return replace(verdict, unknown=silent, stacks=differing.groups, picture=drawn)


def _unless_outside(case: HangCase, verdict: HangVerdict) -> HangVerdict:
    """Return the verdict, or UNKNOWN if the ranks that it names only wait for something outside of the job.

    A slow server is no fault of the machine that waits for it, and the job continues once the server answers.
    """
    if not verdict.evicts or not all(case.samples.of(rank).waits_outside for rank in verdict.ranks):
        return verdict
    waits = sorted({case.samples.of(rank).blocked_in for rank in verdict.ranks} - {""})
    what = f" ({', '.join(waits)})" if waits else ""
    reason = f"the job waits for something outside of it{what}: {verdict.reason}"
    return replace(unknown(reason, verdict.evidence), is_outside=True)


def _allowed_by_samples(case: HangCase, verdict: HangVerdict) -> HangVerdict:
    """Return the verdict, or UNKNOWN if it would evict a machine because of one sample that was taken at any time.

    Such a sample proves nothing, since in a healthy job, too, some ranks wait for others at any time. Flight records
    without stacks are enough, since torch writes them only after a rank has waited for long. So is a stopped process.
    """
    samples = case.samples
    if samples.moved is not None or samples.is_hung or verdict.conclusion is HangConclusion.UNKNOWN:
        return verdict
    sampled_at_any_time = bool(samples.ras_ranks) or any(sample.trainer for sample in samples.ranks.values())
    if verdict.evicts and sampled_at_any_time and verdict.method is not HangMethod.STATE:
        why = f"one sample does not show whether the job hangs or computes. If it hangs: {verdict.reason}"
        return unknown(why, verdict.evidence)
    return replace(verdict, evidence=(*verdict.evidence, ONE_SAMPLE))


def _conclude(case: HangCase) -> HangVerdict:
    if not case.known:
        return unknown("nothing is known about any rank")
    if sum(sample.is_stopped for sample in case.samples.ranks.values()) == case.topology.world_size:
        return unknown("all ranks are stopped (state T): the job was paused on purpose")
    if progressed := _progressed(case):
        several = len(progressed) > 1
        return HangVerdict(
            HangConclusion.NOT_HUNG,
            HangMethod.NONE,
            f"{len(progressed)} rank{'s' * several} that wait{'s' * (not several)} for others progressed between two "
            f"samples: rank {listed(progressed)}",
        )
    reasons = []
    for method in case.limits.methods:
        verdict = _METHODS[method](case)
        if isinstance(verdict, HangVerdict):
            return verdict
        reasons.append(verdict)
    return unknown("; ".join(filter(None, reasons)) or "no method was chosen", describe_collectives(case.graph))


def _progressed(case: HangCase) -> list[int]:
    """Return the ranks that moved between the samples, and that wait for others.

    Only these ranks show that the job progresses: a rank that waits for no rank may move in an endless loop.
    """
    entered = {rank for collective in case.graph.collectives for rank in collective.entered}
    waiting = entered | case.graph.blind | case.graph.edges.keys()
    return sorted((case.samples.moved or frozenset()) & waiting)


def _by_state(case: HangCase) -> HangVerdict | str:
    stopped = tuple(sorted(rank for rank, sample in case.samples.ranks.items() if sample.is_stopped))
    if not stopped:
        return ""
    if not case.on_few_machines(stopped):
        return f"{len(stopped)} ranks are stopped, on too many machines to evict"
    processes = "their processes are" if len(stopped) > 1 else "its process is"
    return named(case, stopped, HangMethod.STATE, f"{processes} stopped (state T)")


def _by_waiting(case: HangCase) -> HangVerdict | str:
    return judge_mismatch(case.graph, case.topology, case.names) or by_waiting(case)


def _by_stacks(case: HangCase) -> HangVerdict | str:
    outliers, undecided = case.differing.ranks, case.differing.undecided
    if not outliers:
        if not case.differing.groups:
            return "there are no stacks"
        if undecided:
            return f"no stack has a majority in the pipeline stages of {len(undecided)} ranks"
        return "no rank has another stack than most of its peers"
    shared = shared_group(outliers, case.topology, most_of_job=case.limits.most_over_evicted)
    if shared is None:
        return f"{len(outliers)} outliers share no group that is small enough: rank {listed(outliers)}"
    return over_evicted(case, outliers, shared, HangMethod.STACKS, "they do not do what most of their peers do")


_METHODS: Mapping[HangMethod, Callable[[HangCase], HangVerdict | str]] = {
    HangMethod.STATE: _by_state,
    HangMethod.WAIT_FOR: _by_waiting,
    HangMethod.STACKS: _by_stacks,
}


RANKS_KEPT = 64
MACHINES_KEPT = 1024
LINES_KEPT = 12
PICTURE_CHARACTERS = 6000
REASON_CHARACTERS = 600
"""The largest numbers of ranks, machines, lines of evidence and characters of a verdict that an incident keeps."""


def found_of(
    verdict: HangVerdict, topology: Topology, names: Sequence[str], *, generation: int, looks: int, seconds: float
) -> HangResult:
    """Return the verdict in the form that an incident keeps: with names of machines, and of limited size.

    Args:
        verdict: The verdict of the analysis.
        topology: The topology of the job.
        names: The names of the job's machines, in order.
        generation: The generation of the samples.
        looks: The number of samples.
        seconds: The duration of the samples.
    """
    suspects = sorted({topology.machine(rank) for rank in verdict.ranks} & set(verdict.machines))
    return HangResult(
        generation=generation,
        conclusion=verdict.conclusion,
        method=verdict.method,
        reason=cut(verdict.reason, REASON_CHARACTERS),
        ranks=list(verdict.ranks[:RANKS_KEPT]),
        machines=list(names_of(verdict.machines[:MACHINES_KEPT], names)),
        suspects=list(names_of(suspects, names)),
        innocent=verdict.innocent,
        evidence=[cut(line, REASON_CHARACTERS) for line in verdict.evidence[:LINES_KEPT]],
        picture=cut(verdict.picture, PICTURE_CHARACTERS),
        unknown=len(verdict.unknown),
        looks=looks,
        seconds=round(seconds, 3),
    )


def findings_of_hang(found: HangResult) -> list[MachineFinding]:
    """Return a finding about each machine that should leave the job. In an over-eviction, no finding is sure."""
    return [
        MachineFinding(
            machine=machine,
            finding=Finding(
                inspection=FindingSource.HANG,
                source=FindingSource.HANG,
                reason="hang-group" if found.over_evicts else "hang",
                text=_why_it_leaves(found, machine),
                sure=not found.over_evicts,
            ),
        )
        for machine in found.machines
    ]


def _why_it_leaves(found: HangResult, machine: str) -> str:
    if not found.over_evicts:
        return f"the job hangs: {found.reason}"
    count = f"{found.innocent} of {len(found.machines)} machines leave although none of their ranks is an outlier"
    own = "one of its ranks is an outlier" if machine in found.suspects else "it leaves on purpose"
    return f"over-eviction, {count}; {own}. The job hangs: {found.reason}"
