"""The changes to the pool after an inspection of its machines and of the running jobs.

A fact that the inspection could not learn changes nothing: unknown is not empty.
"""

from __future__ import annotations

from everstep.decisions.pool.book import IDLE, TWICE_S, UNUSED, add, free, put
from everstep.model.pool import PollAnswers, PollQuestions, PoolMachine, PoolPlace, PoolState, RunningJob, ToClean

COMING_S = 900.0
"""A machine that was added to the list and is not fit after this many seconds is not expected any more."""

AWAITED_S = 600.0
"""A job that waits for machines this long waits on, and its machines are looked for less often."""


def wanted(state: PoolState, *, now_ns: int) -> int:
    """Return how many machines the list of the cluster should have; 0: it has enough, or cannot have more.

    It is the number of all machines, not of new machines: asking twice adds no more machines than asking once.

    Args:
        state: The state of the pool.
        now_ns: The current time.
    """
    machines = state.machines.values()
    idle = sum(machine.place in IDLE for machine in machines)
    needed = sum(short.machines for short in state.short.values())
    lacking = max(needed - state.spare, state.standbys - idle) - coming(state, now_ns=now_ns)
    total = min(state.listed + lacking, state.at_most)
    return total if total > state.listed else 0


def coming(state: PoolState, *, now_ns: int) -> int:
    """New machines that should be fit soon."""
    new = [machine for machine in state.machines.values() if machine.place is PoolPlace.PROVISIONING]
    return sum(now_ns - one.since_ns < COMING_S * 1e9 for one in new)


def is_awaited(state: PoolState, *, now_ns: int) -> bool:
    """Return whether a job waits for machines that may be available soon: new machines, or others since it asked
    lately."""
    lately = any(now_ns - short.asked_ns < AWAITED_S * 1e9 for short in state.short.values())
    return lately or bool(state.short and coming(state, now_ns=now_ns))


GRACE_S = 60.0
"""A machine that its job does not name yet stays with it so long."""
LOOKS = 2
"""The number of inspections in a row that must agree that a job does not have a machine."""
QUARANTINE_S = 600.0
"""An evicted machine is tested at least this long."""
PASSES = 3
"""The number of inspections in a row that an evicted machine must pass."""
FORGOTTEN_S = TWICE_S
"""A machine in quarantine that is out of the list, and of no use, is forgotten after this time: its evictions
count no longer then."""
CLEANED_S = 120.0
"""A machine that left its job with ranks that could not be ended may answer soon: it is asked often for so long."""
UNKNOWN_LOOKS = 3
"""The number of inspections after which jobs get machines although a running job has not reported its machines."""


def request_of(state: PoolState) -> PollQuestions:
    """Return the request for an inspection."""
    rest = [machine for machine in state.machines.values() if machine.place is not PoolPlace.ACTIVE]
    return PollQuestions(
        fresh=not state.known,
        idle=[one.machine for one in rest],
        clean=[ToClean(machine=one.machine, job=one.job, run=one.run) for one in rest if one.uncleaned],
        leased=sorted(
            {
                machine.job
                for machine in state.machines.values()
                if machine.place is PoolPlace.ACTIVE or machine.uncleaned
            }
        ),
    )


def is_to_be_cleaned(state: PoolState, *, now_ns: int) -> bool:
    """Return whether a machine that may still have ranks of the job that it left a moment ago may answer soon."""
    return any(machine.uncleaned and now_ns - machine.since_ns < CLEANED_S * 1e9 for machine in state.machines.values())


def leaving(state: PoolState, looked: PollAnswers) -> list[PoolMachine]:
    """Return the machines that jobs should release now: machines that an operator removes, as far as the pool can
    replace them.

    Machines of a job that starts, or is in an incident, are left out; machines of a job without a reported state are
    last.
    """
    settled = {job.job: job.settled for job in looked.jobs}
    wanted = [
        machine for machine in state.machines.values() if machine.wanted_out and machine.place is PoolPlace.ACTIVE
    ]
    ready = [one for one in wanted if settled.get(one.job, True)]
    return sorted(ready, key=lambda one: one.job not in settled)[: state.spare]


