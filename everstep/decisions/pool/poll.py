"""Decides what the polls of the machine pool ask, and how the answers change the pool.

A question without an answer changes nothing.
"""

from __future__ import annotations

from everstep.decisions.pool.book import IDLE, TWICE_S, UNUSED, add, free, put
from everstep.decisions.pool.unchanged import digests
from everstep.model.pool import (
    RETURNS_KEPT,
    PollAnswers,
    PollQuestions,
    PoolMachine,
    PoolPlace,
    PoolReturn,
    PoolState,
    RunningJob,
    ToClean,
)

COMING_S = 900.0
"""A new machine in the list that is not fit after this many seconds is not expected any more."""

AWAITED_S = 600.0
"""While a job has waited for machines for less than this time, seconds, the pool polls often."""


def wanted(state: PoolState, *, now_ns: int) -> int:
    """Return how many machines the list of the cluster should have; 0: it has enough, or cannot have more.

    It is the number of all machines and not of new machines, so a repeated request adds no more machines.

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
    """Return the number of new machines that should be fit soon."""
    new = [machine for machine in state.machines.values() if machine.place is PoolPlace.PROVISIONING]
    return sum(now_ns - machine.since_ns < COMING_S * 1e9 for machine in new)


def is_awaited(state: PoolState, *, now_ns: int) -> bool:
    """Return whether a job waits for machines that it may get soon, since it asked a short time ago or new machines are
    coming."""
    lately = any(now_ns - short.asked_ns < AWAITED_S * 1e9 for short in state.short.values())
    return lately or bool(state.short and coming(state, now_ns=now_ns))


GRACE_S = 60.0
"""A machine that its job does not name stays with the job at least this long, seconds."""
ABSENT_POLLS = 2
"""A machine is freed after its job did not name it in this many polls in a row."""
QUARANTINE_S = 600.0
"""An evicted machine is tested at least this long, seconds."""
PASSES = 3
"""The number of polls in a row without a fault before an evicted machine may return."""
FORGOTTEN_S = TWICE_S
"""A machine in quarantine that left the list and has a fault is forgotten after this time, seconds: then its evictions
do not count any more."""
CLEANED_S = 120.0
"""A machine that left its job, perhaps with ranks, may answer soon: the pool polls often for this long, seconds."""
UNKNOWN_POLLS = 3
"""The number of polls after which jobs get machines although a running job has not reported its machines."""


def questions(state: PoolState, before: PollAnswers) -> PollQuestions:
    """Return the questions of the next poll.

    Args:
        state: The state of the pool.
        before: The complete answers to the previous poll; what is still the same is not sent again.
    """
    rest = [machine for machine in state.machines.values() if machine.place is not PoolPlace.ACTIVE]
    return PollQuestions(
        fresh=not state.known,
        before=digests(before),
        idle=[machine.machine for machine in rest],
        returned=state.returned,
        clean=[ToClean(machine=left.machine, job=left.job, run=left.run) for left in rest if left.uncleaned],
        leased=sorted(
            {
                machine.job
                for machine in state.machines.values()
                if machine.place is PoolPlace.ACTIVE or machine.uncleaned
            }
        ),
    )


def is_to_be_cleaned(state: PoolState, *, now_ns: int) -> bool:
    """Return whether a machine left its job a moment ago and may still have ranks of it."""
    return any(machine.uncleaned and now_ns - machine.since_ns < CLEANED_S * 1e9 for machine in state.machines.values())


def leaving(state: PoolState, answers: PollAnswers) -> list[PoolMachine]:
    """Return the machines that jobs should release now: machines that an operator evicts, if the pool can replace them.

    Machines of a job that starts or has an open incident are left out. Machines of a job whose state is not known come
    last.
    """
    settled = {job.job: job.settled for job in answers.jobs}
    evicted = [
        machine for machine in state.machines.values() if machine.wanted_out and machine.place is PoolPlace.ACTIVE
    ]
    ready = [machine for machine in evicted if settled.get(machine.job, True)]
    return sorted(ready, key=lambda machine: machine.job not in settled)[: state.spare]


def changed_in_list(state: PoolState, answers: PollAnswers) -> list[str]:
    """Return the known machines that left the list of the cluster, or returned to it, since the last poll."""
    if answers.machines is None:
        return []
    listed = {machine.name for machine in answers.machines}
    return [name for name, machine in state.machines.items() if (name in listed) == bool(machine.unlisted_ns)]


def apply(
    state: PoolState,
    answers: PollAnswers,
    *,
    began_ns: int,
    now_ns: int,
    quarantine_s: float = QUARANTINE_S,
) -> None:
    """Apply the answers of a poll to the pool.

    Args:
        state: The state of the pool, changed in place.
        answers: The answers of the poll.
        began_ns: When the poll began, by the same clock as ``now_ns``. Later changes of the pool are newer than the
            answers.
        now_ns: The current time.
        quarantine_s: How long an evicted machine is tested at least, seconds.
    """
    state.problem = answers.problem
    for name in changed_in_list(state, answers):
        machine = state.machines[name]
        state.machines[name] = machine.model_copy(update={"unlisted_ns": 0 if machine.unlisted_ns else began_ns})
    if not state.known:  # the first polls ask all machines, so their answers about health include new machines
        _apply_list(state, answers, began_ns)
    _apply_health(state, answers, began_ns)
    if state.known:  # a machine that is new in the list was not asked by this poll
        _apply_list(state, answers, began_ns)
    _apply_jobs(state, answers, began_ns, now_ns=now_ns)
    if not state.known:
        state.looks += answers.listed
        state.known = answers.listed and (not answers.unknown or state.looks >= UNKNOWN_POLLS)
    written = set(answers.written)
    state.returned = [one for one in state.returned if one not in written]
    for name in [name for name, machine in state.machines.items() if _may_return(machine, now_ns, quarantine_s)]:
        state.returned.append(PoolReturn(machine=name, job=state.machines[name].job, time_ns=now_ns))
        free(state, name, now_ns=now_ns, by="pool", why=f"{PASSES} polls reported no fault")
    state.returned = state.returned[-RETURNS_KEPT:]
    for name in [name for name, machine in state.machines.items() if _is_gone(machine, answers, now_ns)]:
        del state.machines[name]


def _apply_list(state: PoolState, answers: PollAnswers, began_ns: int) -> None:
    """Add and remove machines by the list of the cluster, and choose the standbys, as of the beginning of the poll."""
    if answers.machines is None:
        return
    state.standbys, state.listed, state.at_most = answers.standbys, len(answers.machines), answers.at_most
    names = dict.fromkeys(machine.name for machine in answers.machines)
    new = {name for name in names if name not in state.machines}
    add(state, answers.machines, now_ns=began_ns)
    last = {*[*names][len(names) - answers.standbys :]}
    for name in new if state.known else ():
        put(state, name, PoolPlace.PROVISIONING, now_ns=began_ns, by="pool", why="it is new")
    for name in _fit(state) if state.known else new:
        if name in last:
            put(state, name, PoolPlace.STANDBY, now_ns=began_ns, by="pool", why="it is one of the last in the list")
        elif state.known:
            put(state, name, PoolPlace.FREE, now_ns=began_ns, by="pool", why="it is new")
    standbys = [name for name, machine in state.machines.items() if machine.place is PoolPlace.STANDBY]
    for name in sorted(standbys, key=lambda name: name in last)[: max(len(standbys) - answers.standbys, 0)]:
        put(state, name, PoolPlace.FREE, now_ns=began_ns, by="pool", why="there are enough standbys")
    for name in [name for name, known in state.machines.items() if name not in names and known.place in UNUSED]:
        del state.machines[name]


def _fit(state: PoolState) -> list[str]:
    """Return the new machines that passed a poll since they were added."""
    new = [name for name, machine in state.machines.items() if machine.place is PoolPlace.PROVISIONING]
    return [name for name in new if state.machines[name].passed and not state.machines[name].fault]


def _apply_health(state: PoolState, answers: PollAnswers, began_ns: int) -> None:
    for name, machine in state.machines.items():
        if machine.place is PoolPlace.ACTIVE or machine.since_ns > began_ns:
            continue
        fault = answers.faults.get(name, "")
        passed = 0 if fault else machine.passed + 1
        uncleaned = machine.uncleaned and name not in answers.cleaned
        state.machines[name] = machine.model_copy(update={"fault": fault, "passed": passed, "uncleaned": uncleaned})


def _apply_jobs(state: PoolState, answers: PollAnswers, began_ns: int, *, now_ns: int) -> None:
    for job in answers.jobs:
        if job.launched:
            _add_used(state, job, began_ns, now_ns=now_ns)
    for name in [*answers.over, *(job.job for job in answers.jobs if job.settled)]:
        if name in state.short and state.short[name].asked_ns <= began_ns:
            del state.short[name]
    over = set(answers.over)
    running = {(job.job, job.run): {machine.name for machine in job.machines} for job in answers.jobs}
    settled = {job.job: job.settled for job in answers.jobs}
    for name, machine in list(state.machines.items()):
        if machine.place is not PoolPlace.ACTIVE or machine.since_ns > began_ns:
            continue
        newer_run = machine.job in settled and (machine.job, machine.run) not in running
        if machine.job in over or newer_run:
            free(state, name, now_ns=now_ns, by="pool", why=f"job {machine.job} is over")
        elif settled.get(machine.job) and name not in running[machine.job, machine.run]:
            _count_absence(state, name, now_ns=now_ns)
        elif machine.absent:
            state.machines[name] = machine.model_copy(update={"absent": 0})


def _add_used(state: PoolState, job: RunningJob, began_ns: int, *, now_ns: int) -> None:
    """Record that a job has the machines on which it runs, if it began before there was a pool."""
    add(state, [machine for machine in job.machines if machine.name not in state.machines], now_ns=began_ns)
    for name in [machine.name for machine in job.machines]:
        known = state.machines[name]
        if known.place in UNUSED and known.since_ns <= began_ns:
            fields = {"job": job.job, "run": job.run}
            put(state, name, PoolPlace.ACTIVE, now_ns=now_ns, by="pool", why="the job runs there", **fields)


def _count_absence(state: PoolState, name: str, *, now_ns: int) -> None:
    """Count that a job does not name a machine, and free the machine after several polls.

    Call this only if the job has no open incident. An incident may have a machine for a long time before the job names
    it, e.g. while the incident waits for ranks that end slowly.
    """
    machine = state.machines[name]
    if now_ns - machine.since_ns < GRACE_S * 1e9:
        return
    if machine.absent + 1 < ABSENT_POLLS:
        state.machines[name] = machine.model_copy(update={"absent": machine.absent + 1})
    else:
        free(state, name, now_ns=now_ns, by="pool", why=f"job {machine.job} does not have it any more")


def _may_return(machine: PoolMachine, now_ns: int, quarantine_s: float) -> bool:
    """Return whether a machine leaves quarantine without an operator.

    A machine stays in quarantine if it was evicted twice, or if no inspection can detect its fault.
    """
    if machine.place is not PoolPlace.QUARANTINED or machine.uncleaned or machine.fault or machine.passed < PASSES:
        return False
    if machine.until_released:
        return False
    lately = [time_ns for time_ns in machine.evicted_ns if now_ns - time_ns < TWICE_S * 1e9]
    return len(lately) < 2 and now_ns - machine.since_ns >= quarantine_s * 1e9


def _is_gone(machine: PoolMachine, answers: PollAnswers, now_ns: int) -> bool:
    """Return whether a machine in quarantine will not return: it left the list, and has a fault.

    A machine that waits for an operator is kept. A machine that may have ranks of its job is kept while the job runs.
    """
    if machine.place is not PoolPlace.QUARANTINED or machine.until_released:
        return False
    if not (machine.unlisted_ns and machine.fault):
        return False
    newer = any(job.job == machine.job and job.run != machine.run for job in answers.jobs)
    if machine.uncleaned and not (newer or machine.job in answers.over):
        return False
    return now_ns - max(machine.since_ns, machine.unlisted_ns) >= FORGOTTEN_S * 1e9
