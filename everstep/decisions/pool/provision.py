"""How many machines a cluster should have: as many as the jobs that wait for some need, and its standbys."""

from __future__ import annotations

from everstep.decisions.pool.book import IDLE
from everstep.model.pool import PoolPlace, PoolState

COMING_S = 900.0
"""A machine that came into the list and is not fit after this long is not counted on any more."""

AWAITED_S = 600.0
"""A job that waits for machines this long waits on, and its machines are looked for less often."""


def wanted(state: PoolState, *, now_ns: int) -> int:
    """How many machines the list of the cluster should have; 0: it has enough, or cannot have more.

    It is a number of all, not of new ones: who asks for it twice gets no more than who asks once.

    Args:
        state: Of the pool.
        now_ns: Now.
    """
    machines = state.machines.values()
    idle = sum(one.place in IDLE for one in machines)
    needed = sum(short.machines for short in state.short.values())
    lacking = max(needed - state.spare, state.standbys - idle) - coming(state, now_ns=now_ns)
    total = min(state.listed + lacking, state.at_most)
    return total if total > state.listed else 0


def coming(state: PoolState, *, now_ns: int) -> int:
    """New machines that should be fit soon."""
    new = [one for one in state.machines.values() if one.place is PoolPlace.PROVISIONING]
    return sum(now_ns - one.since_ns < COMING_S * 1e9 for one in new)


def is_awaited(state: PoolState, *, now_ns: int) -> bool:
    """Whether a job waits for machines of which some may come soon: new ones, or others, as it has just asked."""
    lately = any(now_ns - short.asked_ns < AWAITED_S * 1e9 for short in state.short.values())
    return lately or bool(state.short and coming(state, now_ns=now_ns))
