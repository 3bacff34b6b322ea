"""Stored trials lead to the same conclusion as all trials, and they stay small."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from everstep.decisions.blame.replay.compare_groups import conclude
from everstep.decisions.blame.replay.groups import ReplayPlan, plan_replay
from everstep.decisions.blame.replay.kept_runs import DIGESTS, IN_FULL, answer_of, bounded, fold
from everstep.model.replay import GroupRun, Replayed, RunEnd


def drawn(plan: ReplayPlan, repeat: int, chance: random.Random, answers: int) -> list[GroupRun]:
    """Return the trials of both phases. Most groups reach their end, with one of several answers."""
    runs = []
    for group in plan.groups:
        end = chance.choice([*[RunEnd.RAN] * 6, *RunEnd])
        answer = chance.choice(["a"] * 4 + [f"x{number}" for number in range(answers)])
        runs.append(
            GroupRun(
                group=group.name,
                machines=[f"m{x}" for x in group.machines],
                end=end,
                repeat=repeat,
                why="" if end is RunEnd.RAN else f"{end} in run {repeat}",
                losses=["same", answer] if chance.random() < 0.95 else [],
                states=[answer] if chance.random() < 0.95 else [],
                kind=chance.choice(["", "", "", "old"]),
                seconds=round(chance.random(), 3),
            )
        )
    return runs


def test_the_first_reason_why_trials_could_not_be_run_is_kept() -> None:
    plan = plan_replay(2, 2)
    names = [group.name for group in plan.groups]
    ends = [(1, RunEnd.UNABLE), (1, RunEnd.NOT_STARTED), (2, RunEnd.UNABLE), (2, RunEnd.UNABLE)]
    every = [
        GroupRun(group=name, machines=[], end=end, repeat=repeat, why=f"{end} in run {repeat}")
        for name, (repeat, end) in zip(names * 2, ends, strict=True)
    ]
    assert concluded(plan, fold(every)) == concluded(plan, every)
    assert "unable in run 1" in concluded(plan, every).text


def concluded(plan: ReplayPlan, runs: list[GroupRun]) -> Replayed:
    return conclude(plan, [f"m{x}" for x in range(plan.machines)], runs, shows=0.1)


@given(st.integers(2, 14), st.integers(1, 7), st.integers(0, 6), st.integers(1, 3), st.randoms(use_true_random=False))
def test_stored_trials_lead_to_the_same_conclusion(
    machines: int, size: int, repeats: int, answers: int, chance: random.Random
) -> None:
    """The texts of the conclusions are equal, too. The groups here have so few different answers that the digests of
    all of them are kept."""
    plan, every, kept = plan_replay(machines, min(size, machines)), list[GroupRun](), list[GroupRun]()
    for repeat in range(1, repeats + 1):
        new = drawn(plan, repeat, chance, answers)
        every += new
        kept = fold([*kept, *map(bounded, new)])
        assert concluded(plan, kept) == concluded(plan, every)
    assert sum(run.count for run in kept) == len(every)
    assert len({(run.group, run.end, run.kind, answer_of(run)) for run in kept}) == len(kept)


@given(st.integers(2, 9), st.integers(1, 3), st.integers(5, 30), st.randoms(use_true_random=False))
def test_the_conclusion_stays_for_a_script_with_another_answer_in_each_trial(
    machines: int, size: int, repeats: int, chance: random.Random
) -> None:
    plan = plan_replay(machines, min(size, machines))
    every = [run for repeat in range(1, repeats + 1) for run in drawn(plan, repeat, chance, 1000)]
    kept, said = concluded(plan, fold(every)), concluded(plan, every)
    assert (kept.found, kept.suspects, kept.repeats) == (said.found, said.suspects, said.repeats)
    for group in plan.groups:
        assert sum(bool(run.losses or run.states) for run in fold(every) if run.group == group.name) <= IN_FULL


@given(st.integers(0, 1000), st.integers(0, 5000), st.randoms(use_true_random=False))
def test_a_stored_trial_is_small_and_shows_where_it_differs(steps: int, ranks: int, chance: random.Random) -> None:
    def run(group: str, losses: list[str], states: list[str]) -> GroupRun:
        return bounded(GroupRun(group=group, machines=[], end=RunEnd.RAN, losses=losses, states=states, why="y" * 9999))

    losses, states = [f"loss {step}" for step in range(steps)], [f"state {rank}" for rank in range(ranks)]
    right = run("row 0", losses, states)
    assert bounded(right) == right and max(len(right.losses), len(right.states)) <= DIGESTS
    assert len(right.model_dump_json()) < 5000
    assert answer_of(right) == answer_of(run("row 0", losses, states))
    if not steps:
        return
    wrong_step = chance.randrange(steps)
    losses[wrong_step] = "x"
    wrong = run("row 1", losses, states)
    assert answer_of(wrong) != answer_of(right)
    index = [own == usual for own, usual in zip(wrong.losses, right.losses, strict=True)].index(False)
    assert index * wrong.steps_each <= wrong_step < (index + 1) * wrong.steps_each


def test_ranks_and_steps_that_share_a_digest_are_named_together() -> None:
    plan = plan_replay(6, 2)
    runs = [
        GroupRun(
            group=group.name,
            machines=[],
            end=RunEnd.RAN,
            losses=[f"{step}" if step < 99 or 3 not in group.machines else "x" for step in range(100)],
            states=[f"{rank}" if rank != 130 or 3 not in group.machines else "x" for rank in range(200)],
            count=2,
        )
        for group in plan.groups
    ]
    said = concluded(plan, fold(map(bounded, runs)))
    assert said.suspects == ["m3"] and "the loss from step 99 to 100 on" in said.text
    alike = [run.model_copy(update={"losses": []}) for run in runs]
    assert "the state of rank 128 to 131 at the end" in concluded(plan, fold(map(bounded, alike))).text