def changed_in_list(state: PoolState, looked: PollAnswers) -> list[str]:
    """Return the known machines that left the list of the cluster, or returned to it, since the inspection before."""
    if looked.machines is None:
        return []
    listed = {machine.name for machine in looked.machines}
    return [name for name, one in state.machines.items() if (name in listed) == bool(one.unlisted_ns)]


def take(
    state: PoolState,
    looked: PollAnswers,
    *,
    began_ns: int,
    now_ns: int,
    quarantine_s: float = QUARANTINE_S,
) -> None:
    """Update the book with an inspection.

    Args:
        state: The state of the pool, changed in place.
        looked: The result of the inspection.
        began_ns: When the inspection began, by the same clock as ``now_ns``: later changes are newer than its result.
        now_ns: The current time.
        quarantine_s: An evicted machine is tested at least this long, seconds.
    """
    state.problem = looked.problem
    for name in changed_in_list(state, looked):
        one = state.machines[name]
        state.machines[name] = one.model_copy(update={"unlisted_ns": 0 if one.unlisted_ns else began_ns})
    if not state.known:  # all machines were asked
        _take_machines(state, looked, began_ns)
    _take_health(state, looked, began_ns)
    if state.known:  # A machine that was added to the list since the inspection before was not asked yet.
        _take_machines(state, looked, began_ns)
    _take_jobs(state, looked, began_ns, now_ns=now_ns)
    if not state.known:
        state.looks += looked.listed
        state.known = looked.listed and (not looked.unknown or state.looks >= UNKNOWN_LOOKS)
    for name in [name for name, one in state.machines.items() if _is_well(one, now_ns, quarantine_s)]:
        free(state, name, now_ns=now_ns, by="pool", why=f"{PASSES} looks found nothing against it")
    for name in [name for name, one in state.machines.items() if _is_gone(one, looked, now_ns)]:
        del state.machines[name]


def _take_machines(state: PoolState, looked: PollAnswers, began_ns: int) -> None:
    """Add new machines, as of the begin of the inspection: a machine with a job's ranks belongs to that job."""
    if looked.machines is None:
        return
    state.standbys, state.listed, state.at_most = looked.standbys, len(looked.machines), looked.at_most
    names = [machine.name for machine in looked.machines]
    new = {name for name in names if name not in state.machines}
    add(state, looked.machines, now_ns=began_ns)
    last = names[len(names) - looked.standbys :]
    for name in new if state.known else ():
        put(state, name, PoolPlace.PROVISIONING, now_ns=began_ns, by="pool", why="it is new")
    for name in _fit(state) if state.known else new:
        if name in last:
            put(state, name, PoolPlace.STANDBY, now_ns=began_ns, by="pool", why="it is one of the last in the list")
        elif state.known:
            put(state, name, PoolPlace.FREE, now_ns=began_ns, by="pool", why="it is new")
    standbys = [name for name, one in state.machines.items() if one.place is PoolPlace.STANDBY]
    for name in sorted(standbys, key=lambda name: name in last)[: max(len(standbys) - looked.standbys, 0)]:
        put(state, name, PoolPlace.FREE, now_ns=began_ns, by="pool", why="there are enough standbys")
    for name in [name for name, one in state.machines.items() if name not in names and one.place in UNUSED]:
        del state.machines[name]


def _fit(state: PoolState) -> list[str]:
    """Return the new machines that were inspected as fit since they were added."""
    coming = [name for name, one in state.machines.items() if one.place is PoolPlace.PROVISIONING]
    return [name for name in coming if state.machines[name].passed and not state.machines[name].fault]


