"""Which groups of a replay showed a fault, by what each of them did: it crashed, hung, gave NaN, or differs.

ByteRobust (section 6) compares the groups of a phase. Here all groups of both phases, and of all repeats, are compared
together: they run the same script with the same sizes from the same beginning, so all have to compute the same, and
where a phase has two groups only, a third one says which of them is right.
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
from everstep.model.replay import GroupRun, Replayed, ReplayFound, RunEnd

FAULTS = frozenset({RunEnd.CRASHED, RunEnd.HUNG, RunEnd.NOT_FINITE})
"""Ends of a run that are a fault whatever others computed."""
BY_CHANCE = frozenset({RunEnd.CRASHED, RunEnd.HUNG, RunEnd.RAN})
"""Ends of a run that a script may bring about by itself, now and then, in any group; the last of a run that computed
other bits, as a script that is not repeatable does."""
STARTED = frozenset({RunEnd.RAN, RunEnd.HUNG, RunEnd.SLOW, RunEnd.NOT_FINITE})
"""Ends of a run in which all ranks did a first step."""
TRIES = 2
"""A group is at fault for not coming to a first step if it did not so often, and never did."""
SHOWN = 4
"""Runs that broke, or computed other bits, with one machine, before it is named for that: a row and a column that did
so by chance have a machine in common as well, whichever they are."""
NAMED = 4
"""Groups and machines that a text names."""
EVIDENCE = 6
"""Groups whose fault is told with the accusation."""


@dataclass(frozen=True, slots=True)
class GroupVerdict:
    """What is known of one group after all of its runs."""

    faulty: bool | None
    """None: not known."""
    why: str = ""
    shown: int = 0
    """In so many of its runs."""
    ends: frozenset[RunEnd] = frozenset()
    """How these ended."""


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
    """Whether two of these groups have no machine in common: none of them can have brought the same error into both."""
    return any(one.isdisjoint(other) for one, other in combinations(groups, 2))


def _explained(answers: Sequence[tuple[GroupRun, Sequence[frozenset[int]]]], right: GroupRun) -> bool:
    """Whether some machine is in all groups that computed something else than ``right``."""
    others = [group for run, groups in answers if run is not right for group in groups]
    return bool(others and frozenset.intersection(*others))


def _two_are_in_all(plan: ReplayPlan) -> bool:
    """Whether two machines together are in all groups: both at fault, they would look like a fault of no machine."""
    count, of_machines = len(plan.groups), set(plan.of_machines.values())
    if 2 * max(map(len, of_machines)) < count:
        return False
    return any(len(one | other) == count for one, other in combinations(of_machines, 2))


def judge_runs(plan: ReplayPlan, runs: Sequence[GroupRun]) -> dict[str, GroupVerdict]:
    """What is known of each group. One that showed a fault in any of its runs has it.

    Args:
        plan: What was to be run.
        runs: What was run, several of a group where both phases were repeated.
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
    """Groups that are at fault for not coming to a first step.

    A start may be slow for many reasons that are no fault of a machine. So it counts only where each of these groups
    was tried again, all other groups started, and they are just the groups of one machine.
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
    # Where others broke, a group that came to its end did not, whatever it computed.
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
    """Where two runs differ; empty: that is not kept of so many answers."""
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
    """What a digest is of: ``7``, or ``33 to 36``."""
    begin = first + place * each
    return str(begin) if each == 1 else f"{begin} to {begin + each - 1}"


def conclude(
    plan: ReplayPlan,
    names: Sequence[str],
    runs: Sequence[GroupRun],
    *,
    shows: float,
) -> Replayed:
    """What all runs say together.

    Args:
        plan: What was run.
        names: Of the machines, in the job's order.
        runs: Of all groups so far.
        shows: Probability that a fault shows in one run, for what is said where none did.
    """
    judged = judge_runs(plan, runs)
    verdict = suspects(plan, {name: one.faulty for name, one in judged.items()})
    bad = {name: one.why for name, one in judged.items() if one.faulty}
    repeats = max((run.repeat for run in runs), default=0)
    evidence = [f"{name}: {why}"[:300] for name, why in list(bad.items())[:EVIDENCE]]
    if said := _nothing_ended(plan, runs):
        return Replayed(found=ReplayFound.UNABLE, text=said, evidence=evidence, repeats=repeats)
    if bad and len(bad) == len(judged):
        beside = ", or of two of them at once" if _two_are_in_all(plan) else ""
        return Replayed(
            found=ReplayFound.EVERYWHERE,
            text=f"every group showed it, {_groups(bad)}: it is not of a machine{beside}",
            evidence=evidence,
            repeats=repeats,
        )
    accused = [names[x] for x in verdict.machines]
    if accused and (chance := _chance(verdict.found, list(judged.values()))):
        return Replayed(
            found=ReplayFound.INCONSISTENT,
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
        found=ReplayFound(verdict.found),
        text=_text(verdict.found, accused, judged, missed),
        suspects=accused,
        evidence=evidence,
        repeats=repeats,
    )


def _chance(found: Found, judged: Sequence[GroupVerdict]) -> str:
    """Why groups that showed a fault name nobody yet; empty: they do.

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
    """What is said where no group came to an end, for want of time at least in part; empty: that is not so.

    One machine at fault is in some groups only: the others would have come to their end.
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
    """``row 3 (crashed: rank 1 on m7 ended by SIGKILL) and 1 more``; those that say the same are told together."""
    by_reason: dict[str, list[str]] = defaultdict(list)
    for name, why in groups.items():
        by_reason[why].append(name)
    parts = [f"{listed(names, NAMED)} ({why})" for why, names in list(by_reason.items())[:NAMED]]
    left = len(by_reason) - len(parts)
    return "; ".join(parts) + (f"; and {left} more" if left else "")


def is_settled(replayed: Replayed) -> bool:
    """Whether another repeat would change nothing: somebody is named, or the fault is of no machine."""
    return replayed.found in {ReplayFound.ONE, ReplayFound.SEVERAL, ReplayFound.EVERYWHERE, ReplayFound.UNABLE}


def findings_of_replay(replayed: Replayed) -> list[MachineFinding]:
    """The finding about each machine that a replay accuses; sure where it is one machine alone."""
    finding = Finding(
        inspection=FindingSource.REPLAY,
        source=FindingSource.REPLAY,
        reason="failed-replay",
        text=replayed.text,
        sure=len(replayed.suspects) == 1,
        evidence=replayed.evidence,
    )
    return [MachineFinding(machine=machine, finding=finding) for machine in replayed.suspects]
