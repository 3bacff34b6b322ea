"""Chooses the code versions that idle machines get in advance, and compares the libraries of machines.

ByteRobust keeps code and libraries ready on its standbys (section 6.2). It does not state for which jobs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from everstep.model.pool import PollAnswers, PoolPlace, PoolState, ReadyRequest, ReadyResult


def differing(here: Mapping[str, str], elsewhere: Iterable[Mapping[str, str]]) -> str:
    """Describe the libraries whose version on one machine differs from that on all other machines; empty: none.

    Args:
        here: Library of the machine → version.
        elsewhere: The libraries of each other machine.
    """
    others = list(elsewhere)
    differences = []
    for name, version in sorted(here.items()):
        versions = {other[name] for other in others if name in other}
        if versions and version not in versions:
            differences.append(f"{name} {version} instead of {' or '.join(sorted(versions))}")
    return ", ".join(differences)


KEPT = 8
"""The number of versions on a machine that the pool remembers; agents keep 20 snapshots."""
MACHINES = 16
"""The number of machines that get a version at a time; the others get it after the next poll."""
WHY_CHARACTERS = 200
"""The reason why a version cannot run on a machine is cut after this many characters."""


def wanted(state: PoolState, answers: PollAnswers) -> list[ReadyRequest]:
    """Return which versions to bring to which machines.

    The versions are those of jobs that run undisturbed. The machines are fit, and no job has them.

    Each machine serves all jobs; if there are more versions than a machine keeps, jobs that are first by name win.

    Args:
        state: The state of the pool after that poll.
        answers: The answers to the newest poll.
    """
    idle = [
        machine
        for machine in state.machines.values()
        if machine.place in {PoolPlace.STANDBY, PoolPlace.FREE} and not machine.fault and not machine.uncleaned
    ]
    idle.sort(key=lambda one: (one.place is not PoolPlace.STANDBY, one.machine.name))
    jobs = sorted((job for job in answers.jobs if job.version and job.settled), key=lambda job: job.job)[:KEPT]
    found = []
    for job in jobs:
        if lacking := [one.machine for one in idle if job.version not in one.ready][:MACHINES]:
            found.append(ReadyRequest(job=job.job, version=job.version, machines=lacking))
    return found


def apply(state: PoolState, request: ReadyRequest, result: ReadyResult) -> None:
    """Record which versions the machines have now; ``state`` is changed in place."""
    for name, why in result.machines.items():
        if machine := state.machines.get(name):
            ready = {version: failed for version, failed in machine.ready.items() if version != request.version}
            ready[request.version] = f"{request.job}: {why}"[:WHY_CHARACTERS] if why else ""
            state.machines[name] = machine.model_copy(update={"ready": dict(list(ready.items())[-KEPT:])})


def failed(request: ReadyRequest, why: str) -> ReadyResult:
    """Return the result of a request that failed on all machines, so that it is not repeated again and again."""
    return ReadyResult(machines={machine.name: why for machine in request.machines})
