"""The detection of failures by the ends of ranks."""

import random
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from everstep.decisions.detect.job_facts import ObservedExit
from everstep.decisions.detect.rank_ends import find_early_exit, find_failed_rank, has_finished
from everstep.model.incident import Anomaly, Symptom
from tests.everstep.decisions.detect.job_facts import POLICY, RANK, S, facts, seen

IN_LOOP = replace(RANK, rank=0)
LEFT = replace(RANK, rank=0, in_loop=False, left_loop=True)


def failed(*exits: ObservedExit) -> Anomaly | None:
    return find_failed_rank(facts(*exits))


def test_a_killed_rank_is_an_anomaly_at_once_with_its_observation() -> None:
    found = failed(seen(1, signal=9))

    assert found is not None
    assert (found.id, found.symptom, found.ranks, found.generation) == ("m0-1", Symptom.CRASH, [1], 3)


def test_a_job_is_finished_if_all_ranks_leave_with_code_0() -> None:
    """As with torchrun, it does not matter whether the ranks reached the end of a loop."""
    ends = [seen(0, code=0), seen(1, code=0)]

    assert has_finished(ends, 2)
    assert failed(*ends) is find_early_exit(facts(*ends, now_s=9000)) is None
    assert not has_finished(ends[:1], 2), "the other rank may still run"
    assert not has_finished([], 2)


def test_a_rank_that_leaves_while_others_train_is_an_anomaly() -> None:
    gone = seen(1, code=0)

    assert find_early_exit(facts(gone, ranks=[IN_LOOP], now_s=61)) is None
    found = find_early_exit(facts(gone, ranks=[IN_LOOP], now_s=62))
    assert found is not None
    assert (found.symptom, found.ranks) == (Symptom.EARLY_EXIT, [1])


def test_a_rank_that_left_alone_is_the_cause_if_others_fail() -> None:
    failing = failed(seen(1, code=0), seen(0, code=1, exception="RuntimeError: Connection closed by peer"))

    assert failing is not None
    assert (failing.symptom, failing.ranks) == (Symptom.EARLY_EXIT, [1])


def test_ranks_that_left_their_loops_are_no_anomaly() -> None:
    """All ranks left their loops by ``break``, and the last rank writes the model for an hour."""
    assert find_early_exit(facts(seen(1, code=0), ranks=[LEFT], now_s=3600)) is None


def test_ranks_without_a_loop_have_as_long_as_for_a_hang() -> None:
    patient = POLICY.changed({"hang.floor_s": 600.0})
    plain = replace(RANK, rank=0, in_loop=False)

    for ranks in ([plain], []):
        for second, early in ((601, False), (602, True)):
            found = find_early_exit(facts(seen(1, code=0), ranks=ranks, now_s=second, policy=patient))
            assert (found is not None) == early


def test_a_rank_that_ended_does_not_count_as_in_its_loop() -> None:
    found = facts(seen(1, code=0), ranks=[replace(IN_LOOP, rank=1), LEFT], now_s=3600)

    assert find_early_exit(found) is None


def test_the_clock_of_the_machine_whose_rank_left_does_not_matter() -> None:
    ahead = seen(1, code=0).end.model_copy(update={"time_ns": 1})
    late = ObservedExit(id="m0-1", end=ahead, finished=False, heard_ns=1000 * S)

    assert find_early_exit(facts(late, now_s=1001, ranks=[IN_LOOP])) is None


def test_a_finished_rank_without_an_exit_status_counts_as_success() -> None:
    assert has_finished([seen(0, finished=True), seen(1, finished=True, code=0)], 2)
    assert has_finished([seen(0, finished=True, code=0), seen(1, code=0)], 2)


def test_an_unknown_end_before_the_loops_end_is_an_anomaly() -> None:
    ends = [seen(0), seen(1, code=0)]

    found = failed(*ends)
    assert found is not None
    assert "unknown" in found.headline
    assert not has_finished(ends, 2)


@given(st.randoms(use_true_random=False), st.integers(1, 8))
def test_the_order_in_which_ends_are_heard_does_not_matter(shuffle: random.Random, world: int) -> None:
    ends = [seen(rank, finished=rank % 2 == 0, code=rank % 2, time_s=rank + 1) for rank in range(world)]
    shuffled = list(ends)
    shuffle.shuffle(shuffled)

    assert failed(*shuffled) == failed(*ends)
