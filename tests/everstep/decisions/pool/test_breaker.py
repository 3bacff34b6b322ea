"""The breaker of a cluster."""

from __future__ import annotations

import pytest

from everstep.decisions.pool import book
from everstep.decisions.pool.breaker import LEAST_MACHINES, WINDOW_S
from everstep.model.eviction import Eviction
from everstep.model.pool import PoolState, Replaced, ReplaceRequest
from tests.everstep.decisions.pool.test_book import pool, want

S = 10**9


def leaves(
    state: PoolState, number: int, at_s: float, *, jobs: int = 4, reason: str = "xid-79", approved_by: str = ""
) -> Replaced:
    eviction = Eviction(machine=f"m{number}", rule="sure-machine-fault", reason=reason, why="", approved_by=approved_by)
    request = ReplaceRequest(id=f"i/{number}/{at_s}", job=f"job{number % jobs}", run="1", evict=[eviction])
    return book.replace(state, request, now_ns=round(at_s * S))


def cluster(jobs: int = 4) -> PoolState:
    """Return a pool of 60 machines. Four jobs have 40 of them."""
    state = pool(60, standbys=20)
    for job in range(jobs):
        assert not book.lease(state, want(f"job{job}", *range(job, 40, jobs)), now_ns=2).refused
    return state


def test_one_reason_empties_not_all_jobs() -> None:
    state = cluster()
    answers = [leaves(state, number, 10 + number) for number in range(LEAST_MACHINES + 2)]
    assert [bool(answer.held) for answer in answers] == [False] * LEAST_MACHINES + [True] * 2
    assert answers[-1].machines == {}
    assert "9 machines of 4 jobs would leave within an hour for xid-79" in answers[-1].held
    assert state.machines["m8"].place.value == "active"


def test_an_operator_approves() -> None:
    state = cluster()
    for number in range(LEAST_MACHINES):
        leaves(state, number, 10 + number)
    assert leaves(state, 8, 30).held
    assert leaves(state, 8, 31, approved_by="ada").machines


@pytest.mark.parametrize("what", ["other reasons", "over hours", "two jobs"])
def test_what_is_no_wave(what: str) -> None:
    """A rack that fails belongs to few jobs, and over a day machines fail for many reasons."""
    jobs = 2 if what == "two jobs" else 4
    state = cluster(jobs)
    for number in range(LEAST_MACHINES + 4):
        at_s = 10 + number * (WINDOW_S / 6 if what == "over hours" else 1)
        reason = f"xid-{number % 4}" if what == "other reasons" else "xid-79"
        assert not leaves(state, number, at_s, jobs=jobs, reason=reason).held
