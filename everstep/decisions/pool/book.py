"""Keeps the book of the machine pool: the state and the job of every machine. Its functions change the state in place.

A machine has one state at a time, so two jobs never have the same machine. A job never gets an evicted machine before
the machine passed its tests, or an operator released it.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable
from heapq import heappop, heappush
from typing import Any

from everstep.decisions.act.evict.rules import BY_NAME
from everstep.decisions.pool import breaker
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

    Machines that the job has and does not use come first, then standbys, then free machines. Among equal machines, a
    machine outside the failure domain of the evicted machine comes first, and then a machine in a domain where the job
    has few machines.

    Args:
        machines: All machines of the pool.
        request: The request for replacements.
    """
    by_name = {machine.machine.name: machine for machine in machines}
    in_use = {machine.name for machine in request.keep} | {eviction.machine for eviction in request.evict}
    domains = Counter(machine.domain for machine in request.keep)
    rest = [
        machine
        for name, machine in by_name.items()
        if name not in in_use and not machine.fault and _is_available(machine, request)
    ]
    chosen: dict[str, str] = {}
    leaving = deque(eviction.machine for eviction in request.evict)
    for place in (PoolPlace.ACTIVE, PoolPlace.STANDBY, PoolPlace.FREE):
        candidates = _Candidates([one.machine for one in rest if one.place is place], domains)
        while leaving and candidates:
            old = leaving.popleft()
            chosen[old] = candidates.take(by_name[old].machine.domain if old in by_name else "")
    return chosen


class _Candidates:
    """Equal machines that can replace others, by failure domain."""

    def __init__(self, machines: Iterable[Machine], used: Counter[str]) -> None:
        """``used`` has the number of machines of the job in each failure domain, and is kept up to date."""
        self._used = used
        self._names: dict[str, deque[str]] = defaultdict(deque)
        for machine in sorted(machines, key=lambda machine: machine.name):
            self._names[machine.domain].append(machine.name)
        self._heap: list[tuple[int, str, str]] = []
        """The first machine of each domain: the count of its domain, its name, its domain."""
        for domain in self._names:
            self._offer(domain)

    def __bool__(self) -> bool:
        return bool(self._heap)

    def take(self, lost: str) -> str:
        """Return the best replacement of a machine in the domain ``lost``, which cannot be taken again."""
        _, name, domain = heappop(self._heap)
        if lost and domain == lost and self._heap:
            _, name, domain = heappop(self._heap)
            self._offer(lost)
        self._names[domain].popleft()
        self._used[domain] += 1
        self._offer(domain)
        return name

    def _offer(self, domain: str) -> None:
        if names := self._names[domain]:
            heappush(self._heap, (self._used[domain] if domain else 0, names[0], domain))


def _is_available(machine: PoolMachine, request: ReplaceRequest) -> bool:
    if machine.place is PoolPlace.ACTIVE:  # an incident got the machine, and was closed before it used the machine
        return (machine.job, machine.run) == (request.job, request.run) and not machine.wanted_out
    return machine.place in IDLE


EVICTIONS_KEPT = 10
"""The number of eviction times that are kept for one machine."""
ANSWERS_KEPT = 200
"""The number of answers to requests for replacements that are kept."""
TWICE_S = 24 * 3600.0
"""A machine that is evicted twice within this time, seconds, does not return without an operator."""
IDLE = frozenset({PoolPlace.STANDBY, PoolPlace.FREE})
UNUSED = IDLE | {PoolPlace.PROVISIONING}


def put(state: PoolState, name: str, place: PoolPlace, *, now_ns: int, by: str, why: str = "", **more: object) -> None:
    """Set the state of a machine, with the time and the reason.

    The machine keeps its address, its fault and its evictions. All other fields are in ``more``, or have the values of
    a new machine.
    """
    before = state.machines[name]
    state.machines[name] = PoolMachine(
        machine=before.machine,
        place=place,
        since_ns=now_ns,
        by=by,
        why=why[:300],
        fault=before.fault,
        **({"evicted_ns": before.evicted_ns} | more),
    )


