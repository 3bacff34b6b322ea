"""Whether a restarted job steps again."""

from dataclasses import replace

from everstep.decisions.confirm import RankState, judge_confirmation, parts_of
from everstep.incident import Confirmation
from everstep.policy import RecoveryPolicy

POLICY = RecoveryPolicy(confirm_alive_s=10)
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


def judge(*ranks: RankState, shows_steps: bool = True, now_s: float = 2) -> Confirmation | None:
    return judge_confirmation(2, ranks, world_size=2, shows_steps=shows_steps, now_ns=int(now_s * 1e9), policy=POLICY)


def test_all_ranks_must_step() -> None:
    assert judge(STEPPED, replace(STARTED, rank=1)) is None
    verdict = judge(STEPPED, replace(STEPPED, rank=1, first_step_ns=1_200_000_000))

    assert verdict is not None
    assert (verdict.ok, verdict.stepped_ns, verdict.completed_steps) == (True, 1_200_000_000, 21)


def test_a_missing_rank_is_never_full_width() -> None:
    assert judge(STEPPED, now_s=1000, shows_steps=False) is None


def test_a_rank_that_ends_before_its_first_step_fails_the_restart() -> None:
    verdict = judge(STEPPED, replace(STARTED, rank=1, alive=False))

    assert verdict is not None
    assert (verdict.ok, verdict.reason) == (False, "rank 1 ended before the first step")


def test_a_machine_that_lost_its_ranks_fails_the_restart_at_once() -> None:
    verdict = judge_confirmation(
        2, [STEPPED], world_size=2, shows_steps=True, now_ns=2 * 10**9, policy=POLICY, emptied=["m1"]
    )

    assert verdict is not None
    assert (verdict.ok, verdict.timed_out, verdict.emptied) == (False, False, ["m1"])
    assert verdict.reason == "m1 came back empty before the first step"


def test_a_job_that_was_nearly_done_may_end_before_anybody_looked() -> None:
    verdict = judge(replace(STEPPED, alive=False, finished=True), replace(STEPPED, rank=1, alive=False, finished=True))

    assert verdict is not None
    assert verdict.ok


def test_a_silent_script_counts_as_alive_after_a_while_but_a_reporting_one_does_not() -> None:
    silent = replace(STARTED, attached=False)
    ranks = (silent, replace(silent, rank=1))

    assert judge(*ranks, shows_steps=False, now_s=10) is None
    late = judge(*ranks, shows_steps=False, now_s=12)
    assert late is not None
    assert late.ok
    assert judge(*ranks, shows_steps=True, now_s=12) is None


def test_optimizer_steps_show_that_a_plain_script_steps() -> None:
    plain = replace(STARTED, attached=False, optimizer_steps=1)
    verdict = judge(plain, replace(plain, rank=1), shows_steps=False)

    assert verdict is not None
    assert verdict.ok


def test_the_parts_sum_up_to_fork_to_step() -> None:
    parts = parts_of([STEPPED, replace(STEPPED, rank=1)])

    assert parts == {"start": 0.01, "import": 0.01, "rendezvous": 0.07, "restore": 0.01, "next step": 0.05}
    assert round(sum(parts.values()), 4) == 0.15


def test_a_plain_script_with_nothing_left_to_do_is_no_failure() -> None:
    """Killed while it saved its results: started again it finds all steps done and leaves with code 0."""
    done = replace(STARTED, attached=False, alive=False, code=0)

    assert judge(replace(STARTED, attached=False), replace(done, rank=1), shows_steps=False) is None
    verdict = judge(done, replace(done, rank=1), shows_steps=False)
    assert verdict is not None
    assert verdict.ok
    failed = judge(done, replace(done, rank=1, code=1), shows_steps=False)
    assert failed is not None
    assert not failed.ok


def test_a_script_that_leaves_its_loop_early_is_a_failure() -> None:
    verdict = judge(STEPPED, replace(STARTED, rank=1, alive=False, code=0))

    assert verdict is not None
    assert not verdict.ok
