"""Whether a restarted job steps again."""

from dataclasses import replace

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
    """All ranks are seen since second 1."""
    return judge_confirmation(
        2,
        ranks,
        world_size=2,
        showing=showing,
        now_ns=int(now_s * 1e9),
        policy=POLICY,
        whole_ns=10**9,
        left_ns={} if left_s is None else {1: int(left_s * 1e9)},
        known_alive=known_alive,
    )


def time_up(*ranks: RankState, showing: Showing = NOTHING, world_size: int = 2) -> Confirmation:
    return judge_timeout(2, ranks, world_size=world_size, showing=showing, bound_s=600, now_ns=10**12)


def test_all_ranks_must_step() -> None:
    assert judge(STEPPED, replace(STARTED, rank=1)) is None
    verdict = judge(STEPPED, replace(STEPPED, rank=1, first_step_ns=1_200_000_000))

    assert verdict is not None
    assert (verdict.ok, verdict.stepped_ns, verdict.completed_steps) == (True, 1_200_000_000, 21)


def test_a_missing_rank_is_never_full_width() -> None:
    assert judge(STEPPED, now_s=1000, showing=NOTHING) is None


def test_a_rank_that_ends_before_its_first_step_fails_the_restart() -> None:
    verdict = judge(STEPPED, replace(STARTED, rank=1, alive=False))

    assert verdict is not None
    assert (verdict.ok, verdict.reason) == (False, "rank 1 ended before the first step")


def test_a_machine_that_lost_its_ranks_fails_the_restart_at_once() -> None:
    verdict = judge_confirmation(
        2, [STEPPED], world_size=2, showing=STEPS, now_ns=2 * 10**9, policy=POLICY, emptied=["m1"]
    )

    assert verdict is not None
    assert (verdict.ok, verdict.timed_out, verdict.emptied) == (False, False, ["m1"])
    assert verdict.reason == "m1 came back empty before the first step"


def test_a_job_that_was_nearly_done_may_end_before_anybody_looked() -> None:
    verdict = judge(replace(STEPPED, alive=False, finished=True), replace(STEPPED, rank=1, alive=False, finished=True))

    assert verdict is not None
    assert verdict.ok


def test_a_script_that_showed_nothing_yet_runs_after_a_while_and_is_not_called_confirmed() -> None:
    silent = replace(STARTED, attached=False)
    ranks = (silent, replace(silent, rank=1))

    assert judge(*ranks, showing=NOTHING, now_s=10) is None
    late = judge(*ranks, showing=NOTHING, now_s=12)
    assert late is not None
    assert (late.ok, late.confirmed, late.reason) == (True, False, "all 2 ranks live for 11 s; no step was shown")
    assert judge(*ranks, showing=NOTHING, now_s=12, known_alive=True) is None, "that they live is known"


def test_a_script_that_showed_steps_before_is_not_confirmed_by_living() -> None:
    """A slow import lives for longer than confirm.alive_s, and fails then as it did before."""
    plain = replace(STARTED, attached=False)

    for showing in (STEPS, CALLS):
        assert judge(plain, replace(plain, rank=1), showing=showing, now_s=500) is None
    one = replace(plain, optimizer_steps=1)
    confirmed = judge(one, replace(one, rank=1, reports=1), showing=CALLS)
    assert confirmed is not None and confirmed.confirmed
    assert judge(one, replace(one, rank=1), showing=STEPS) is None, "it had a loop: a call before it is no step"


def test_a_script_that_joined_is_going_to_show_steps() -> None:
    assert judge(STARTED, replace(STARTED, rank=1), showing=NOTHING, now_s=500) is None


def test_reports_without_a_loop_are_steps_and_one_call_of_the_optimizer_is_not() -> None:
    warm = replace(STARTED, optimizer_steps=1)
    assert judge(warm, replace(warm, rank=1), showing=NOTHING) is None

    confirmed = judge(replace(STARTED, reports=1), replace(STARTED, rank=1, optimizer_steps=2), showing=NOTHING)
    assert confirmed is not None and confirmed.confirmed
    assert confirmed.showing == CALLS


def test_a_rank_that_never_showed_a_step_has_to_live_only() -> None:
    stepping = replace(STARTED, attached=False, optimizer_steps=5)
    server = replace(STARTED, rank=1, attached=False)
    knowing = Showing(kind="calls", silent=[1])

    confirmed = judge(stepping, server, showing=knowing)
    assert confirmed is not None and confirmed.confirmed
    dead = judge(stepping, replace(server, alive=False, code=1), showing=knowing)
    assert dead is not None and not dead.ok


