"""Which machines take the places of others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from everstep.model.pool import PoolMachine, PoolPlace, ReplaceRequest


def choose(machines: Iterable[PoolMachine], request: ReplaceRequest) -> dict[str, str]:
    """Evicted machine → the one in its place; fewer where there are too few.

    First what the job has been given already and does not use, then standbys, then free machines; among these one of
    another failure domain than that of the evicted machine, in which the job has few.

    Args:
        machines: All of the pool.
        request: What is asked for.
    """
    known = {one.machine.name: one for one in machines}
    out = {one.machine for one in request.evict}
    in_use = {machine.name for machine in request.keep} | out
    domains = Counter(machine.domain for machine in request.keep)
    rest = [one for name, one in known.items() if name not in in_use and not one.fault and _is_there(one, request)]
    chosen: dict[str, str] = {}
    for old in (one.machine for one in request.evict):
        if not rest:
            break
        lost = known[old].machine.domain if old in known else ""

        def weight(one: PoolMachine, lost: str = lost) -> tuple[int, bool, int, str]:
            domain = one.machine.domain
            order = [PoolPlace.ACTIVE, PoolPlace.STANDBY, PoolPlace.FREE].index(one.place)
            return order, bool(lost) and domain == lost, domains[domain] if domain else 0, one.machine.name

        best = min(rest, key=weight)
        rest.remove(best)
        domains[best.machine.domain] += 1
        chosen[old] = best.machine.name
    return chosen


def _is_there(one: PoolMachine, request: ReplaceRequest) -> bool:
    if one.place is PoolPlace.ACTIVE:  # given to an incident that was closed before it could use it
        return (one.job, one.run) == (request.job, request.run) and not one.wanted_out
    return one.place in {PoolPlace.STANDBY, PoolPlace.FREE}
