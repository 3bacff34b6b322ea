"""The faults of replay groups, from the result of each trial: it crashed, hung, computed NaN, or computed other bits.

ByteRobust (section 6) compares the groups of a phase. Here all groups of both phases, and of all repeats, are compared
together: they run the same script with the same sizes from the same beginning, so all have to compute the same. If
a phase has only two groups, a third group shows which of them is right.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from everstep.base.text import listed
from everstep.decisions.blame.replay.groups import ReplayPlan
from everstep.decisions.blame.replay.kept_runs import answer_of
from everstep.decisions.blame.replay.suspects import Found, not_reproduced, suspects
from everstep.model.finding import Finding, FindingSource, MachineFinding
from everstep.model.replay import GroupRun, ReplayConclusion, Replayed, RunEnd

FAULTS = frozenset({RunEnd.CRASHED, RunEnd.HUNG, RunEnd.NOT_FINITE})
"""Ends of a trial that are a fault, whatever other groups computed."""
BY_CHANCE = frozenset({RunEnd.CRASHED, RunEnd.HUNG, RunEnd.RAN})
"""Ends of a trial that a script may cause by itself, now and then, in any group. The last is the end of a trial that
computed other bits, as a script that is not repeatable does."""
STARTED = frozenset({RunEnd.RAN, RunEnd.HUNG, RunEnd.SLOW, RunEnd.NOT_FINITE})
"""Ends of a run in which all ranks did a first step."""
TRIES = 2
"""A group is at fault for not coming to a first step if it did not so often, and never did."""
SHOWN = 4
"""The number of broken or differing trials with one machine before it is named for them: a row and a column that broke
by chance also have a machine in common."""
NAMED = 4
"""Groups and machines that a text names."""
EVIDENCE = 6
"""The number of groups whose fault is described with the accusation."""


@dataclass(frozen=True, slots=True)
class GroupVerdict:
    """The verdict on one group after all of its trials."""

    faulty: bool | None
    """None: not known."""
    why: str = ""
    shown: int = 0
    """The number of the group's trials with this fault."""
    ends: frozenset[RunEnd] = frozenset()
    """The ends of these trials."""


Kind = tuple[str, str]
"""Of hardware, and of what a run says: of as many steps and ranks as another one."""


def _kind(run: GroupRun) -> Kind:
    return run.kind, run.shape


def usual_of(plan: ReplayPlan, runs: Sequence[GroupRun]) -> dict[Kind, GroupRun]:
    """Kind → a run that is right: what two groups without a common machine both computed.

    Groups that agree and share a machine may have the same error from it. They count where no others do, and where one
    machine is in all groups that computed something else. Where two answers count, nobody knows which is right.
    """
    members = {group.name: frozenset(group.machines) for group in plan.groups}
    kinds: dict[Kind, dict[str, list[GroupRun]]] = defaultdict(lambda: defaultdict(list))
    for run in runs:
        if run.end is RunEnd.RAN and (answer := answer_of(run)):
            kinds[_kind(run)][answer].append(run)
    usual = {}
    for kind, found in kinds.items():
        answers = [(alike[0], [members[name] for name in {run.group for run in alike}]) for alike in found.values()]
        right = [run for run, groups in answers if _independent(groups)] or [
            run for run, groups in answers if len(groups) > 1 and _explained(answers, run)
        ]
        if len(right) == 1:
            usual[kind] = right[0]
    return usual


def _independent(groups: Sequence[frozenset[int]]) -> bool:
    """Return whether two of these groups have no machine in common: no machine can have caused the same
    error in both."""
    return any(one.isdisjoint(other) for one, other in combinations(groups, 2))


def _explained(answers: Sequence[tuple[GroupRun, Sequence[frozenset[int]]]], right: GroupRun) -> bool:
    """Return whether some machine is in all groups that computed something else than ``right``."""
    others = [group for run, groups in answers if run is not right for group in groups]
    return bool(others and frozenset.intersection(*others))


def _two_are_in_all(plan: ReplayPlan) -> bool:
    """Return whether two machines together are in all groups: if both are at fault, no single machine explains the
    fault."""
    count, of_machines = len(plan.groups), set(plan.of_machines.values())
    if 2 * max(map(len, of_machines)) < count:
        return False
    return any(len(one | other) == count for one, other in combinations(of_machines, 2))


