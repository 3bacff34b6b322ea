"""Which rank failed first, and how its end is described."""

from __future__ import annotations

import pytest

from everstep.decisions.blame.first_failure import (
    cause_of,
    failure_of,
    fault_owner,
    first_failure,
    headline_of,
    headline_of_loss,
    is_victim,
    symptom_of,
)
from everstep.model.evidence import Classification, RankExit
from everstep.model.finding import Finding, Health, MachineFinding, Owner
from everstep.model.incident import Symptom
from tests.rank_ends import exited


def end(rank: int, time_ns: int, **fields: object) -> RankExit:
    return exited(rank=rank, machine=f"m{rank // 2}", time_ns=time_ns, **fields)


GLOO = "RuntimeError: [../gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.12]:4213"


def test_a_victim_that_ended_earlier_is_not_the_cause() -> None:
    ends = [end(0, 10, code=1, exception=GLOO), end(5, 20, signal=9), end(1, 30, code=1, exception=GLOO)]

    assert first_failure(ends) == ends[1]


def test_a_rank_is_a_victim_although_its_exception_is_wrapped_in_another() -> None:
    wrapped = f"{GLOO}\n\nThe above exception was the direct cause of the following exception:\n" + "frame\n" * 400

    assert is_victim(end(6, 10, code=1, exception="RuntimeError: ", log_tail=wrapped))


def test_among_victims_alone_the_earliest_is_named() -> None:
    ends = [end(3, 20, code=1, exception=GLOO), end(2, 10, code=1, exception=GLOO)]

    assert first_failure(ends) == ends[1]


def test_ranks_that_were_stopped_are_no_cause() -> None:
    assert first_failure([end(0, 10, signal=9, stopped_by_us=True)]) is None


def test_a_rank_that_left_early_with_success_explains_the_victims() -> None:
    ends = [end(4, 10, code=0), end(5, 11, code=1, exception=GLOO)]

    found = first_failure(ends)

    assert found == ends[0]
    assert symptom_of(ends[0]) is Symptom.EARLY_EXIT


def test_a_rank_that_left_with_success_does_not_explain_a_failure_of_its_own_kind() -> None:
    """One rank left after its last step. Then another rank fails to write the model."""
    ends = [end(4, 10, code=0), end(0, 500, code=1, exception="OSError: no space left on device")]

    assert first_failure(ends) == ends[1]


def test_equal_ends_have_equal_causes() -> None:
    assert cause_of(end(1, 5, signal=9)) == cause_of(end(7, 9, signal=9)) == "SIGKILL"
    assert cause_of(end(1, 5, code=1, exception="ValueError: bad 1")) == "ValueError"
    assert cause_of(end(1, 5, code=3)) == "exit code 3"
    assert cause_of(end(1, 5)) == "exit status unknown"


def test_headlines() -> None:
    assert headline_of(end(5, 1, signal=9)) == "rank 5 on m2 ended by SIGKILL"
    assert headline_of(end(5, 1, code=1, exception="ValueError: x")) == "rank 5 on m2 raised ValueError: x"
    assert headline_of(end(5, 1, code=1, exception="RuntimeError: [/a/tcp/pair.cc:561] Read error [::1]:5")) == (
        "rank 5 on m2 raised RuntimeError: [pair.cc:561] Read error [::1]:5"
    )
    assert headline_of(end(5, 1, code=1, exception="X: a\n  b\nc")) == "rank 5 on m2 raised X: a b c"
    assert headline_of(end(5, 1, code=0)) == "rank 5 on m2 left with code 0 before the job was over"
    assert headline_of(end(5, 1, code=7)) == "rank 5 on m2 ended with exit code 7"
    assert headline_of(end(5, 1, signal=77)) == "rank 5 on m2 ended by signal 77"


def test_a_user_exception_is_no_crash() -> None:
    failure = failure_of(end(2, 7, code=1, exception="IndexError: out of range"), generation=4, step=17, now_ns=99)

    assert (failure.symptom, failure.cause, failure.step, failure.generation, failure.time_ns) == (
        Symptom.EXCEPTION,
        "IndexError",
        17,
        4,
        99,
    )


