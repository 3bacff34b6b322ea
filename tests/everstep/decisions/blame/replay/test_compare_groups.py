"""The conclusion of a replay: the groups that show a fault, and the machines that are named for it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.decisions.blame.replay.compare_groups import conclude, is_settled, judge_runs
from everstep.decisions.blame.replay.group_jobs import repeats_of
from everstep.decisions.blame.replay.groups import ReplayPlan, plan_replay
from everstep.decisions.blame.replay.kept_runs import fold
from everstep.model.recovery_policy import RecoveryPolicy
from everstep.model.replay import GroupRun, ReplayConclusion, RunEnd

RIGHT = ["a", "b", "c"]


def runs_of(plan: ReplayPlan, bad: Iterable[int] = (), *, alike: bool = False, repeat: int = 1) -> Iterator[GroupRun]:
    """Return the trials of a repeat in which groups with a bad machine compute other values.

    ``alike``: the values are the same each time.
    """
    for group in plan.groups:
        struck = sorted(set(bad) & set(group.machines))
        wrong = ["a", "x", f"{struck}"] if alike else ["a", "x", group.name]
        yield GroupRun(
            group=group.name,
            machines=[f"m{x}" for x in group.machines],
            end=RunEnd.RAN,
            losses=wrong if struck else RIGHT,
            states=["s"],
            repeat=repeat,
        )


def twice(plan: ReplayPlan, bad: Iterable[int] = (), *, alike: bool = False) -> list[GroupRun]:
    """Return the trials of two repeats."""
    return [run for repeat in (1, 2) for run in runs_of(plan, bad, alike=alike, repeat=repeat)]


def concluded(plan: ReplayPlan, runs: Iterable[GroupRun]) -> tuple[ReplayConclusion, list[str], str]:
    found = conclude(plan, [f"m{x}" for x in range(plan.machines)], list(runs), shows=0.5)
    return found.found, found.suspects, found.text


@given(st.integers(1, 6), st.integers(3, 6), st.booleans(), st.data())
def test_a_machine_that_computes_wrongly_is_named_for_every_size(
    m: int, n: int, alike: bool, data: st.DataObject
) -> None:
    plan = plan_replay(m * n, m)
    bad = data.draw(st.integers(0, m * n - 1))
    found, suspects, text = concluded(plan, twice(plan, [bad], alike=alike))
    assert found is ReplayConclusion.ONE and f"m{bad}" in suspects
    assert (suspects == [f"m{bad}"]) or m > n
    assert "other bits than" in text and "the loss from step 2 on" in text


@given(st.integers(2, 40), st.integers(1, 8), st.data())
def test_no_healthy_machine_is_named_alone(machines: int, size: int, data: st.DataObject) -> None:
    """If one machine is at fault, it is named or no machine is named, for all sizes."""
    plan = plan_replay(machines, min(size, machines))
    bad = data.draw(st.integers(0, machines - 1))
    found, suspects, _ = concluded(plan, twice(plan, [bad], alike=data.draw(st.booleans())))
    assert f"m{bad}" in suspects or suspects == []
    assert suspects or found in {ReplayConclusion.INCOMPLETE, ReplayConclusion.EVERYWHERE}


def test_two_groups_a_phase_are_told_apart_by_the_other_phase() -> None:
    plan = plan_replay(4, 2)
    for bad in range(4):
        assert concluded(plan, twice(plan, [bad]))[:2] == (ReplayConclusion.ONE, [f"m{bad}"])
        found, suspects, _ = concluded(plan, twice(plan, [bad], alike=True))
        assert (found, suspects) == (ReplayConclusion.INCOMPLETE, []), (
            "two groups differ from two others, so there is no majority"
        )


def test_groups_with_a_common_machine_do_not_confirm_each_other() -> None:
    plan = plan_replay(6, 2)
    shared = [run.model_copy(update={"losses": ["x"]}) for run in runs_of(plan) if "m0" in run.machines]
    others = [run.model_copy(update={"losses": [run.group]}) for run in runs_of(plan) if "m0" not in run.machines]
    assert all(verdict.faulty is None for verdict in judge_runs(plan, [*shared, *others]).values())


@pytest.mark.parametrize("end", [RunEnd.CRASHED, RunEnd.HUNG, RunEnd.NOT_FINITE])
def test_a_group_that_breaks_is_faulty_whether_or_not_bits_can_be_compared(end: RunEnd) -> None:
    plan = plan_replay(6, 2)
    runs = [
        run.model_copy(update={"end": end, "why": "rank 1 on m3"})
        if "m3" in run.machines
        else run.model_copy(update={"losses": [f"{run.group} {repeat}"]})
        for repeat in (1, 2)
        for run in runs_of(plan, repeat=repeat)
    ]
    found, suspects, text = concluded(plan, runs)
    assert (found, suspects) == (ReplayConclusion.ONE, ["m3"]) and f"({end}: rank 1 on m3)" in text
    assert concluded(plan, runs[:6])[0] is (
        ReplayConclusion.ONE if end is RunEnd.NOT_FINITE else ReplayConclusion.INCONSISTENT
    )


def crashed(plan: ReplayPlan, groups: Iterable[str], *, repeat: int) -> list[GroupRun]:
    struck, broken = set(groups), {"end": RunEnd.CRASHED, "why": "SIGSEGV", "losses": [], "states": []}
    return [run.model_copy(update=broken) if run.group in struck else run for run in runs_of(plan, repeat=repeat)]


def test_a_row_and_a_column_that_broke_once_name_no_machine() -> None:
    plan = plan_replay(16, 4)
    once = crashed(plan, ["row 1", "column 2"], repeat=1)
    found, suspects, text = concluded(plan, once)
    assert (found, suspects) == (ReplayConclusion.INCONSISTENT, []) and "m6 would explain it" in text
    policy = RecoveryPolicy(replay={"fault_share": 1.0})
    assert (repeats_of(policy), repeats_of(policy, once, seen=True)) == (1, 2), "the replay is run again"
    again = crashed(plan, ["row 1"], repeat=2)
    assert concluded(plan, [*once, *again])[0] is ReplayConclusion.INCONSISTENT
    both = crashed(plan, ["row 1", "column 2"], repeat=2)
    assert concluded(plan, [*once, *both])[:2] == (ReplayConclusion.ONE, ["m6"])
    elsewhere = crashed(plan, ["row 3", "column 0"], repeat=2)
    assert concluded(plan, [*once, *elsewhere])[:2] == (ReplayConclusion.INCONSISTENT, [])
    assert concluded(plan, fold([*once, *elsewhere]))[:2] == (ReplayConclusion.INCONSISTENT, [])
    two = [run for repeat in (1, 2) for run in crashed(plan, ["row 1", "column 2", "row 3", "column 0"], repeat=repeat)]
    assert concluded(plan, two)[0] is ReplayConclusion.SEVERAL


def other_bits(plan: ReplayPlan, groups: Iterable[str], *, repeat: int, alike: bool) -> list[GroupRun]:
    """Return the trials of healthy machines, some of which compute other bits. ``alike``: the same bits each time."""
    struck = set(groups)
    return [
        run.model_copy(update={"losses": ["a", "x", "" if alike else f"{run.group} {repeat}"]})
        if run.group in struck
        else run
        for run in runs_of(plan, repeat=repeat)
    ]


def test_a_row_and_a_column_that_computed_other_bits_once_name_no_machine() -> None:
    plan = plan_replay(16, 4)
    once = other_bits(plan, ["row 1", "column 2"], repeat=1, alike=False)
    assert concluded(plan, once)[:2] == (ReplayConclusion.INCONSISTENT, [])
    both = other_bits(plan, ["row 1", "column 2"], repeat=2, alike=False)
    assert concluded(plan, [*once, *both])[:2] == (ReplayConclusion.ONE, ["m6"])
    elsewhere = other_bits(plan, ["row 3", "column 0"], repeat=2, alike=False)
    assert concluded(plan, fold([*once, *elsewhere]))[:2] == (ReplayConclusion.INCONSISTENT, [])
    nan = [
        run.model_copy(update={"end": RunEnd.NOT_FINITE}) if run.group in {"row 1", "column 2"} else run for run in once
    ]
    assert concluded(plan, nan)[:2] == (ReplayConclusion.ONE, ["m6"]), "a NaN does not occur by chance"


@pytest.mark.parametrize("share", [0.05, 0.2])
@pytest.mark.parametrize("how", ["it crashes", "other bits", "other bits each time"])
def test_a_script_that_is_not_repeatable_hardly_ever_names_a_machine(how: str, share: float) -> None:
    chance, plan, policy = Random(7), plan_replay(64, 8), RecoveryPolicy()
    named = 0
    for _ in range(30):
        runs: list[GroupRun] = []
        for repeat in range(1, 99):
            struck = [one.name for one in plan.groups if chance.random() < share]
            if how == "it crashes":
                runs += crashed(plan, struck, repeat=repeat)
            else:
                runs += other_bits(plan, struck, repeat=repeat, alike=how == "other bits")
            found = conclude(plan, [f"m{x}" for x in range(64)], runs, shows=0.5)
            seen = found.found is ReplayConclusion.INCONSISTENT
            if is_settled(found) or repeat >= repeats_of(policy, runs, seen=seen):
                break
        named += bool(found.suspects)
    assert named <= 2


def test_the_repeats_show_a_fault_in_both_phases_with_the_required_probability() -> None:
    for shows, miss in ((0.5, 0.1), (0.2, 0.05), (0.9, 0.5)):
        policy = RecoveryPolicy(replay={"fault_share": shows, "miss_probability": miss})
        repeats = repeats_of(policy, seen=True)
        assert (1.0 - (1.0 - shows) ** repeats) ** 2 >= 1.0 - miss and repeats >= repeats_of(policy)


def test_a_missing_result_is_no_difference() -> None:
    """The log of a machine cannot be read, so the state of its ranks is not known."""
    plan = plan_replay(16, 4)
    complete, without = {"shape": "2 steps, states of 4 ranks"}, {"shape": "2 steps, no states", "states": []}
    runs = [run.model_copy(update=without if "m5" in run.machines else complete) for run in runs_of(plan)]
    found, suspects, text = concluded(plan, runs)
    assert (found, suspects) == (ReplayConclusion.INCOMPLETE, [])
    assert "it reports 2 steps, no states, and row 0 reports 2 steps, states of 4 ranks" in text
    assert concluded(plan, fold(runs)) == (found, suspects, text)
    wrong = [run.model_copy(update=complete) for run in twice(plan, [5])]
    assert concluded(plan, wrong)[:2] == (ReplayConclusion.ONE, ["m5"])


def test_a_group_that_still_stepped_when_its_time_was_up_is_slow_and_not_at_fault() -> None:
    plan = plan_replay(16, 4)
    slow = {"end": RunEnd.SLOW, "why": "9 of 10 steps", "losses": [], "states": []}
    runs = [run.model_copy(update=slow) if "m5" in run.machines else run for run in runs_of(plan)]
    found, suspects, text = concluded(plan, runs)
    assert (found, suspects) == (ReplayConclusion.INCOMPLETE, []) and "9 of 10 steps" in text
    every = [run.model_copy(update=slow) for run in runs]
    found, suspects, text = concluded(plan, every)
    assert (found, suspects) == (ReplayConclusion.UNABLE, []) and "replay.timeout_s" in text


@pytest.mark.parametrize("end", [RunEnd.CRASHED, RunEnd.NOT_FINITE])
@pytest.mark.parametrize(("machines", "size", "two"), [(4, 2, True), (7, 3, True), (6, 2, False), (64, 8, False)])
def test_a_fault_of_every_group_names_no_machine(machines: int, size: int, two: bool, end: RunEnd) -> None:
    plan = plan_replay(machines, size)
    runs = [run.model_copy(update={"end": end}) for run in runs_of(plan)]
    found, suspects, text = concluded(plan, runs)
    assert (found, suspects) == (ReplayConclusion.EVERYWHERE, []) and ("two machines together" in text) is two


@pytest.mark.parametrize(
    ("ends", "fragments"),
    [
        ([RunEnd.HUNG] * 6, ["replay.timeout_s"]),
        ([RunEnd.HUNG] * 5 + [RunEnd.UNABLE], ["replay.timeout_s", "column 2 (m5 is away) could not be run"]),
        ([RunEnd.HUNG] + [RunEnd.UNABLE] * 5, ["row 0 did not complete the steps in time, a larger replay.timeout_s"]),
        ([RunEnd.NOT_STARTED] * 6, ["confirm.timeout_s"]),
        (
            [RunEnd.NOT_STARTED, RunEnd.HUNG, *[RunEnd.UNABLE] * 4],
            ["replay.timeout_s", "confirm.timeout_s", "could not be run"],
        ),
    ],
)
def test_if_no_group_reaches_its_end_the_text_names_the_limits(ends: list[RunEnd], fragments: list[str]) -> None:
    plan = plan_replay(6, 2)
    runs = [
        run.model_copy(update={"end": end, "why": "m5 is away", "losses": [], "states": []})
        for run, end in zip(runs_of(plan), ends, strict=True)
    ]
    found, suspects, text = concluded(plan, runs)
    assert (found, suspects) == (ReplayConclusion.UNABLE, [])
    assert all(fragment in text for fragment in fragments)
    assert is_settled(conclude(plan, [f"m{x}" for x in range(6)], runs, shows=0.5))
    assert concluded(plan, runs[:-1])[0] is not ReplayConclusion.UNABLE, "one group has not run yet"
    clean = [*runs[:-1], next(run for run in runs_of(plan) if run.group == "column 2")]
    assert concluded(plan, clean)[0] is not ReplayConclusion.UNABLE


def late_with(plan: ReplayPlan, *machines: str, repeat: int = 1) -> list[GroupRun]:
    """Return the trials of a repeat in which groups with one of these machines do not start."""
    return [
        run.model_copy(update={"end": RunEnd.NOT_STARTED, "why": "rank 1 is late", "losses": [], "states": []})
        if set(machines) & set(run.machines)
        else run
        for run in runs_of(plan, repeat=repeat)
    ]


def test_a_slow_start_is_a_fault_only_if_the_groups_of_one_machine_show_it_twice() -> None:
    plan = plan_replay(6, 2)
    once, twice = late_with(plan, "m3"), late_with(plan, "m3", repeat=2)
    found, suspects, text = concluded(plan, once)
    assert (found, suspects) == (ReplayConclusion.INCOMPLETE, []) and "rank 1 is late" in text
    assert repeats_of(RecoveryPolicy(replay={"fault_share": 1.0})) == 1
    assert repeats_of(RecoveryPolicy(replay={"fault_share": 1.0}), once) == 2, "the slow start is tried again"
    found, suspects, text = concluded(plan, [*once, *twice])
    assert (found, suspects) == (ReplayConclusion.ONE, ["m3"]) and "not started in 2 runs or more" in text
    assert concluded(plan, [*once, *runs_of(plan, repeat=2)])[:2] == (ReplayConclusion.NOTHING, []), (
        "in the second repeat the groups started, so the machine was only slow"
    )


@given(st.integers(2, 12), st.integers(1, 4), st.integers(1, 4), st.data())
def test_no_machine_is_named_for_slow_starts_that_no_single_machine_explains(
    machines: int, size: int, repeats: int, data: st.DataObject
) -> None:
    plan = plan_replay(machines, min(size, machines))
    runs, members = [], {group.name: set(group.machines) for group in plan.groups}
    for repeat in range(1, repeats + 1):
        slow = data.draw(st.sets(st.sampled_from(sorted(members))))
        runs += [
            run.model_copy(update={"end": RunEnd.NOT_STARTED}) if run.group in slow else run
            for run in runs_of(plan, repeat=repeat)
        ]
    always = set(members) - {run.group for run in runs if run.end is RunEnd.RAN}
    found, suspects, _ = concluded(plan, runs)
    if suspects:
        assert repeats > 1 and found is ReplayConclusion.ONE
        assert all({int(name[1:]) for name in suspects} <= members[group] for group in always)


def test_a_group_that_does_not_start_shows_nothing_if_another_one_was_not_run() -> None:
    plan = plan_replay(6, 2)
    runs = [
        run.model_copy(update={"end": RunEnd.UNABLE}) if run.group == "row 0" else run
        for repeat in (1, 2)
        for run in late_with(plan, "m3", repeat=repeat)
    ]
    assert concluded(plan, runs)[:2] == (ReplayConclusion.INCOMPLETE, [])


def test_other_hardware_computes_other_bits_and_is_not_at_fault() -> None:
    plan = plan_replay(8, 2)
    runs = [
        run.model_copy(update={"kind": "old", "losses": ["old"]}) if "m7" in run.machines else run
        for run in twice(plan)
    ]
    found, suspects, _ = concluded(plan, runs)
    assert (found, suspects) == (ReplayConclusion.INCOMPLETE, [])
    same_kind = [run.model_copy(update={"kind": ""}) for run in runs]
    assert concluded(plan, same_kind)[:2] == (ReplayConclusion.ONE, ["m7"])


def test_a_replay_without_a_difference_names_no_machine() -> None:
    plan = plan_replay(6, 2)
    found, suspects, text = concluded(plan, [*runs_of(plan), *runs_of(plan, repeat=2)])
    assert (found, suspects) == (ReplayConclusion.NOTHING, [])
    assert text.startswith("not reproduced on groups of 2 machines in 4 runs") and "0.062" in text


def test_a_fault_that_shows_in_a_later_repeat_is_kept() -> None:
    plan = plan_replay(6, 2)
    half = [run if "column" in run.group else good for run, good in zip(runs_of(plan, [4]), runs_of(plan), strict=True)]
    assert concluded(plan, half)[0] is ReplayConclusion.INCONSISTENT
    later = [run for repeat in (2, 3) for run in runs_of(plan, [4], repeat=repeat)]
    assert concluded(plan, [*half, *later])[:2] == (ReplayConclusion.ONE, ["m4"])


def test_groups_that_could_not_be_run_do_not_count_as_faulty() -> None:
    plan = plan_replay(4, 2)
    ends = dict(zip((group.name for group in plan.groups), [RunEnd.CRASHED, RunEnd.UNABLE] * 2, strict=True))
    runs = [run.model_copy(update={"end": ends[run.group], "losses": [], "states": []}) for run in runs_of(plan)]
    found, suspects, text = concluded(plan, runs)
    assert (found, suspects) == (ReplayConclusion.INCOMPLETE, []) and text.startswith("not known: ")


def test_groups_that_could_not_be_run_accuse_no_machine() -> None:
    plan = plan_replay(6, 2)
    runs = [
        run.model_copy(update={"end": RunEnd.UNABLE, "why": "m5 does not answer", "losses": [], "states": []})
        if "m5" in run.machines
        else run
        for run in runs_of(plan)
    ]
    found, suspects, text = concluded(plan, runs)
    assert (found, suspects) == (ReplayConclusion.INCOMPLETE, []) and "m5 does not answer" in text
    assert concluded(plan, [])[0] is ReplayConclusion.INCOMPLETE