def judge_runs(plan: ReplayPlan, runs: Sequence[GroupRun]) -> dict[str, GroupVerdict]:
    """Return the verdict on each group. A group that showed a fault in any of its trials has that fault.

    Args:
        plan: The planned groups.
        runs: The trials; several of a group if both phases were repeated.
    """
    usual, stuck = usual_of(plan, runs), _never_started(plan, runs)
    broke = bool(stuck) or any(run.end in FAULTS for run in runs)
    of_group: dict[str, list[GroupVerdict]] = defaultdict(list)
    shown, ends = Counter[str](), defaultdict[str, set[RunEnd]](set)
    for run in runs:
        if run.end is RunEnd.NOT_STARTED and run.group in stuck:
            why = f"{run.end}, in {TRIES} runs or more, and all other groups did: {run.why}"
            of_group[run.group].append(GroupVerdict(True, why))
        else:
            of_group[run.group].append(_judged(run, usual, broke=broke))
        if of_group[run.group][-1].faulty:
            shown[run.group] += run.count
            ends[run.group].add(run.end)
    found = {}
    for group in plan.groups:
        seen = of_group.get(group.name, [])
        bad = next((one for one in seen if one.faulty), None)
        good = next((one for one in seen if one.faulty is False), None)
        if bad:
            bad = replace(bad, shown=shown[group.name], ends=frozenset(ends[group.name]))
        found[group.name] = bad or good or (seen[0] if seen else GroupVerdict(None, "it was not run"))
    return found


def _never_started(plan: ReplayPlan, runs: Sequence[GroupRun]) -> frozenset[str]:
    """Return the groups that are at fault because they never reached a first step.

    A start may be slow for many reasons that are no fault of a machine. So it counts only if each of these
    groups was tried again, all other groups started, and these groups are exactly the groups of one machine.
    """
    started, tries = {run.group for run in runs if run.end in STARTED}, Counter[str]()
    for run in runs:
        tries[run.group] += run.count if run.end is RunEnd.NOT_STARTED else 0
    late = frozenset(group.name for group in plan.groups if group.name not in started)
    if not late or any(tries[name] < TRIES for name in late):
        return frozenset()
    return late if late in plan.of_machines.values() else frozenset()


def _judged(run: GroupRun, known: Mapping[Kind, GroupRun], *, broke: bool) -> GroupVerdict:
    if run.end in FAULTS:
        return GroupVerdict(True, f"{run.end}: {run.why}" if run.why else str(run.end))
    if run.end is not RunEnd.RAN:
        return GroupVerdict(None, run.why or str(run.end))
    # If other groups broke, a group that reached its end has no such fault, whatever it computed.
    uncompared = False if broke else None
    if not answer_of(run):
        return GroupVerdict(uncompared, "its script reports neither losses nor a state: there is nothing to compare")
    usual = known.get(_kind(run))
    if usual is None:
        why = "no two groups of other machines agree: nobody knows which is right"
        for one in (one for one in known.values() if one.kind == run.kind):
            why = f"it says {run.shape}, {one.group} says {one.shape}: what is missing is not compared"
        return GroupVerdict(uncompared, why)
    if answer_of(run) == answer_of(usual):
        return GroupVerdict(False)
    difference = _difference(run, usual)
    return GroupVerdict(True, f"other bits than {usual.group}{': ' if difference else ''}{difference}")


def _difference(run: GroupRun, usual: GroupRun) -> str:
    """Describe the difference between two trials; empty: it is not kept of so many answers."""
    if not all(one.losses or one.states for one in (run, usual)):
        return ""
    if (run.steps_each, run.ranks_each) == (usual.steps_each, usual.ranks_each):
        for place, (own, right) in enumerate(zip(run.losses, usual.losses, strict=False)):
            if own != right:
                return f"the loss from step {_counted(place, run.steps_each, first=1)} on"
        differ = [own != right for own, right in zip(run.states, usual.states, strict=False)]
        ranks = [_counted(place, run.ranks_each, first=0) for place, other in enumerate(differ) if other]
        if ranks:
            return f"the state of rank {listed(ranks, NAMED)} at the end"
    return "the number of steps or ranks"


