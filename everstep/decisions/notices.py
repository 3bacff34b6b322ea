"""Makes the notices that tell receivers about events of incidents, of jobs and of the machine pool.

The id of an event does not depend on who sees it, or when. So an event that is seen twice leads to one notice.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from everstep.base.text import cut, listed
from everstep.model.notice import Notice, NoticeKind, stamp
from everstep.model.pool import PoolMachine, PoolPlace, PoolState
from everstep.model.save_pace import SavePace
from everstep.model.stage import CurrentStage, Stage

LATE_S = 6 * 3600.0
"""An event that is older than this, seconds, leads to no notice. Otherwise a worker that gets its first receiver would
send a notice of everything that ever happened."""
TWICE_S = 24 * 3600.0
"""A machine that is evicted again within this time, seconds, leads to a notice."""
SPARE = {PoolPlace.STANDBY, PoolPlace.FREE}
TEXT_CHARACTERS = 500
"""The number of characters after which a notice's text is cut."""


@dataclass(frozen=True, slots=True)
class EndedJob:
    """A job whose workflow is over."""

    name: str
    run: str
    """The run id of its workflow."""
    ended_ns: int
    outcome: str = ""
    """``finished``, ``failed`` or ``stopped``; empty: the workflow left no result."""
    headline: str = ""
    closed_as: str = ""
    """How a workflow without a result ended, e.g. ``it was terminated``."""


def incident_notices(incident: str, current: CurrentStage) -> list[Notice]:
    """Return the notices of an incident: it is parked, or its breaker tripped.

    Args:
        incident: Id of its workflow.
        current: Its answer to the query ``stage``.
    """
    job, notices = current.job, []
    if current.name == Stage.PARKED:
        parked = f"job {job} is parked: "
        commands = f"; once the cause is repaired: everstep resume {job}; to give it up: everstep abandon {job}"
        text = parked + _cut(current.found, TEXT_CHARACTERS - len(parked) - len(commands)) + commands
        since_ns = current.since_ns
        notices.append(_notice(NoticeKind.PARKED, f"{incident}/{stamp(since_ns)}", text, since_ns))
    if current.tripped:
        text = f"job {job}: {current.tripped}"
        opened_ns = current.opened_ns
        notices.append(_notice(NoticeKind.BREAKER_TRIPPED, f"{incident}/{stamp(opened_ns)}", text, opened_ns))
    origin = {"job": job, "incident": incident, "machines": current.machines}
    return [notice.model_copy(update=origin) for notice in notices]


def ended_job_notices(job: EndedJob, now_ns: int) -> list[Notice]:
    """Return the notice of a job that failed or was closed from outside; none if it finished or was stopped."""
    if now_ns - job.ended_ns > LATE_S * 1e9:
        return []
    if job.outcome:
        text = f"job failed: {job.headline}" if job.outcome == "failed" else ""
    else:
        text = f"job {job.name} is over, and its workflow left no result: {job.closed_as}" if job.closed_as else ""
    if not text:
        return []
    notice = _notice(NoticeKind.JOB_FAILED, f"{job.name}/{job.run}", text, job.ended_ns)
    return [notice.model_copy(update={"job": job.name})]


@dataclass(frozen=True, slots=True)
class PacedJob:
    """A job all of whose ranks save at the same pace."""

    name: str
    generation: int
    pace: SavePace
    save_s: float
    """Time of a save of its slowest rank, seconds."""
    step_s: float
    """Time of a step of that rank without saves, seconds."""


def saves_changed_notices(job: PacedJob, now_ns: int) -> list[Notice]:
    """Return the notice of a job that saves after another number of steps than when its generation began."""
    if not job.pace.number or job.pace.waits:
        return []
    often = "every step" if job.pace.every == 1 else f"every {job.pace.every} steps"
    text = (
        f"job {job.name} now saves {often}: a save takes {job.save_s:.2g} s, a step {job.step_s:.2g} s; a fault costs "
        f"at most {2 * job.pace.every} steps"
    )
    event = f"{job.name}/{job.generation}-{job.pace.number}"
    return [_notice(NoticeKind.SAVES_CHANGED, event, text, now_ns).model_copy(update={"job": job.name})]


def pool_notices(pool: PoolState, now_ns: int) -> list[Notice]:
    """Return the notices of a cluster's machines: too few standbys, and machines that were evicted twice.

    A shortage has to last before it is sent (:func:`lasting_notices`).
    """
    if not pool.known:
        return []
    return [*_shortage(pool, now_ns), *_evicted_twice(pool.machines.values(), now_ns)]


def lasting_notices(
    before: Mapping[str, float], seen: Iterable[Notice], now_s: float, for_s: float
) -> tuple[dict[str, float], list[Notice]]:
    """Return the notices to send now: all except shortages of machines that have not lasted long enough.

    Args:
        before: Id of each shortage at the last call → when it began, by the same clock as ``now_s``.
        seen: The notices of the pool's state now.
        now_s: The current time, seconds.
        for_s: How long a shortage has to last, seconds.

    Returns:
        The shortages for the next call, as ``before``; and the notices to send.
    """
    seen = list(seen)
    short = {notice.id for notice in seen if notice.kind in {NoticeKind.POOL_SHORT, NoticeKind.POOL_EMPTY}}
    since = {id: before.get(id, now_s) for id in short}
    return since, [notice for notice in seen if notice.id not in since or now_s - since[notice.id] >= for_s]


def _shortage(pool: PoolState, now_ns: int) -> list[Notice]:
    """Return the notice of a shortage. Its id has the time of the latest loss: another loss leads to another notice."""
    if pool.spare >= pool.standbys:
        return []
    unused = [machine for machine in pool.machines.values() if machine.place is not PoolPlace.ACTIVE]
    away = [machine for machine in unused if machine.fault or machine.place not in SPARE]
    since_ns = max((machine.since_ns for machine in away), default=0)
    named = listed(
        sorted(f"{machine.machine.name} ({machine.fault or machine.why or machine.place})" for machine in away), 4
    )
    missing = f"; not usable: {named}" if named else "; all others have jobs"
    kind = NoticeKind.POOL_SHORT if pool.spare else NoticeKind.POOL_EMPTY
    text = f"{pool.spare or 'none'} of {pool.standbys} standbys can replace a machine{missing}"
    notice = _notice(kind, stamp(since_ns), text, since_ns or now_ns)
    return [notice.model_copy(update={"machines": sorted(machine.machine.name for machine in away)})]


def _evicted_twice(machines: Iterable[PoolMachine], now_ns: int) -> list[Notice]:
    notices = []
    for machine in machines:
        newest_ns = max(machine.evicted_ns, default=0)
        times = sum(newest_ns - time_ns < TWICE_S * 1e9 for time_ns in machine.evicted_ns)
        if times < 2 or now_ns - newest_ns > LATE_S * 1e9:
            continue
        name = machine.machine.name
        text = f"{name} was evicted {times} times within {TWICE_S / 3600:g} h: {machine.why or 'see its incidents'}"
        notice = _notice(NoticeKind.EVICTED_TWICE, f"{name}/{stamp(newest_ns)}", text, newest_ns)
        notices.append(notice.model_copy(update={"machines": [name], "job": machine.job}))
    return notices


def _notice(kind: NoticeKind, event: str, text: str, time_ns: int) -> Notice:
    return Notice(kind=kind, id=f"{kind}/{event}", text=_cut(text, TEXT_CHARACTERS), time_ns=time_ns)


def _cut(text: str, most: int) -> str:
    return cut(" ".join(text.split()), most)
