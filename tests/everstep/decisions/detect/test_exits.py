"""What a watcher concludes."""

import random

from hypothesis import given
from hypothesis import strategies as st

from everstep.decisions.detect.exits import Finished, ObservedExit, StallRule, judge_exits, stall_anomaly
from everstep.model.incident import Anomaly, RankExit, Symptom
from everstep.model.recovery_policy import RecoveryPolicy

POLICY = RecoveryPolicy(stall_floor_s=5, stall_factor=10, exit_grace_s=60)
SECOND = 1_000_000_000


def seen(rank: int, *, attached: bool = True, finished: bool = False, time_s: float = 1, **end: object) -> ObservedExit:
    fields = {"rank": rank, "machine": "m0", "time_ns": int(time_s * SECOND), **end}
    ended = RankExit.model_validate(fields)
    return ObservedExit(id=f"m0-{rank}", end=ended, attached=attached, finished=finished, heard_ns=int(time_s * SECOND))


def judge(
    *ends: ObservedExit, world_size: int = 2, now_s: float = 2, others_in_loop: bool | None = None
) -> Anomaly | Finished | None:
    return judge_exits(
        3, ends, world_size=world_size, now_ns=int(now_s * SECOND), policy=POLICY, others_in_loop=others_in_loop
    )


def test_a_killed_rank_is_an_anomaly_at_once_with_its_observation() -> None:
    verdict = judge(seen(1, signal=9))

    assert isinstance(verdict, Anomaly)
    assert (verdict.id, verdict.symptom, verdict.ranks, verdict.generation) == ("m0-1", Symptom.CRASH, [1], 3)


def test_all_ranks_that_leave_with_code_0_finish_the_job_wherever_they_left() -> None:
    """``break`` out of the loop, or reports without one: under torchrun that is an end like any other."""
    assert judge(seen(0, code=0), seen(1, code=0)) == Finished(3)
    assert judge(seen(0, code=0, time_s=1), now_s=60) is None, "the others may follow"


def test_a_rank_that_leaves_while_others_go_on_is_an_anomaly() -> None:
    verdict = judge(seen(1, code=0), others_in_loop=True, now_s=62)

    assert isinstance(verdict, Anomaly)
    assert verdict.symptom is Symptom.EARLY_EXIT
    failing = judge(seen(1, code=0), seen(0, code=1, exception="RuntimeError: Connection closed by peer"))
    assert isinstance(failing, Anomaly)
    assert (failing.symptom, failing.ranks) == (Symptom.EARLY_EXIT, [1]), "at once: the others tell"


def test_ranks_that_left_their_loops_have_the_time_that_they_need() -> None:
    """All broke out; the last one writes the model for an hour."""
    assert judge(seen(1, code=0), others_in_loop=False, now_s=3600) is None


def test_of_a_script_without_a_loop_the_last_ranks_have_as_long_as_a_stall() -> None:
    patient = POLICY.model_copy(update={"stall_floor_s": 600.0})
    ends = [seen(1, attached=False, code=0)]

    for second, early in ((600, False), (602, True)):
        found = judge_exits(3, ends, world_size=2, now_ns=second * SECOND, policy=patient)
        assert isinstance(found, Anomaly) == early


def test_the_clock_of_the_machine_whose_rank_left_does_not_matter() -> None:
    ahead = seen(1, code=0).end.model_copy(update={"time_ns": 1})
    late = ObservedExit(id="m0-1", end=ahead, attached=True, finished=False, heard_ns=1000 * SECOND)

    assert judge(late, now_s=1001, others_in_loop=True) is None


def test_a_plain_script_that_leaves_gives_the_others_time() -> None:
    first = seen(1, attached=False, code=0)

    assert judge(first, now_s=60) is None
    late = judge(first, now_s=62)
    assert isinstance(late, Anomaly)
    assert late.symptom is Symptom.EARLY_EXIT


def test_all_ranks_with_success_finish_the_job() -> None:
    assert judge(seen(0, finished=True, code=0), seen(1, attached=False, code=0)) == Finished(3)


def test_a_finished_rank_whose_status_got_lost_still_counts() -> None:
    assert judge(seen(0, finished=True), seen(1, finished=True, code=0)) == Finished(3)


def test_an_unknown_end_before_the_loops_end_is_an_anomaly() -> None:
    verdict = judge(seen(0), seen(1, code=0))

    assert isinstance(verdict, Anomaly)
    assert "unknown" in verdict.headline


@given(st.randoms(use_true_random=False), st.integers(1, 8))
def test_the_order_in_which_ends_are_heard_does_not_matter(shuffle: random.Random, world: int) -> None:
    ends = [seen(rank, finished=rank % 2 == 0, code=rank % 2, time_s=rank + 1) for rank in range(world)]
    shuffled = list(ends)
    shuffle.shuffle(shuffled)

    assert judge(*shuffled, world_size=world) == judge(*ends, world_size=world)


def test_a_stall_is_suspected_only_after_the_limit() -> None:
    rule = StallRule(POLICY)

    assert rule.observe(0, 0) is None
    assert rule.observe(0, 100 * SECOND) is None
    for step in range(1, 5):
        assert rule.observe(step * 8, (100 + step) * SECOND) is None
    for second in range(105, 115):
        assert rule.observe(32, second * SECOND) is None
    assert rule.observe(32, 115 * SECOND) == 11.0


def test_a_watcher_that_was_paused_itself_suspects_nothing() -> None:
    rule = StallRule(POLICY)
    for second in range(1, 5):
        assert rule.observe(second * 8, second * SECOND) is None

    assert rule.observe(32, 3600 * SECOND) is None, "nothing was heard yet since it goes on"
    assert rule.observe(40, 3601 * SECOND) is None
    assert rule.observe(40, 100 * SECOND) is None, "the clock was set back"


def test_a_stall_that_nobody_could_see_says_so() -> None:
    found = stall_anomaly(3, job="j", quiet_s=600, step=7, now_ns=SECOND, silent=["m1"])

    assert "the agent of m1 does not answer" in found.headline
    assert found.machines == ["m1"]
    assert found.quiet_s == 600, "so long ago the last step was seen"