def _counted(place: int, each: int, *, first: int) -> str:
    """Describe the steps or ranks of a digest: ``7``, or ``33 to 36``."""
    begin = first + place * each
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
        shows: The probability that a fault shows in one trial, for the text if no trial showed a fault.
    """
    judged = judge_runs(plan, runs)
    verdict = suspects(plan, {name: one.faulty for name, one in judged.items()})
    bad = {name: one.why for name, one in judged.items() if one.faulty}
    repeats = max((run.repeat for run in runs), default=0)
    evidence = [f"{name}: {why}"[:300] for name, why in list(bad.items())[:EVIDENCE]]
    if said := _nothing_ended(plan, runs):
        return Replayed(found=ReplayConclusion.UNABLE, text=said, evidence=evidence, repeats=repeats)
    if bad and len(bad) == len(judged):
        beside = ", or of two of them at once" if _two_are_in_all(plan) else ""
        return Replayed(
            found=ReplayConclusion.EVERYWHERE,
            text=f"every group showed it, {_groups(bad)}: it is not of a machine{beside}",
            evidence=evidence,
            repeats=repeats,
        )
    accused = [names[x] for x in verdict.machines]
    if accused and (chance := _chance(verdict.found, list(judged.values()))):
        return Replayed(
            found=ReplayConclusion.INCONSISTENT,
            text=f"{_groups(bad)}; {listed(accused, NAMED)} would explain it, and so would chance: {chance}",
            evidence=evidence,
            repeats=repeats,
        )
    ran = Counter[str]()
    for run in runs:
        ran[run.group] += run.count if run.end is RunEnd.RAN else 0
    # Each machine is in one group of each phase.
    missed = not_reproduced(plan.size, shows, 2 * min((ran[group.name] for group in plan.groups), default=0))
    return Replayed(
        found=ReplayConclusion(verdict.found),
        text=_text(verdict.found, accused, judged, missed),
        suspects=accused,
        evidence=evidence,
        repeats=repeats,
    )


def _chance(found: Found, judged: Sequence[GroupVerdict]) -> str:
    """Return why groups that showed a fault do not name a machine yet; empty: they do.

    A script that crashes, or computes other bits, now and then does so in groups at random, and whatever row and column
    that are, they have a machine in common. So they have to show it again: one machine's groups so often in all, those
    of several each.
    """
    bad = [verdict for verdict in judged if verdict.faulty]
    maybe = [one for one in bad if one.ends <= BY_CHANCE]
    if not maybe:
        return ""
    of_one = found is Found.ONE
    enough = sum(one.shown for one in bad) >= SHOWN if of_one else all(one.shown > 1 for one in maybe)
    return "" if enough else "any row and any column have a machine in common, and they did not show it again"


def _nothing_ended(plan: ReplayPlan, runs: Sequence[GroupRun]) -> str:
    """Describe a replay in which no group reached its end, at least partly for lack of time; empty: some group did.

    A single machine at fault is in some groups only: the other groups would have reached their end.
    """
    ends: dict[str, set[RunEnd]] = defaultdict(set)
    for run in runs:
        ends[run.group].add(run.end)
    seen = {end for group in plan.groups for end in ends[group.name]}
    if not seen & {RunEnd.HUNG, RunEnd.SLOW, RunEnd.NOT_STARTED} or seen & {
        RunEnd.RAN,
        RunEnd.CRASHED,
        RunEnd.NOT_FINITE,
    }:
        return ""
    names = {group.name for group in plan.groups}
    if any(not ends[name] for name in names):
        return ""
    hung = [name for name in ends if ends[name] & {RunEnd.HUNG, RunEnd.SLOW}]
    late = [name for name in ends if RunEnd.NOT_STARTED in ends[name] and name not in hung]
    unable: dict[str, str] = {}
    for run in runs:
        if run.group not in {*hung, *late}:
            unable.setdefault(run.group, run.why or str(run.end))
    parts = [
        f"{listed(hung, NAMED)} did not do the steps in time: a larger replay.timeout_s may let them" if hung else "",
        f"{listed(late, NAMED)} did not start in time: a larger confirm.timeout_s may let them" if late else "",
        f"{_groups(unable)} could not be run" if unable else "",
    ]
    return f"no group came to its end: {'; '.join(part for part in parts if part)}"


def _text(found: Found, accused: Sequence[str], judged: Mapping[str, GroupVerdict], missed: str) -> str:
    bad = {name: one.why for name, one in judged.items() if one.faulty}
    if found in {Found.ONE, Found.SEVERAL}:
        who = "is the one machine" if len(accused) == 1 else f"are the {len(accused)} machines"
        return f"{listed(accused, NAMED)} {who} in every group that showed a fault: {_groups(bad)}"
    if found is Found.INCONSISTENT:
        return f"{_groups(bad)}, and no machine explains it: it does not show in every run"
    if found is Found.INCOMPLETE:
        still_open = {name: one.why for name, one in judged.items() if one.faulty is None}
        seen = f"; seen was {_groups(bad)}" if bad else ""
        return f"not known: {_groups(still_open)}{seen}"
    return missed


def _groups(groups: Mapping[str, str]) -> str:
    """Return text such as ``row 3 (crashed: rank 1 on m7 ended by SIGKILL) and 1 more``; groups with equal faults are
    combined."""
    by_reason: dict[str, list[str]] = defaultdict(list)
    for name, why in groups.items():
        by_reason[why].append(name)
    parts = [f"{listed(names, NAMED)} ({why})" for why, names in list(by_reason.items())[:NAMED]]
    left = len(by_reason) - len(parts)
    return "; ".join(parts) + (f"; and {left} more" if left else "")


def is_settled(replayed: Replayed) -> bool:
    """Return whether another repeat would change nothing: a machine is named, or no machine is at fault."""
    return replayed.found in {
        ReplayConclusion.ONE,
        ReplayConclusion.SEVERAL,
        ReplayConclusion.EVERYWHERE,
        ReplayConclusion.UNABLE,
    }


def findings_of_replay(replayed: Replayed) -> list[MachineFinding]:
    """Return the finding about each machine that a replay accuses; the finding is sure if it is a single machine."""
    finding = Finding(
        inspection=FindingSource.REPLAY,
        source=FindingSource.REPLAY,
        reason="failed-replay",
        text=replayed.text,
        sure=len(replayed.suspects) == 1,
        evidence=replayed.evidence,
    )
    return [MachineFinding(machine=machine, finding=finding) for machine in replayed.suspects]