def _activate(state: PoolState, name: str, request: LeaseRequest | ReplaceRequest, **fields: Any) -> None:
    """Give a machine to the run of a request."""
    put(state, name, PoolPlace.ACTIVE, job=request.job, run=request.run, **fields)


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
    """Lease the machines that a job names: all of them, or none.

    Args:
        state: The state of the pool, changed in place.
        request: The request of the job.
        now_ns: The current time.
    """
    refused = taken_out(state, request)
    for machine in request.machines:
        known = state.machines.get(machine.name)
        if known is not None and (why := _why_refused(known, request.job)):
            refused[machine.name] = why
    if refused:
        waits = {PoolPlace.ACTIVE, *UNUSED}  # another job may end, and the next poll may report no fault
        return Leased(refused=refused, may_change=all(state.machines[name].place in waits for name in refused))
    add(state, request.machines, now_ns=now_ns)
    for machine in request.machines:
        known = state.machines[machine.name]
        if (known.place, known.job, known.run) != (PoolPlace.ACTIVE, request.job, request.run):
            _activate(state, machine.name, request, now_ns=now_ns, by=f"job {request.job}")
    return Leased()


def taken_out(state: PoolState, request: LeaseRequest) -> dict[str, str]:
    """Return the requested machines that an operator evicts from an earlier run → the reason.

    The pool does not know yet that the earlier run has ended.
    """
    wanted = [state.machines[machine.name] for machine in request.machines if machine.name in state.machines]
    return {
        known.machine.name: f"evicted by {known.by}: {known.why}; {_release_hint(known)}"
        for known in wanted
        if known.wanted_out and known.run != request.run
    }


def _why_refused(known: PoolMachine, job: str) -> str:
    if known.place is PoolPlace.ACTIVE and known.job != job:  # only one job of a name runs
        return f"job {known.job} has it"
    if known.place in {PoolPlace.QUARANTINED, PoolPlace.CORDONED}:
        return f"it is {known.place}: {known.why}; {_release_hint(known)}"
    return f"it is faulty: {known.fault}" if known.place in UNUSED and known.fault else ""


def _release_hint(machine: PoolMachine) -> str:
    return f"'everstep release {machine.machine.name}' lets jobs have it"


def replace(state: PoolState, request: ReplaceRequest, *, now_ns: int) -> Replaced:
    """Evict machines of a job and replace all of them, or none.

    A repeated request gets the same answer, unless an operator has to approve the request.
    """
    if answered := state.replaced.get(request.id):
        return answered
    if held := breaker.tripped(state, request, now_ns=now_ns):
        return Replaced(why=held, held=held)
    chosen = choose(state.machines.values(), request)
    if len(chosen) < len(request.evict):
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
        _activate(state, name, request, now_ns=now_ns, by=request.id, why=f"it replaces {old}")
    return _answered(state, request, chosen, "", now_ns=now_ns)


def _answered(state: PoolState, request: ReplaceRequest, chosen: dict[str, str], why: str, *, now_ns: int) -> Replaced:
    """Evict the machines that leave; record and return the answer."""
    breaker.note(state, request, now_ns=now_ns)
    for eviction in request.evict:
        _evict(state, eviction, request, now_ns=now_ns)
    answer = Replaced(machines={old: state.machines[name].machine for old, name in chosen.items()}, why=why)
    state.replaced = dict([*state.replaced.items(), (request.id, answer)][-ANSWERS_KEPT:])
    return answer


def _can_go_back(state: PoolState, request: ReplaceRequest) -> bool:
    """Return whether each unfit replacement can leave again, and whether the machine that it replaced can return.

    The evicted machine must have left this job, and no job may have had it since.
    """
    away = {PoolPlace.QUARANTINED, PoolPlace.CORDONED}
    evicted = [state.machines.get(old) for old in request.back.values()]
    return request.back.keys() == {eviction.machine for eviction in request.evict} and all(
        old is not None and old.place in away and old.uncleaned and (old.job, old.run) == (request.job, request.run)
        for old in evicted
    )


