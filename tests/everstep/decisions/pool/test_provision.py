"""How many machines the pool requests from a cluster."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.decisions.pool import book, poll
from everstep.decisions.pool.poll import AWAITED_S, COMING_S, coming, is_awaited, wanted
from everstep.model.eviction import Eviction
from everstep.model.machine import Machine
from everstep.model.pool import LeaseRequest, PollAnswers, PoolState, Replaced, ReplaceRequest, RunningJob

S = 10**9


def machine(number: int) -> Machine:
    return Machine(name=f"m{number}", address=f"10.0.0.{number}:1")


def listing(count: int, *, standbys: int = 0, at_most: int = 0, **more: object) -> PollAnswers:
    machines = [machine(number) for number in range(count)]
    return PollAnswers.model_validate({"machines": machines, "standbys": standbys, "at_most": at_most, **more})


def cluster(count: int, job: int, *, standbys: int = 0, at_most: int = 0) -> PoolState:
    """Return a pool of ``count`` machines. A job has the first ``job`` of them."""
    state = PoolState()
    poll.apply(state, listing(count, standbys=standbys, at_most=at_most), began_ns=0, now_ns=1)
    machines = [machine(number) for number in range(job)]
    book.lease(state, LeaseRequest(job="gpt", run="1", machines=machines), now_ns=2)
    return state


def evict(state: PoolState, *names: str, request: str = "i/1") -> Replaced:
    evictions = [Eviction(machine=name, rule="silent-machine", reason="silent", why="gone") for name in names]
    active = [one.machine for name, one in state.machines.items() if one.job == "gpt" and name not in names]
    asked = ReplaceRequest(id=request, job="gpt", run="1", evict=evictions, keep=active)
    return book.replace(state, asked, now_ns=3)


def place(state: PoolState, name: str) -> str:
    return str(state.machines[name].place)


def test_a_job_that_waits_for_machines_gets_as_many_as_it_lacks() -> None:
    state = cluster(5, 4, at_most=10)
    answer = evict(state, "m1", "m2")
    assert answer.why == "2 needed and 1 to spare; the cluster is asked for more"
    assert wanted(state, now_ns=4) == 6
    assert evict(state, "m1", "m2").why == answer.why
    assert wanted(state, now_ns=4) == 6, "the repeated request counts only once"


def test_machines_that_were_requested_are_not_requested_again() -> None:
    state = cluster(4, 4, at_most=8)
    evict(state, "m1")
    assert wanted(state, now_ns=4) == 5

    poll.apply(state, listing(5, at_most=8), began_ns=10, now_ns=11)
    assert place(state, "m4") == "provisioning"
    assert (state.spare, coming(state, now_ns=12), wanted(state, now_ns=12)) == (0, 1, 0)
    assert not evict(state, "m1").machines, "a machine that no poll has seen replaces none"

    silent = listing(5, at_most=8, faults={"m4": "it does not answer"})
    poll.apply(state, silent, began_ns=20, now_ns=21)
    assert place(state, "m4") == "provisioning"
    poll.apply(state, listing(5, at_most=8), began_ns=30, now_ns=31)
    assert place(state, "m4") == "free"
    assert evict(state, "m1").machines["m1"] == machine(4)
    assert (state.short, wanted(state, now_ns=40)) == ({}, 0)


def test_a_machine_that_never_comes_counts_for_a_limited_time() -> None:
    state = cluster(4, 4, at_most=8)
    evict(state, "m1")
    silent = listing(5, at_most=8, faults={"m4": "it does not answer"})
    for second in (10, 20):
        poll.apply(state, silent, began_ns=second * S, now_ns=second * S + 1)
    assert wanted(state, now_ns=int(10 * S + COMING_S * S) - 1) == 0
    assert wanted(state, now_ns=int(10 * S + COMING_S * S) + 1) == 6


def test_standbys_that_were_used_are_filled_up_again() -> None:
    state = cluster(5, 4, standbys=1, at_most=6)
    assert wanted(state, now_ns=4) == 0
    assert evict(state, "m0").machines == {"m0": machine(4)}
    assert wanted(state, now_ns=4) == 6


def test_a_standby_that_is_silent_for_a_moment_is_not_replaced() -> None:
    state = cluster(5, 4, standbys=1, at_most=6)
    poll.apply(state, listing(5, standbys=1, at_most=6, faults={"m4": "silent"}), began_ns=10, now_ns=11)
    assert (state.spare, wanted(state, now_ns=12)) == (0, 0)


@pytest.mark.parametrize("ends", ["over", "settled"])
def test_a_job_that_continues_or_ended_waits_for_no_machine(ends: str) -> None:
    state = cluster(4, 4, at_most=8)
    evict(state, "m1")
    running = RunningJob(job="gpt", run="1", machines=[machine(number) for number in range(4)], settled=True)
    more = {"over": ["gpt"]} if ends == "over" else {"jobs": [running]}
    poll.apply(state, listing(4, at_most=8, **more), began_ns=2, now_ns=9)
    assert state.short if ends == "settled" else True, "the job made another request since then"
    poll.apply(state, listing(4, at_most=8, **more), began_ns=10, now_ns=11)
    assert (state.short, wanted(state, now_ns=12)) == ({}, 0)


def test_a_cluster_that_does_not_grow_is_not_asked() -> None:
    state = cluster(4, 4)
    assert evict(state, "m1").why == "1 needed and 0 to spare"
    assert wanted(state, now_ns=4) == 0


@given(count=st.integers(1, 8), standbys=st.integers(0, 4), at_most=st.integers(0, 12), leaving=st.integers(1, 8))
def test_never_more_than_it_may_have_and_never_fewer_than_it_has(
    count: int, standbys: int, at_most: int, leaving: int
) -> None:
    state = cluster(count, count, standbys=min(standbys, count), at_most=at_most)
    evict(state, *(f"m{number}" for number in range(min(leaving, count))))
    asked = wanted(state, now_ns=4)
    assert asked == 0 or count < asked <= at_most


def test_polls_are_frequent_while_machines_may_come_soon() -> None:
    state = cluster(4, 4)
    assert not is_awaited(state, now_ns=4)
    evict(state, "m1")
    late = state.short["gpt"].asked_ns + int(AWAITED_S * S)
    assert (is_awaited(state, now_ns=4), is_awaited(state, now_ns=late)) == (True, False)
    poll.apply(state, listing(5, at_most=5, faults={"m4": "silent"}), began_ns=late - 1, now_ns=late)
    assert coming(state, now_ns=late) == 1
    assert is_awaited(state, now_ns=late)
