"""The pool's book: the state and the job of every machine. Pure: times are arguments, and the state is changed in
place.

A machine has one state at a time, so two jobs never have the same machine; a job never gets an evicted machine before
it passed its tests or an operator released it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from everstep.decisions.act.evict.rules import BY_NAME
from everstep.model.eviction import Eviction
from everstep.model.machine import Machine
from everstep.model.pool import (
    GiveBack,
    Leased,
    LeaseRequest,
    OperatorMove,
    PoolMachine,
    PoolPlace,
    PoolState,
    Replaced,
    ReplaceRequest,
    Shortage,
)


def choose(machines: Iterable[PoolMachine], request: ReplaceRequest) -> dict[str, str]:
    """Return evicted machine → its replacement; fewer entries if there are too few machines.

    Machines that the job already has and does not use come first, then standbys, then free machines; among them a
    machine outside the failure domain of the evicted machine is preferred, in a domain where the job has few machines.

    Args:
        machines: All machines of the pool.
        request: The request for replacements.
    """
    known = {one.machine.name: one for one in machines}
    out = {eviction.machine for eviction in request.evict}
    in_use = {machine.name for machine in request.keep} | out
    domains = Counter(machine.domain for machine in request.keep)
    rest = [one for name, one in known.items() if name not in in_use and not one.fault and _is_there(one, request)]
    chosen: dict[str, str] = {}
    for old in (eviction.machine for eviction in request.evict):
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
    if one.place is PoolPlace.ACTIVE:  # The machine was assigned to an incident that was closed before it could use it.
        return (one.job, one.run) == (request.job, request.run) and not one.wanted_out
    return one.place in {PoolPlace.STANDBY, PoolPlace.FREE}


EVICTIONS_KEPT = 10
"""The number of eviction times that are kept for one machine."""
ANSWERS_KEPT = 200
"""Answers to replacements."""
TWICE_S = 24 * 3600.0
"""A machine that is evicted twice within this time, seconds, does not return without an operator."""
IDLE = frozenset({PoolPlace.STANDBY, PoolPlace.FREE})
UNUSED = IDLE | {PoolPlace.PROVISIONING}


def put(state: PoolState, name: str, place: PoolPlace, *, now_ns: int, by: str, why: str = "", **more: object) -> None:
    """Set the state of a machine, with the time and the reason. Fields that are not in ``more`` are as for a new
    machine."""
    known = state.machines[name]
    state.machines[name] = PoolMachine(
        machine=known.machine,
        place=place,
        since_ns=now_ns,
        by=by,
        why=why[:300],
        fault=known.fault,
        **({"evicted_ns": known.evicted_ns} | more),
    )


def add(state: PoolState, machines: Iterable[Machine], *, now_ns: int) -> None:
    """Add machines, or update the addresses of known machines."""
    for machine in machines:
        known = state.machines.get(machine.name)
        if known is None:
            state.machines[machine.name] = PoolMachine(
                machine=machine, place=PoolPlace.FREE, since_ns=now_ns, by="pool", why="it is new"
            )
        elif known.machine != machine:
            state.machines[machine.name] = known.model_copy(update={"machine": machine})


def lease(state: PoolState, request: LeaseRequest, *, now_ns: int) -> Leased:
    """Give a job the machines that it names: all of them, or none.

    Args:
        state: Of the pool, changed in place.
        request: Of the job.
        now_ns: Now.
    """
    refused = taken_out(state, request)
    for machine in request.machines:
        known = state.machines.get(machine.name)
        if known is not None and (why := _why_not(known, request.job)):
            refused[machine.name] = why
    if refused:
        given = [state.machines[name] for name in refused]
        return Leased(refused=refused, may_change=all(one.place is PoolPlace.ACTIVE for one in given))
    add(state, request.machines, now_ns=now_ns)
    for machine in request.machines:
        known = state.machines[machine.name]
        if (known.place, known.job, known.run) != (PoolPlace.ACTIVE, request.job, request.run):
            put(
                state,
                machine.name,
                PoolPlace.ACTIVE,
                now_ns=now_ns,
                by=f"job {request.job}",
                job=request.job,
                run=request.run,
            )
    return Leased()


def taken_out(state: PoolState, request: LeaseRequest) -> dict[str, str]:
    """Return the requested machines that an operator removes from an earlier run whose end is not known yet → the
    reason."""
    wanted = [state.machines[machine.name] for machine in request.machines if machine.name in state.machines]
    return {
        one.machine.name: f"{one.by} takes it out: {one.why}; 'everstep release {one.machine.name}' lets jobs have it"
        for one in wanted
        if one.wanted_out and one.run != request.run
    }


def _why_not(known: PoolMachine, job: str) -> str:
    if known.place is PoolPlace.ACTIVE and known.job != job:  # only one job of a name runs
        return f"job {known.job} has it"
    if known.place in {PoolPlace.QUARANTINED, PoolPlace.CORDONED}:
        return f"it is {known.place}: {known.why}; 'everstep release {known.machine.name}' lets it come back"
    return ""


def replace(state: PoolState, request: ReplaceRequest, *, now_ns: int) -> Replaced:
    """Evict machines of a job and replace all of them, or none. A repeated request gets the same answer."""
    if known := state.replaced.get(request.id):
        return known
    chosen = choose(state.machines.values(), request)
    missing = len(request.evict) - len(chosen)
    if missing:
        state.short[request.job] = Shortage(machines=len(request.evict), asked_ns=now_ns)
        asked = "; the cluster is asked for more" if state.listed < state.at_most else ""
        why = f"{len(request.evict)} needed and {state.spare} to spare{asked}"
        if not _can_go_back(state, request):
            return Replaced(why=why)
        for old in request.back.values():
            _go_back(state, old, request, why, now_ns=now_ns)
        return _answered(state, request, request.back, why, now_ns=now_ns)
    state.short.pop(request.job, None)
    for old, name in chosen.items():
        put(
            state,
            name,
            PoolPlace.ACTIVE,
            now_ns=now_ns,
            by=request.id,
            why=f"in the place of {old}",
            job=request.job,
            run=request.run,
        )
    return _answered(state, request, chosen, "", now_ns=now_ns)


def _answered(state: PoolState, request: ReplaceRequest, chosen: dict[str, str], why: str, *, now_ns: int) -> Replaced:
    """Evict the machines that leave, and keep the answer."""
    for eviction in request.evict:
        _evict(state, eviction, request, now_ns=now_ns)
    answer = Replaced(machines={old: state.machines[name].machine for old, name in chosen.items()}, why=why)
    state.replaced = dict([*state.replaced.items(), (request.id, answer)][-ANSWERS_KEPT:])
    return answer


def _can_go_back(state: PoolState, request: ReplaceRequest) -> bool:
    """Return whether each unfit machine replaced a machine that left this job and that no job has had since."""
    away = {PoolPlace.QUARANTINED, PoolPlace.CORDONED}
    left = [state.machines.get(old) for old in request.back.values()]
    return request.back.keys() == {eviction.machine for eviction in request.evict} and all(
        one is not None and one.place in away and one.uncleaned and (one.job, one.run) == (request.job, request.run)
        for one in left
    )


def _go_back(state: PoolState, name: str, request: ReplaceRequest, why: str, *, now_ns: int) -> None:
    """A machine that was to leave stays in its job: its ranks were not stopped."""
    known = state.machines[name]
    put(
        state,
        name,
        PoolPlace.ACTIVE,
        now_ns=now_ns,
        by=request.id,
        why=f"it stays: {why}; {known.why}",
        job=request.job,
        run=request.run,
        wanted_out=known.place is PoolPlace.CORDONED,
        evicted_ns=known.evicted_ns[:-1],
    )
    # A look may have found its ranks there, which are to be there now.
    state.machines[name] = state.machines[name].model_copy(update={"fault": ""})


def _evict(state: PoolState, one: Eviction, request: ReplaceRequest, *, now_ns: int) -> None:
    """Put a machine into quarantine, or cordon it if an operator asked for that."""
    known = state.machines.get(one.machine)
    if known is None:
        return
    place = PoolPlace.CORDONED if known.wanted_out else PoolPlace.QUARANTINED
    put(
        state,
        one.machine,
        place,
        now_ns=now_ns,
        by=request.id,
        why=f"{one.reason}: {one.why}",
        job=request.job,
        run=request.run,
        uncleaned=True,
        until_released=one.rule in BY_NAME and BY_NAME[one.rule].until_released,
        evicted_ns=[*known.evicted_ns, now_ns][-EVICTIONS_KEPT:],
    )


def give_back(state: PoolState, request: GiveBack, *, now_ns: int) -> int:
    """A job left its machines; returns how many."""
    left = [
        name
        for name, known in state.machines.items()
        if known.place is PoolPlace.ACTIVE and (known.job, known.run) == (request.job, request.run)
    ]
    for name in left:
        free(state, name, now_ns=now_ns, by=f"job {request.job}", why="given back")
    return len(left)


def free(state: PoolState, name: str, *, now_ns: int, by: str, why: str) -> None:
    """Release a machine from its job: it becomes a standby if there are too few, and if it returned from repair."""
    known = state.machines[name]
    if known.wanted_out:
        put(state, name, PoolPlace.CORDONED, now_ns=now_ns, by=known.by, why=known.why)
        return
    standbys = sum(machine.place is PoolPlace.STANDBY for machine in state.machines.values())
    repaired = known.place in {PoolPlace.QUARANTINED, PoolPlace.CORDONED}
    place = PoolPlace.STANDBY if repaired and standbys < state.standbys else PoolPlace.FREE
    put(state, name, place, now_ns=now_ns, by=by, why=why)


def operator_evicts(state: PoolState, move: OperatorMove, *, now_ns: int) -> str:
    """Keep a machine away from jobs; returns what becomes of it, for people; empty: the pool does not know it."""
    known = state.machines.get(move.machine)
    if known is None:
        return ""
    why = move.reason or "an operator says so"
    if known.place is PoolPlace.ACTIVE:
        state.machines[move.machine] = known.model_copy(update={"wanted_out": True, "by": move.operator, "why": why})
        return f"{move.machine} leaves job {known.job} once there is another in its place, and is cordoned then"
    put(
        state,
        move.machine,
        PoolPlace.CORDONED,
        now_ns=now_ns,
        by=move.operator,
        why=why,
        job=known.job,
        run=known.run,
        uncleaned=known.uncleaned,
    )
    return f"{move.machine} is cordoned"


def operator_releases(state: PoolState, move: OperatorMove, *, now_ns: int) -> str:
    """Let jobs have a machine again; returns what becomes of it, for people; empty: the pool does not know it."""
    known = state.machines.get(move.machine)
    if known is None:
        return ""
    if known.place is PoolPlace.ACTIVE:
        state.machines[move.machine] = known.model_copy(update={"wanted_out": False})
        return f"{move.machine} stays with job {known.job}"
    if known.place in IDLE:
        return f"{move.machine} is {known.place} already"
    if known.uncleaned and known.unlisted_ns and known.fault:
        del state.machines[move.machine]
        return f"{move.machine} does not answer and is not in the list of the cluster any more: it is forgotten"
    if known.uncleaned:
        return (
            f"{move.machine} may still run ranks of job {known.job}, and does not answer: release it when it does again"
        )
    free(state, move.machine, now_ns=now_ns, by=move.operator, why=move.reason or "an operator released it")
    state.machines[move.machine] = state.machines[move.machine].model_copy(update={"evicted_ns": [], "fault": ""})
    return f"{move.machine} is {state.machines[move.machine].place}"
