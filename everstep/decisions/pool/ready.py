"""Which idle machines get the code of which jobs ahead, and whether a machine has the same libraries as a job's others.

ByteRobust keeps code and libraries of its standbys in place (section 6.2); for which jobs, and how many, is ours.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from everstep.model.pool import Looked, PoolPlace, PoolState, Readied, ReadyRequest


def differing(here: Mapping[str, str], elsewhere: Iterable[Mapping[str, str]]) -> str:
    """What a machine has in other versions than all the others, for people; empty: nothing, as far as it is known.

    Args:
        here: Its libraries, by name, with versions.
        elsewhere: Those of the others.
    """
    others = list(elsewhere)
    found = []
    for name, version in sorted(here.items()):
        versions = {other[name] for other in others if name in other}
        if versions and version not in versions:
            found.append(f"{name} {version} instead of {' or '.join(sorted(versions))}")
    return ", ".join(found)


KEPT = 8
"""Versions of which a machine's pool remembers that they are there: agents keep 20 snapshots."""
MACHINES = 16
"""Machines that get a version at a time; others follow with the next look."""
WHY_CHARACTERS = 200
"""What is found against a version on a machine is cut after so many characters."""


def wanted(state: PoolState, looked: Looked) -> list[ReadyRequest]:
    """What is to be brought where: versions that run undisturbed, to machines that are fit and that no job has.

    Each machine serves all jobs: beyond as many as are remembered, those whose jobs come first by name.

    Args:
        state: Of the pool, after the look.
        looked: What was found.
    """
    idle = [
        machine
        for machine in state.machines.values()
        if machine.place in {PoolPlace.STANDBY, PoolPlace.FREE} and not machine.fault and not machine.uncleaned
    ]
    idle.sort(key=lambda one: (one.place is not PoolPlace.STANDBY, one.machine.name))
    jobs = sorted((job for job in looked.jobs if job.version and job.settled), key=lambda job: job.job)[:KEPT]
    found = []
    for job in jobs:
        if lacking := [one.machine for one in idle if job.version not in one.ready][:MACHINES]:
            found.append(ReadyRequest(job=job.job, version=job.version, machines=lacking))
    return found


def take(state: PoolState, request: ReadyRequest, readied: Readied) -> None:
    """Note what is where now; ``state`` is changed in place."""
    for name, why in readied.machines.items():
        if one := state.machines.get(name):
            ready = {version: told for version, told in one.ready.items() if version != request.version}
            ready[request.version] = f"{request.job}: {why}"[:WHY_CHARACTERS] if why else ""
            state.machines[name] = one.model_copy(update={"ready": dict(list(ready.items())[-KEPT:])})


def failed(request: ReadyRequest, why: str) -> Readied:
    """What is noted where it could not be done at all: nobody tries it again and again."""
    return Readied(machines={machine.name: why for machine in request.machines})