def _take_health(state: PoolState, looked: PollAnswers, began_ns: int) -> None:
    for name, one in state.machines.items():
        if one.place is PoolPlace.ACTIVE or one.since_ns > began_ns:
            continue
        fault = looked.faults.get(name, "")
        passed = 0 if fault else one.passed + 1
        uncleaned = one.uncleaned and name not in looked.cleaned
        state.machines[name] = one.model_copy(update={"fault": fault, "passed": passed, "uncleaned": uncleaned})


def _take_jobs(state: PoolState, looked: PollAnswers, began_ns: int, *, now_ns: int) -> None:
    for job in looked.jobs:
        if job.launched:
            _take_found(state, job, began_ns, now_ns=now_ns)
    for name in [*looked.over, *(job.job for job in looked.jobs if job.settled)]:
        if name in state.short and state.short[name].asked_ns <= began_ns:
            del state.short[name]
    running = {(job.job, job.run): {machine.name for machine in job.machines} for job in looked.jobs}
    named = {job.job: job.settled for job in looked.jobs}
    for name, one in list(state.machines.items()):
        if one.place is not PoolPlace.ACTIVE or one.since_ns > began_ns:
            continue
        newer = one.job in named and (one.job, one.run) not in running
        if one.job in looked.over or newer:
            free(state, name, now_ns=now_ns, by="pool", why=f"job {one.job} is over")
        elif named.get(one.job) and name not in running[one.job, one.run]:
            _take_absence(state, name, now_ns=now_ns)
        elif one.absent:
            state.machines[name] = one.model_copy(update={"absent": 0})


def _take_found(state: PoolState, job: RunningJob, began_ns: int, *, now_ns: int) -> None:
    """Add machines on which a job runs and that the book does not have: the job began before there was a pool."""
    add(state, [machine for machine in job.machines if machine.name not in state.machines], now_ns=began_ns)
    for machine in job.machines:
        one = state.machines[machine.name]
        if one.place in UNUSED and one.since_ns <= began_ns:
            put(
                state,
                machine.name,
                PoolPlace.ACTIVE,
                now_ns=now_ns,
                by="pool",
                why="the job runs there",
                job=job.job,
                run=job.run,
            )


def _take_absence(state: PoolState, name: str, *, now_ns: int) -> None:
    """Count a machine as absent from its job, which is in no incident and does not report it; the report may just be
    late.

    An incident may hold a machine for a long time before the job has it, since it waits for ranks that die slowly.
    """
    one = state.machines[name]
    if now_ns - one.since_ns < GRACE_S * 1e9:
        return
    if one.absent + 1 < LOOKS:
        state.machines[name] = one.model_copy(update={"absent": one.absent + 1})
    else:
        free(state, name, now_ns=now_ns, by="pool", why=f"job {one.job} does not have it any more")


def _is_well(one: PoolMachine, now_ns: int, quarantine_s: float) -> bool:
    """Return whether a machine may leave quarantine by itself. A repeat offender may not, nor a machine that
    inspections cannot judge."""
    if one.place is not PoolPlace.QUARANTINED or one.uncleaned or one.fault or one.passed < PASSES:
        return False
    if one.until_released:
        return False
    lately = [time_ns for time_ns in one.evicted_ns if now_ns - time_ns < TWICE_S * 1e9]
    return len(lately) < 2 and now_ns - one.since_ns >= quarantine_s * 1e9


def _is_gone(one: PoolMachine, looked: PollAnswers, now_ns: int) -> bool:
    """Return whether a machine in quarantine will not return: it was removed from the list, and has been faulty since.

    A machine that waits for an operator keeps waiting, and a machine that may have ranks of its job is cleaned as long
    as the job runs.
    """
    if one.place is not PoolPlace.QUARANTINED or one.until_released or not (one.unlisted_ns and one.fault):
        return False
    newer = any(job.job == one.job and job.run != one.run for job in looked.jobs)
    if one.uncleaned and not (newer or one.job in looked.over):
        return False
    return now_ns - max(one.since_ns, one.unlisted_ns) >= FORGOTTEN_S * 1e9