@pytest.mark.parametrize(
    "raised",
    [
        GLOO,
        "RuntimeError: [../gloo/transport/tcp/pair.cc:553] recv: Connection timed out [10.99.0.13]:4711",
        "DistNetworkError: The client socket has failed to connect: No route to host",
        "DistNetworkError: The client socket has timed out after 60000ms while trying to connect to (m0, 29500).",
        "RuntimeError: [../gloo/unbound_buffer.cc:78] Timed out waiting 1800000ms for recv operation to complete",
    ],
)
def test_a_lost_connection_is_no_user_error(raised: str) -> None:
    assert symptom_of(end(2, 7, code=1, exception=raised)) is Symptom.CONNECTION_LOST
    chained = f"Traceback (most recent call last)\n{raised}\nThe above exception was the direct cause of\n"
    wrapped = end(
        2, 7, code=1, exception="RuntimeError: stage 1", log_tail=f"{chained}Traceback (most recent call last)\n"
    )
    assert symptom_of(wrapped) is Symptom.CONNECTION_LOST
    assert symptom_of(end(2, 7, signal=9, log_tail=raised)) is Symptom.CRASH
    assert symptom_of(end(2, 7, code=3, log_tail=raised)) is Symptom.CRASH
    assert symptom_of(end(2, 7, code=0, log_tail=raised)) is Symptom.EARLY_EXIT


@pytest.mark.parametrize(
    "raised",
    ["ValueError: x", "TimeoutError: Timed out waiting for shard 7 of the dataset", "OSError: No route to host: nfs-3"],
)
def test_a_logged_network_error_does_not_hide_a_user_error(raised: str) -> None:
    warned = f"WARNING: retrying: {GLOO}\nTraceback (most recent call last)\n  File ...\n{raised}\n"
    assert symptom_of(end(2, 7, code=1, exception=raised, log_tail=warned)) is Symptom.EXCEPTION
    own, aborted = end(3, 10, code=1, exception=raised), end(1, 900, signal=6)
    assert first_failure([aborted, own]) == own


def test_a_rank_is_a_victim_if_only_its_log_shows_it() -> None:
    assert is_victim(end(1, 1, code=1, log_tail="…\n[rank1]: " + GLOO))
    assert not is_victim(end(1, 1, code=1, exception="ValueError: Connection"))


def test_the_headline_names_a_lost_machine_and_no_victim() -> None:
    victim = end(3, 10, code=1, exception=GLOO)

    assert headline_of_loss({"m2": [4, 5]}, victim) == "m2 came back empty and lost ranks 4, 5"
    assert headline_of_loss({"m3": [3], "m1": [1]}, None) == "m1, m3 came back empty and lost ranks 1, 3"
    assert headline_of_loss({"m2": [2]}, None) == "m2 came back empty and lost rank 2"
    assert headline_of_loss({"m2": range(16, 32)}, None).endswith("ranks 16, 17, 18, 19, 20, 21, 22, 23 and 8 more")


def test_the_headline_names_a_rank_that_ended_by_itself_too() -> None:
    assert headline_of_loss({"m2": [4]}, end(1, 5, signal=9)).endswith("rank 4; rank 1 on m0 ended by SIGKILL")


def classified(owner: Owner, *, consequence: bool = False) -> Classification:
    return Classification(fault="x", owner=owner, reason="x", consequence=consequence)


def found(owner: Owner, verdict: Health = Health.FAULTY) -> MachineFinding:
    return MachineFinding(machine="m1", finding=Finding(inspection="x", reason="x", owner=owner, verdict=verdict))


@pytest.mark.parametrize(
    ("classification", "findings", "owner"),
    [
        (classified(Owner.CODE), [found(Owner.MACHINE)], Owner.CODE),
        (classified(Owner.NETWORK, consequence=True), [found(Owner.MACHINE)], Owner.MACHINE),
        (classified(Owner.NETWORK, consequence=True), [], Owner.UNKNOWN),
        (classified(Owner.UNKNOWN), [found(Owner.UNKNOWN), found(Owner.STORAGE)], Owner.STORAGE),
        (None, [found(Owner.MACHINE, Health.UNKNOWN)], Owner.UNKNOWN),
        (None, [], Owner.UNKNOWN),
    ],
)
def test_the_owner(classification: Classification | None, findings: list[MachineFinding], owner: Owner) -> None:
    assert fault_owner(classification, findings) is owner