def _go_back(state: PoolState, name: str, request: ReplaceRequest, why: str, *, now_ns: int) -> None:
    """Return an evicted machine to its job, whose ranks there were not stopped."""
    known = state.machines[name]
    _activate(
        state,
        name,
        request,
        now_ns=now_ns,
        by=request.id,
        why=f"it stays: {why}; {known.why}",
        wanted_out=known.place is PoolPlace.CORDONED,
        evicted_ns=known.evicted_ns[:-1],
    )
    # A poll may have reported the machine's ranks as a fault; now they belong there.
    state.machines[name] = state.machines[name].model_copy(update={"fault": ""})


def _evict(state: PoolState, eviction: Eviction, request: ReplaceRequest, *, now_ns: int) -> None:
    """Put a machine into quarantine, or cordon it if an operator evicted it."""
    known = state.machines.get(eviction.machine)
    if known is None:
        return
    put(
        state,
        eviction.machine,
        PoolPlace.CORDONED if known.wanted_out else PoolPlace.QUARANTINED,
        now_ns=now_ns,
        by=request.id,
        why=f"{eviction.reason}: {eviction.why}",
        job=request.job,
        run=request.run,
        uncleaned=True,
        until_released=eviction.rule in BY_NAME and BY_NAME[eviction.rule].until_released,
        evicted_ns=[*known.evicted_ns, now_ns][-EVICTIONS_KEPT:],
    )


def give_back(state: PoolState, request: GiveBack, *, now_ns: int) -> int:
    """Free all machines of a run that ended; return their number."""
    left = [
        name
        for name, known in state.machines.items()
        if known.place is PoolPlace.ACTIVE and (known.job, known.run) == (request.job, request.run)
    ]
    for name in left:
        free(state, name, now_ns=now_ns, by=f"job {request.job}", why="given back")
    return len(left)


def free(state: PoolState, name: str, *, now_ns: int, by: str, why: str) -> None:
    """Free a machine. It becomes a standby if it returns from repair and there are too few standbys. If an operator
    evicted it, it is cordoned."""
    known = state.machines[name]
    if known.wanted_out:
        put(state, name, PoolPlace.CORDONED, now_ns=now_ns, by=known.by, why=known.why)
        return
    repaired = known.place in {PoolPlace.QUARANTINED, PoolPlace.CORDONED}
    place = PoolPlace.STANDBY if repaired and _lacks_standbys(state) else PoolPlace.FREE
    put(state, name, place, now_ns=now_ns, by=by, why=why)


def _lacks_standbys(state: PoolState) -> bool:
    return sum(machine.place is PoolPlace.STANDBY for machine in state.machines.values()) < state.standbys


def operator_evicts(state: PoolState, move: OperatorMove, *, now_ns: int) -> str:
    """Keep a machine away from jobs; return the result for people, empty if the pool does not know the machine."""
    known = state.machines.get(move.machine)
    if known is None:
        return ""
    why = move.reason or "no reason was given"
    if known.place is PoolPlace.ACTIVE:
        state.machines[move.machine] = known.model_copy(update={"wanted_out": True, "by": move.operator, "why": why})
        return f"{move.machine} leaves job {known.job} once there is a replacement, and is then cordoned"
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
    """Let jobs have a machine again; return the result for people, empty if the pool does not know the machine."""
    known = state.machines.get(move.machine)
    if known is None:
        return ""
    if known.place is PoolPlace.ACTIVE:
        state.machines[move.machine] = known.model_copy(update={"wanted_out": False})
        return f"{move.machine} stays with job {known.job}"
    if known.place in IDLE:
        return f"{move.machine} is already {known.place}"
    if known.uncleaned and known.unlisted_ns and known.fault:
        del state.machines[move.machine]
        return f"{move.machine} does not answer and left the list of the cluster: it is forgotten"
    if known.uncleaned:
        return f"{move.machine} may still run ranks of job {known.job}, and does not answer: release it once it answers"
    free(state, move.machine, now_ns=now_ns, by=move.operator, why=move.reason or "released by an operator")
    state.machines[move.machine] = state.machines[move.machine].model_copy(update={"evicted_ns": [], "fault": ""})
    return f"{move.machine} is {state.machines[move.machine].place}"
