"""The breaker of a cluster: it stops evictions of machines of many jobs for one reason.

A wrong rule in a new release of the agents, or a fault outside the machines, would otherwise take from each job as many
machines as the breaker of that job allows. ByteRobust has no such breaker.
"""

from __future__ import annotations

from everstep.decisions.act.evict.rules import OPERATOR
from everstep.model.eviction import Eviction
from everstep.model.pool import PoolEviction, PoolState, ReplaceRequest

WINDOW_S = 3600.0
"""Evictions within this time count together, seconds."""
SHARE = 0.1
"""At most this share of the cluster's machines may leave their jobs for one reason without an operator."""
LEAST_MACHINES = 8
"""This many machines may always leave their jobs without an operator."""
LEAST_JOBS = 3
"""The breaker stops only evictions from at least this many jobs: a rack that fails belongs to few jobs."""


def tripped(state: PoolState, request: ReplaceRequest, *, now_ns: int) -> str:
    """Return why an operator has to approve the evictions of a request; empty: no approval is needed."""
    most = max(LEAST_MACHINES, int(SHARE * len(state.machines)))
    for reason in sorted({one.reason for one in request.evict if needs_no_operator(one)}):
        before = [one for one in state.evicted if one.reason == reason and now_ns - one.time_ns < WINDOW_S * 1e9]
        wanted = {one.machine for one in request.evict if one.reason == reason and needs_no_operator(one)}
        machines = {one.machine for one in before} | wanted
        jobs = {one.job for one in before} | {request.job}
        if len(machines) > most and len(jobs) >= LEAST_JOBS:
            return (
                f"{len(machines)} machines of {len(jobs)} jobs would leave within an hour for {reason}, and at most "
                f"{most} of the {len(state.machines)} machines of the cluster may leave for one reason without an "
                "operator's approval: the cause may be a rule of this release, or outside the machines"
            )
    return ""


def needs_no_operator(eviction: Eviction) -> bool:
    """Return whether no operator asked for an eviction or approved it."""
    return eviction.rule != OPERATOR and not eviction.approved_by


def note(state: PoolState, request: ReplaceRequest, *, now_ns: int) -> None:
    """Record the evictions of a request; evictions that are too old to count are dropped."""
    recent = [one for one in state.evicted if now_ns - one.time_ns < WINDOW_S * 1e9]
    new = [
        PoolEviction(machine=one.machine, job=request.job, reason=one.reason, time_ns=now_ns)
        for one in request.evict
        if needs_no_operator(one)
    ]
    state.evicted = [*recent, *new]