def test_when_the_time_is_up_a_hang_is_told_from_a_script_that_shows_nothing() -> None:
    plain = replace(STARTED, attached=False)
    entered = replace(STARTED, entered_ns=5)
    cases = [
        ((STARTED, replace(STARTED, rank=1)), NOTHING, False),  # joined, and none of them stepped
        ((entered, replace(plain, rank=1)), NOTHING, False),  # in its loop
        ((replace(plain, optimizer_steps=9), replace(STARTED, rank=1)), NOTHING, True),  # may serve the other one
        ((plain, replace(plain, rank=1)), NOTHING, True),
        ((plain, replace(plain, rank=1)), CALLS, False),  # it showed steps before
        ((plain,), NOTHING, False),  # of rank 1 nobody said anything
    ]
    for ranks, showing, runs in cases:
        found = time_up(*ranks, showing=showing)
        assert (found.ok, found.timed_out, found.ok and found.confirmed) == (runs, not runs, False), (ranks, showing)


def test_a_first_step_has_a_bound_that_is_learnt_from_the_first_start() -> None:
    policy = RecoveryPolicy(confirm={"timeout_s": 600, "start_timeout_s": 1800, "factor": 3})

    assert confirm_bound_s(0.0, policy) == 1800
    assert confirm_bound_s(10.0, policy) == 600
    assert confirm_bound_s(700.0, policy) == 2100


@given(
    st.lists(st.tuples(st.booleans(), st.integers(-1, 9)), min_size=1, max_size=6),
    st.sampled_from([NOTHING, CALLS, STEPS]),
)
def test_what_a_script_showed_is_never_forgotten(seen: list[tuple[bool, int]], known: Showing) -> None:
    order = ["", "calls", "steps"]

    found = showing_of([(rank, loop, steps) for rank, (loop, steps) in enumerate(seen)], known)

    assert order.index(found.kind) >= order.index(known.kind)
    assert all(seen[rank] == (False, 0) for rank in found.silent)


def test_ranks_are_silent_only_once_others_went_on_without_them() -> None:
    assert showing_of([(0, False, 1), (1, False, 0)], NOTHING) == CALLS
    assert showing_of([(0, False, 3), (1, False, 0), (2, False, -1)], NOTHING).silent == [1]
    assert showing_of([(0, True, 0), (1, True, 0)], CALLS) == STEPS
    assert showing_of([], CALLS) == CALLS, "of ranks that were lost nobody says anything"


def test_optimizer_steps_show_that_a_plain_script_steps() -> None:
    plain = replace(STARTED, attached=False, optimizer_steps=1)
    verdict = judge(plain, replace(plain, rank=1), showing=NOTHING)

    assert verdict is not None
    assert verdict.ok


def test_the_parts_sum_up_to_fork_to_step() -> None:
    parts = parts_of([STEPPED, replace(STEPPED, rank=1)])

    assert parts == {"start": 0.01, "import": 0.01, "rendezvous": 0.07, "restore": 0.01, "next step": 0.05}
    assert round(sum(parts.values()), 4) == 0.15


def test_a_plain_script_with_nothing_left_to_do_is_no_failure() -> None:
    """Killed while it saved its results: started again it finds all steps done and leaves with code 0."""
    done = replace(STARTED, attached=False, alive=False, code=0)

    assert judge(replace(STARTED, attached=False), replace(done, rank=1), showing=NOTHING) is None
    verdict = judge(done, replace(done, rank=1), showing=NOTHING)
    assert verdict is not None
    assert verdict.ok
    failed = judge(done, replace(done, rank=1, code=1), showing=NOTHING)
    assert failed is not None
    assert not failed.ok


def test_a_rank_that_leaves_before_its_first_step_fails_the_restart_unless_the_others_follow() -> None:
    left = replace(STARTED, rank=1, alive=False, code=0)

    assert judge(STEPPED, left, left_s=2, now_s=61) is None
    alone = judge(STEPPED, left, left_s=2, now_s=63)
    assert alone is not None
    assert (alone.ok, alone.reason) == (False, "rank 1 left with code 0 before the first step")
    plain = replace(STARTED, attached=False)
    assert judge(plain, replace(left, attached=False), left_s=2, now_s=601, showing=NOTHING) is None, "it may evaluate"
    followed = judge(replace(STEPPED, alive=False, code=0), left, left_s=2, now_s=63)
    assert followed is not None and followed.ok


def test_a_restart_that_finds_nothing_left_to_do_is_confirmed_though_its_ranks_live_on() -> None:
    """It broke out of its loop, and writes the model now."""
    out = replace(STARTED, entered_ns=5, left_ns=6)
    found = judge(out, replace(out, rank=1, alive=False, code=0))
    assert found is not None and found.confirmed

    failed = judge(out, replace(out, rank=1, alive=False, code=1))
    assert failed is not None and not failed.ok, "an error leaves the loop too"
