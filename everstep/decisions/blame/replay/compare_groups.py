"""Draws the conclusion of a replay from its trials: which groups crashed, hung, computed NaN, or computed other bits.

ByteRobust (section 6) compares the groups of a phase. Here all groups of both phases and of all repeats are compared.
They run the same script with the same sizes from the same beginning, so all should compute the same. If a phase has
only two groups, the groups of the other phase show which of the two is right.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from everstep.base.text import listed
from everstep.decisions.blame.replay.groups import ReplayPlan
from everstep.decisions.blame.replay.kept_runs import answer_of
from everstep.decisions.blame.replay.suspects import not_reproduced, suspects
from everstep.model.finding import Finding, FindingSource, MachineFinding
from everstep.model.replay import GroupRun, ReplayConclusion, Replayed, RunEnd

FAULTS = frozenset({RunEnd.CRASHED, RunEnd.HUNG, RunEnd.NOT_FINITE})
"""The ends of a trial that show a fault without a comparison."""
BY_CHANCE = frozenset({RunEnd.CRASHED, RunEnd.HUNG, RunEnd.RAN})
"""The ends of a faulty trial that a script may cause by chance, in any group. ``RAN`` is the end of a trial that
computed other bits, which happens if the script is not repeatable."""
STARTED = frozenset({RunEnd.RAN, RunEnd.HUNG, RunEnd.SLOW, RunEnd.NOT_FINITE})
"""The ends of a trial in which all ranks completed a first step."""
TRIES = 2
"""A group that never completed a first step is faulty only after this many trials."""
LEAST_SHOWN = 4
"""A single machine is named only after this many faulty trials of its groups. After fewer trials, chance may be the
reason, since each row has a machine in common with each column."""
LISTED = 4
"""Number of groups and machines in a text."""
EVIDENCE = 6
"""Number of groups whose fault is part of the evidence."""


@dataclass(frozen=True, slots=True)
class GroupVerdict:
    """The verdict on one group after all of its trials."""

    faulty: bool | None
    """None: not known."""
    why: str = ""
    shown: int = 0
    """The number of faulty trials of the group."""
    ends: frozenset[RunEnd] = frozenset()
    """The ends of the faulty trials."""


Kind = tuple[str, str]
"""The hardware of a trial, and the shape of its results; only trials of one kind can be compared."""


def _kind(run: GroupRun) -> Kind:
    return run.kind, run.shape


def usual_of(plan: ReplayPlan, runs: Sequence[GroupRun]) -> dict[Kind, GroupRun]:
    """Return kind → a trial whose result is right, since two groups without a common machine agree on it.

    Groups that agree but have a common machine may have the same error. Their result counts only if no groups without a
    common machine agree, and if one machine is in all groups with another result. If two results count, neither is
    right for certain, and the kind has no entry.
    """
    members = {group.name: frozenset(group.machines) for group in plan.groups}
    kinds: dict[Kind, dict[str, list[GroupRun]]] = defaultdict(lambda: defaultdict(list))
    for run in runs:
        if run.end is RunEnd.RAN and (answer := answer_of(run)):
            kinds[_kind(run)][answer].append(run)
    usual = {}
    for kind, by_answer in kinds.items():
        answers = [(alike[0], [members[name] for name in {run.group for run in alike}]) for alike in by_answer.values()]
        right = [run for run, groups in answers if _independent(groups)] or [
            run for run, groups in answers if len(groups) > 1 and _explained(answers, run)
        ]
        if len(right) == 1:
            usual[kind] = right[0]
    return usual


def _independent(groups: Sequence[frozenset[int]]) -> bool:
    """Return whether two of these groups have no common machine. Such a machine could cause the same error in both."""
    return any(one.isdisjoint(other) for one, other in combinations(groups, 2))


def _explained(answers: Sequence[tuple[GroupRun, Sequence[frozenset[int]]]], right: GroupRun) -> bool:
    """Return whether some machine is in all groups with another result than ``right``."""
    others = [group for run, groups in answers if run is not right for group in groups]
    return bool(others and frozenset.intersection(*others))


def _two_are_in_all(plan: ReplayPlan) -> bool:
    """Return whether each group has one of two machines: if both are at fault, all groups are faulty."""
    count, groups_of = len(plan.groups), set(plan.groups_of_machines.values())
    if 2 * max(map(len, groups_of)) < count:
        return False
    return any(len(one | other) == count for one, other in combinations(groups_of, 2))


def judge_runs(plan: ReplayPlan, runs: Sequence[GroupRun]) -> dict[str, GroupVerdict]:
    """Return the verdict on each group. A group with a faulty trial is faulty.

    Args:
        plan: The planned groups.
        runs: The trials of all repeats.
    """
    usual, stuck = usual_of(plan, runs), _never_started(plan, runs)
    broke = bool(stuck) or any(run.end in FAULTS for run in runs)
    of_group: dict[str, list[GroupVerdict]] = defaultdict(list)
    shown, ends = Counter[str](), defaultdict[str, set[RunEnd]](set)
    for run in runs:
        if run.end is RunEnd.NOT_STARTED and run.group in stuck:
            verdict = GroupVerdict(True, f"{run.end} in {TRIES} runs or more, unlike all other groups: {run.why}")
        else:
            verdict = _judged(run, usual, broke=broke)
        of_group[run.group].append(verdict)
        if verdict.faulty:
            shown[run.group] += run.count
            ends[run.group].add(run.end)
    judged = {}
    for name in (group.name for group in plan.groups):
        verdicts = of_group.get(name, [])
        bad = next((verdict for verdict in verdicts if verdict.faulty), None)
        good = next((verdict for verdict in verdicts if verdict.faulty is False), None)
        if bad:
            bad = replace(bad, shown=shown[name], ends=frozenset(ends[name]))
        judged[name] = bad or good or (verdicts[0] if verdicts else GroupVerdict(None, "it was not run"))
    return judged


def _never_started(plan: ReplayPlan, runs: Sequence[GroupRun]) -> frozenset[str]:
    """Return the groups that are faulty because they never completed a first step.

    A healthy machine may also start slowly. So groups that never started are faulty only if each of them was tried
    again, all other groups started, and they are exactly the groups of one machine.
    """
    started, tries = {run.group for run in runs if run.end in STARTED}, Counter[str]()
    for run in runs:
        tries[run.group] += run.count if run.end is RunEnd.NOT_STARTED else 0
    late = frozenset(group.name for group in plan.groups if group.name not in started)
    if not late or any(tries[name] < TRIES for name in late):
        return frozenset()
    return late if late in plan.groups_of_machines.values() else frozenset()


def _judged(run: GroupRun, usual_of_kind: Mapping[Kind, GroupRun], *, broke: bool) -> GroupVerdict:
    """Return the verdict of one trial; ``broke``: whether some trial of the replay broke."""
    if run.end in FAULTS:
        return GroupVerdict(True, f"{run.end}: {run.why}" if run.why else str(run.end))
    if run.end is not RunEnd.RAN:
        return GroupVerdict(None, run.why or str(run.end))
    # If some trials broke, the replay looks for that fault, and a trial that reached its end does not have it.
    uncompared = False if broke else None
    if not answer_of(run):
        return GroupVerdict(uncompared, "its script reports neither losses nor a state: there is nothing to compare")
    usual = usual_of_kind.get(_kind(run))
    if usual is None:
        why = "no two groups without a common machine agree, so which result is right is not known"
        for other in (other for other in usual_of_kind.values() if other.kind == run.kind):
            why = f"it reports {run.shape}, and {other.group} reports {other.shape}: they cannot be compared"
        return GroupVerdict(uncompared, why)
    if answer_of(run) == answer_of(usual):
        return GroupVerdict(False)
    difference = _difference(run, usual)
    return GroupVerdict(True, f"other bits than {usual.group}{': ' if difference else ''}{difference}")


def _difference(run: GroupRun, usual: GroupRun) -> str:
    """Describe the difference between two trials; empty if the digests of one of them are not kept."""
    if not all(trial.losses or trial.states for trial in (run, usual)):
        return ""
    if (run.steps_each, run.ranks_each) == (usual.steps_each, usual.ranks_each):
        for index, (own, right) in enumerate(zip(run.losses, usual.losses, strict=False)):
            if own != right:
                return f"the loss from step {_counted(index, run.steps_each, first=1)} on"
        differ = [own != right for own, right in zip(run.states, usual.states, strict=False)]
        ranks = [_counted(index, run.ranks_each, first=0) for index, other in enumerate(differ) if other]
        if ranks:
            return f"the state of rank {listed(ranks, LISTED)} at the end"
    return "the number of steps or ranks"


def _counted(index: int, each: int, *, first: int) -> str:
    """Return the steps or ranks of a digest as text: ``7``, or ``33 to 36``."""
    begin = first + index * each
    return str(begin) if each == 1 else f"{begin} to {begin + each - 1}"


def conclude(
    plan: ReplayPlan,
    names: Sequence[str],
    runs: Sequence[GroupRun],
    *,
    shows: float,
) -> Replayed:
    """Return the conclusion from all trials.

    Args:
        plan: The planned groups.
        names: The names of the machines, in the job's order.
        runs: The trials of all groups so far.
        shows: The probability that a fault shows in one trial; only the text depends on it.
    """
    judged = judge_runs(plan, runs)
    conclusion, positions = suspects(plan, {name: verdict.faulty for name, verdict in judged.items()})
    bad = {name: verdict.why for name, verdict in judged.items() if verdict.faulty}
    accused = [names[x] for x in positions]
    if text := _without_end(plan, runs):
        conclusion, accused = ReplayConclusion.UNABLE, []
    elif bad and len(bad) == len(judged):
        beside = ", but two machines together may" if _two_are_in_all(plan) else ""
        text = f"every group showed a fault, so no single machine causes it{beside}: {_groups(bad)}"
        conclusion, accused = ReplayConclusion.EVERYWHERE, []
    elif accused and _may_be_chance(conclusion, list(judged.values())):
        text = (
            f"{_groups(bad)}: {listed(accused, LISTED)} would explain it, but so would chance, since any row and any "
            "column have a machine in common, and they have not shown the fault often enough"
        )
        conclusion, accused = ReplayConclusion.INCONSISTENT, []
    else:
        ran = Counter[str]()
        for run in runs:
            ran[run.group] += run.count if run.end is RunEnd.RAN else 0
        # Each machine is in one group of each phase.
        missed = not_reproduced(plan.size, shows, 2 * min((ran[group.name] for group in plan.groups), default=0))
        text = _text(conclusion, accused, judged, missed)
    return Replayed(
        found=conclusion,
        text=text,
        suspects=accused,
        evidence=[f"{name}: {why}"[:300] for name, why in list(bad.items())[:EVIDENCE]],
        repeats=max((run.repeat for run in runs), default=0),
    )


def _may_be_chance(conclusion: ReplayConclusion, judged: Sequence[GroupVerdict]) -> bool:
    """Return whether the faulty groups do not name a machine yet, because chance explains them as well.

    A script that sometimes crashes, or computes other bits, does so in groups at random, and each row has a machine in
    common with each column. So if a single machine is suspected, its groups have to show the fault several times in
    total. If several machines are suspected, each faulty group has to show the fault at least twice.
    """
    bad = [verdict for verdict in judged if verdict.faulty]
    by_chance = [verdict for verdict in bad if verdict.ends <= BY_CHANCE]
    if conclusion is ReplayConclusion.ONE:
        return bool(by_chance) and sum(verdict.shown for verdict in bad) < LEAST_SHOWN
    return any(verdict.shown < 2 for verdict in by_chance)


def _without_end(plan: ReplayPlan, runs: Sequence[GroupRun]) -> str:
    """Describe a replay in which all groups were run and none reached its end in time; empty for any other replay.

    A single machine at fault is in some groups only: the other groups would have reached their end.
    """
    ends: dict[str, set[RunEnd]] = defaultdict(set)
    for run in runs:
        ends[run.group].add(run.end)
    names = {group.name for group in plan.groups}
    seen = {end for name in names for end in ends[name]}
    ended = seen & {RunEnd.RAN, RunEnd.CRASHED, RunEnd.NOT_FINITE}
    if ended or not seen & {RunEnd.HUNG, RunEnd.SLOW, RunEnd.NOT_STARTED} or any(not ends[name] for name in names):
        return ""
    hung = [name for name in ends if ends[name] & {RunEnd.HUNG, RunEnd.SLOW}]
    late = [name for name in ends if RunEnd.NOT_STARTED in ends[name] and name not in hung]
    unable: dict[str, str] = {}
    for run in runs:
        if run.group not in {*hung, *late}:
            unable.setdefault(run.group, run.why or str(run.end))
    parts = [
        f"{listed(hung, LISTED)} did not complete the steps in time, a larger replay.timeout_s may help"
        if hung
        else "",
        f"{listed(late, LISTED)} did not start in time, a larger confirm.timeout_s may help" if late else "",
        f"{_groups(unable)} could not be run" if unable else "",
    ]
    return f"no group reached its end: {'; '.join(filter(None, parts))}"


def _text(conclusion: ReplayConclusion, accused: Sequence[str], judged: Mapping[str, GroupVerdict], missed: str) -> str:
    bad = {name: verdict.why for name, verdict in judged.items() if verdict.faulty}
    if conclusion is ReplayConclusion.ONE:
        only = "is the only machine" if len(accused) == 1 else "are the only machines"
        return f"{listed(accused, LISTED)} {only} in every group that showed a fault: {_groups(bad)}"
    if conclusion is ReplayConclusion.SEVERAL:
        return f"every group of {listed(accused, LISTED)} showed a fault: {_groups(bad)}"
    if conclusion is ReplayConclusion.INCONSISTENT:
        return f"{_groups(bad)}: no machine explains this, so the fault does not show in every run"
    if conclusion is ReplayConclusion.INCOMPLETE:
        unknown = {name: verdict.why for name, verdict in judged.items() if verdict.faulty is None}
        return f"not known: {_groups(unknown)}" + (f"; faults showed in {_groups(bad)}" if bad else "")
    return missed


def _groups(groups: Mapping[str, str]) -> str:
    """Return text such as ``row 3 (crashed: rank 1 on m7 ended by SIGKILL)``; groups with equal faults are combined."""
    by_reason: dict[str, list[str]] = defaultdict(list)
    for name, why in groups.items():
        by_reason[why].append(name)
    parts = [f"{listed(names, LISTED)} ({why})" for why, names in list(by_reason.items())[:LISTED]]
    left = len(by_reason) - len(parts)
    return "; ".join(parts) + (f"; and {left} more" if left else "")


def is_settled(replayed: Replayed) -> bool:
    """Return whether another repeat would change nothing: machines are named, or no machine can be named."""
    return replayed.found in {
        ReplayConclusion.ONE,
        ReplayConclusion.SEVERAL,
        ReplayConclusion.EVERYWHERE,
        ReplayConclusion.UNABLE,
    }


def findings_of_replay(replayed: Replayed) -> list[MachineFinding]:
    """Return the finding about each machine that a replay accuses; it is sure if there is only one such machine."""
    finding = Finding(
        inspection=FindingSource.REPLAY,
        source=FindingSource.REPLAY,
        reason="failed-replay",
        text=replayed.text,
        sure=len(replayed.suspects) == 1,
        evidence=replayed.evidence,
    )
    return [MachineFinding(machine=machine, finding=finding) for machine in replayed.suspects]
