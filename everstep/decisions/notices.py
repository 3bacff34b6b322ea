"""Which events somebody is told of: facts of incidents, jobs and the pool of machines → notices.

An event has the same id whoever sees it and whenever: that is what makes one notice of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from everstep.base.text import cut, listed
from everstep.model.notice import Notice, NoticeKind, stamp
from everstep.model.pool import PoolMachine, PoolPlace, PoolState
from everstep.model.stage import CurrentStage, Stage

LATE_S = 6 * 3600.0
"""An event that was over longer ago is not told any more, seconds: a worker that is given receivers for the first time
would tell of all that ever happened."""
TWICE_S = 24 * 3600.0
"""A machine that is evicted again within this time is told of, seconds."""
SPARE = {PoolPlace.STANDBY, PoolPlace.FREE}
TEXT_CHARACTERS = 500
"""A notice's text is cut after so many characters."""


@dataclass(frozen=True, slots=True)
class EndedJob:
    """A job whose workflow is over."""

    name: str
    run: str
    """The run id of its workflow."""
    ended_ns: int
    outcome: str = ""
    """What the job says of its end: ``finished``, ``failed`` or ``stopped``; empty: it could say nothing."""
    headline: str = ""
    closed_as: str = ""
    """How the workflow ended where it could say nothing, e.g. ``it was terminated``."""


def of_incident(incident: str, at_hand: CurrentStage) -> list[Notice]:
    """What there is to tell of an incident.

    Args:
        incident: Id of its workflow.
        at_hand: Its answer to the query ``stage``.
    """
    job, found = at_hand.job, []
    if at_hand.name == Stage.PARKED:
        todo = f"once it is mended: everstep resume {job}; to give it up: everstep abandon {job}"
        text = f"job {job} is parked: {_cut(at_hand.found, TEXT_CHARACTERS - 150)}; {todo}"
        since_ns = at_hand.since_ns
        found.append(_notice(NoticeKind.PARKED, f"{incident}/{stamp(since_ns)}", text, since_ns))
    if at_hand.tripped:
        text = f"job {job}: {at_hand.tripped}"
        opened_ns = at_hand.opened_ns
        found.append(_notice(NoticeKind.BREAKER_TRIPPED, f"{incident}/{stamp(opened_ns)}", text, opened_ns))
    own = {"job": job, "incident": incident, "machines": at_hand.machines}
    return [notice.model_copy(update=own) for notice in found]


def of_ended_job(job: EndedJob, now_ns: int) -> list[Notice]:
    """What there is to tell of a job that is over: nothing where it finished, or somebody stopped it."""
    if now_ns - job.ended_ns > LATE_S * 1e9:
        return []
    if job.outcome:
        text = f"job failed: {job.headline}" if job.outcome == "failed" else ""
    else:
        text = f"job {job.name} is over, and its workflow could not say why: {job.closed_as}" if job.closed_as else ""
    if not text:
        return []
    notice = _notice(NoticeKind.JOB_FAILED, f"{job.name}/{job.run}", text, job.ended_ns)
    return [notice.model_copy(update={"job": job.name})]


def of_pool(pool: PoolState, now_ns: int) -> list[Notice]:
    """What there is to tell of a cluster's machines. A shortage is to last a while first (:func:`lasting`)."""
    if not pool.known:
        return []
    return [*_shortage(pool, now_ns), *_evicted_twice(pool.machines.values(), now_ns)]


def lasting(
    before: Mapping[str, float], seen: Iterable[Notice], now_s: float, for_s: float
) -> tuple[dict[str, float], list[Notice]]:
    """Which events are told now, where a shortage of machines has to last.

    Args:
        before: Shortage that was seen the last time → since when, by the same clock as ``now_s``.
        seen: What is seen now.
        now_s: The time, seconds.
        for_s: So long a shortage has to last, seconds.

    Returns:
        The shortages that are seen now, and since when; and what is to be told.
    """
    seen = list(seen)
    short = {one.id for one in seen if one.kind in {NoticeKind.POOL_SHORT, NoticeKind.POOL_EMPTY}}
    since = {id: before.get(id, now_s) for id in short}
    return since, [one for one in seen if one.id not in since or now_s - since[one.id] >= for_s]


def _shortage(pool: PoolState, now_ns: int) -> list[Notice]:
    """One event for each machine that went away last: while it lasts it is one, and a further machine is another."""
    if pool.spare >= pool.standbys:
        return []
    away = [
        machine
        for machine in pool.machines.values()
        if machine.place is not PoolPlace.ACTIVE and not _is_spare(machine)
    ]
    since_ns = max((machine.since_ns for machine in away), default=0)
    named = listed(
        sorted(f"{machine.machine.name} ({machine.fault or machine.why or machine.place})" for machine in away), 4
    )
    missing = f"; not usable: {named}" if named else "; all others have jobs"
    kind = NoticeKind.POOL_SHORT if pool.spare else NoticeKind.POOL_EMPTY
    count = f"{pool.spare} of {pool.standbys} machines" if pool.spare else f"none of {pool.standbys} machines"
    text = f"{count} that should be there can take the place of others{missing}"
    notice = _notice(kind, stamp(since_ns), text, since_ns or now_ns)
    return [notice.model_copy(update={"machines": sorted(machine.machine.name for machine in away)})]


def _evicted_twice(machines: Iterable[PoolMachine], now_ns: int) -> list[Notice]:
    found = []
    for machine in machines:
        newest_ns = max(machine.evicted_ns, default=0)
        times = sum(newest_ns - time_ns < TWICE_S * 1e9 for time_ns in machine.evicted_ns)
        if times < 2 or now_ns - newest_ns > LATE_S * 1e9:
            continue
        name = machine.machine.name
        text = f"{name} was evicted {times} times within {TWICE_S / 3600:g} h: {machine.why or 'see its incidents'}"
        notice = _notice(NoticeKind.EVICTED_TWICE, f"{name}/{stamp(newest_ns)}", text, newest_ns)
        found.append(notice.model_copy(update={"machines": [name], "job": machine.job}))
    return found


def _is_spare(one: PoolMachine) -> bool:
    return one.place in SPARE and not one.fault


def _notice(kind: NoticeKind, event: str, text: str, time_ns: int) -> Notice:
    return Notice(kind=kind, id=f"{kind}/{event}", text=_cut(text, TEXT_CHARACTERS), time_ns=time_ns)


def _cut(text: str, most: int) -> str:
    return cut(" ".join(text.split()), most)
