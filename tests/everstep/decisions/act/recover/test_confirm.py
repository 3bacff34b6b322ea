"""A launched job is confirmed when it makes steps."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.decisions.act.recover.confirm import (
    RankState,
    confirm_bound_s,
    judge_confirmation,
    judge_timeout,
    parts_of,
    showing_of,
)
from everstep.model.launch import Confirmation, Showing
from everstep.model.ranks import Ranks
from everstep.model.recovery_policy import RecoveryPolicy

POLICY = RecoveryPolicy(confirm={"alive_s": 10})
STARTED = RankState(
    rank=0, alive=True, attached=True, finished=False, completed_steps=-1, optimizer_steps=0, forked_ns=1_000_000_000
)
STEPPED = replace(
    STARTED,
    completed_steps=21,
    script_ns=1_010_000_000,
    joined_ns=1_020_000_000,
    entered_ns=1_090_000_000,
    restored_ns=1_100_000_000,
    first_step_ns=1_150_000_000,
)


STEPS = Showing(kind="steps")
CALLS = Showing(kind="calls")
NOTHING = Showing()


def judge(
    *ranks: RankState,
    showing: Showing = STEPS,
    now_s: float = 2,
    left_s: float | None = None,
    known_alive: bool = False,
) -> Confirmation | None:
    """Return the judgement of a launch. All its ranks have been seen since second 1."""
    return judge_confirmation(
        2,
        ranks,
        world_size=2,
        showing=showing,
        now_ns=int(now_s * 1e9),
        policy=POLICY,
        all_seen_ns=10**9,
        left_ns={} if left_s is None else {1: int(left_s * 1e9)},
        known_alive=known_alive,
    )


def time_up(*ranks: RankState, showing: Showing = NOTHING, world_size: int = 2) -> Confirmation:
    return judge_timeout(2, ranks, world_size=world_size, showing=showing, bound_s=600, now_ns=10**12)


def judged(*ranks: RankState, **fields: Any) -> Confirmation:
    """Return the judgement of a launch that can already be judged."""
    confirmation = judge(*ranks, **fields)
    assert confirmation is not None
    return confirmation


def test_all_ranks_must_step() -> None:
    assert judge(STEPPED, replace(STARTED, rank=1)) is None
    confirmation = judged(STEPPED, replace(STEPPED, rank=1, first_step_ns=1_200_000_000))
    assert (confirmation.ok, confirmation.stepped_ns, confirmation.completed_steps) == (True, 1_200_000_000, 21)


def test_a_launch_is_not_confirmed_without_all_ranks() -> None:
    assert judge(STEPPED, now_s=1000, showing=NOTHING) is None


def test_a_rank_that_ends_before_its_first_step_fails_the_restart() -> None:
    confirmation = judged(STEPPED, replace(STARTED, rank=1, alive=False))
    assert (confirmation.ok, confirmation.reason) == (False, "rank 1 ended before the first step")


def test_a_machine_that_lost_its_ranks_fails_the_restart_at_once() -> None:
    confirmation = judge_confirmation(
        2, [STEPPED], world_size=2, showing=STEPS, now_ns=2 * 10**9, policy=POLICY, emptied=["m1"]
    )
    assert confirmation is not None
    assert (confirmation.ok, confirmation.timed_out, confirmation.emptied) == (False, False, ["m1"])
    assert confirmation.reason == "m1 lost its ranks before the first step"


def test_a_job_may_finish_before_its_steps_are_seen() -> None:
    assert judged(*(replace(STEPPED, rank=rank, alive=False, finished=True) for rank in (0, 1))).ok


def test_a_script_that_never_showed_a_step_runs_unconfirmed_after_a_while() -> None:
    """If no step is shown, the launch is accepted because its ranks live, but it does not count as confirmed."""
    silent = replace(STARTED, attached=False)
    ranks = (silent, replace(silent, rank=1))

    assert judge(*ranks, showing=NOTHING, now_s=10) is None
    late = judged(*ranks, showing=NOTHING, now_s=12)
    assert (late.ok, late.confirmed, late.reason) == (True, False, "all 2 ranks live for 11 s; no step was shown")
    assert judge(*ranks, showing=NOTHING, now_s=12, known_alive=True) is None, (
        "the ranks are known to live, so the judge continues to wait for steps"
    )


def test_a_script_that_showed_steps_before_is_confirmed_only_by_steps() -> None:
    """A script with a slow import lives longer than ``confirm.alive_s``. It may then fail as it did before."""
    plain = replace(STARTED, attached=False)

    for showing in (STEPS, CALLS):
        assert judge(plain, replace(plain, rank=1), showing=showing, now_s=500) is None
    called = replace(plain, optimizer_steps=1)
    assert judged(called, replace(called, rank=1, reports=1), showing=CALLS).confirmed
    assert judge(called, replace(called, rank=1), showing=STEPS) is None, (
        "the optimizer was called before the loop, so this call is no step"
    )


def test_steps_are_awaited_from_a_script_that_joined() -> None:
    assert judge(STARTED, replace(STARTED, rank=1), showing=NOTHING, now_s=500) is None


def test_reports_without_a_loop_are_steps_and_one_call_of_the_optimizer_is_not() -> None:
    called = replace(STARTED, optimizer_steps=1)
    assert judge(called, replace(called, rank=1), showing=NOTHING) is None

    confirmed = judged(replace(STARTED, reports=1), replace(STARTED, rank=1, optimizer_steps=2), showing=NOTHING)
    assert (confirmed.confirmed, confirmed.showing) == (True, CALLS)


def test_a_call_of_the_optimizer_is_a_step_of_a_script_that_did_not_join() -> None:
    plain = replace(STARTED, attached=False, optimizer_steps=1)
    assert judged(plain, replace(plain, rank=1), showing=NOTHING).ok


def test_a_rank_that_never_showed_a_step_needs_only_to_live() -> None:
    stepping = replace(STARTED, attached=False, optimizer_steps=5)
    server = replace(STARTED, rank=1, attached=False)
    without_server = Showing(kind="calls", silent=Ranks.of([1]))

    assert judged(stepping, server, showing=without_server).confirmed
    assert not judged(stepping, replace(server, alive=False, code=1), showing=without_server).ok


PLAIN = replace(STARTED, attached=False)


@pytest.mark.parametrize(
    ("ranks", "showing", "runs"),
    [
        pytest.param((STARTED, replace(STARTED, rank=1)), NOTHING, False, id="both joined, and none stepped"),
        pytest.param((replace(STARTED, entered_ns=5), replace(PLAIN, rank=1)), NOTHING, False, id="one is in its loop"),
        pytest.param(
            (replace(PLAIN, optimizer_steps=9), replace(STARTED, rank=1)), NOTHING, True, id="one may serve the other"
        ),
        pytest.param((PLAIN, replace(PLAIN, rank=1)), NOTHING, True, id="none joined"),
        pytest.param((PLAIN, replace(PLAIN, rank=1)), CALLS, False, id="the script showed steps before"),
        pytest.param((PLAIN,), NOTHING, False, id="a rank is missing"),
    ],
)
def test_when_the_time_is_up_a_launch_hangs_or_its_script_shows_no_steps(
    ranks: tuple[RankState, ...], showing: Showing, runs: bool
) -> None:
    confirmation = time_up(*ranks, showing=showing)
    assert (confirmation.ok, confirmation.timed_out, confirmation.ok and confirmation.confirmed) == (
        runs,
        not runs,
        False,
    )


def test_the_bound_for_a_first_step_is_learnt_from_earlier_launches() -> None:
    policy = RecoveryPolicy(confirm={"timeout_s": 600, "start_timeout_s": 1800, "factor": 3})

    assert confirm_bound_s(0.0, policy) == 1800
    assert confirm_bound_s(10.0, policy) == 600
    assert confirm_bound_s(700.0, policy) == 2100


@given(
    st.lists(st.tuples(st.booleans(), st.integers(-1, 9)), min_size=1, max_size=6),
    st.sampled_from([NOTHING, CALLS, STEPS]),
)
def test_a_certain_kind_of_steps_is_not_replaced_by_a_less_certain_kind(
    seen: list[tuple[bool, int]], known: Showing
) -> None:
    order = ["", "calls", "steps"]

    showing = showing_of([(Ranks.of([rank]), loop, steps) for rank, (loop, steps) in enumerate(seen)], known)

    assert order.index(showing.kind) >= order.index(known.kind)
    assert all(seen[rank] == (False, 0) for rank in showing.silent)


def test_a_rank_counts_as_silent_only_once_others_made_several_steps_without_it() -> None:
    first, second, third = (Ranks.of([rank]) for rank in range(3))
    assert showing_of([(first, False, 1), (second, False, 0)], NOTHING) == CALLS
    assert showing_of([(first, False, 3), (second, False, 0), (third, False, -1)], NOTHING).silent == second
    assert showing_of([(first | second, True, 0)], CALLS) == STEPS
    assert showing_of([], CALLS) == CALLS, "lost ranks show nothing, so the known kind of steps remains"


def test_the_parts_sum_up_to_the_time_from_fork_to_step() -> None:
    parts = parts_of([STEPPED, replace(STEPPED, rank=1)])

    assert parts == {"start": 0.01, "import": 0.01, "rendezvous": 0.07, "restore": 0.01, "next step": 0.05}
    assert round(sum(parts.values()), 4) == 0.15


def test_a_script_without_a_loop_that_has_nothing_left_to_do_is_no_failure() -> None:
    """The script was killed while it saved its results. After a restart, no step is left, and it exits with code 0."""
    done = replace(PLAIN, alive=False, code=0)

    assert judge(PLAIN, replace(done, rank=1), showing=NOTHING) is None
    assert judged(done, replace(done, rank=1), showing=NOTHING).ok
    assert not judged(done, replace(done, rank=1, code=1), showing=NOTHING).ok


def test_a_rank_that_leaves_before_its_first_step_fails_the_restart_unless_the_others_follow() -> None:
    left = replace(STARTED, rank=1, alive=False, code=0)

    assert judge(STEPPED, left, left_s=2, now_s=61) is None
    alone = judged(STEPPED, left, left_s=2, now_s=63)
    assert (alone.ok, alone.reason) == (False, "rank 1 left with code 0 before the first step")
    assert judge(PLAIN, replace(left, attached=False), left_s=2, now_s=601, showing=NOTHING) is None, (
        "the other rank may be in an evaluation"
    )
    assert judged(replace(STEPPED, alive=False, code=0), left, left_s=2, now_s=63).ok


def test_a_restart_with_nothing_left_to_do_is_confirmed_although_its_ranks_live() -> None:
    """The ranks left their loops by ``break``, and write the model now."""
    out = replace(STARTED, entered_ns=5, left_ns=6)
    assert judged(out, replace(out, rank=1, alive=False, code=0)).confirmed
    assert not judged(out, replace(out, rank=1, alive=False, code=1)).ok, "rank 1 left its loop by an error"
