"""The invariants at every gate, whatever struck before it: one small function each. Pure.

Each takes the observations at this gate and earlier ones, and returns the violations as text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from drills.faults.updates import Update
from drills.judge.evictions import over_evicted
from drills.spec.loss import Promise
from drills.spec.request import DrillRequest
from drills.verdict import MAX_BLIND_S, MAX_LOST
from everstep.decisions.act.versions.book import WAITS
from everstep.model.incident import Symptom
from everstep.model.job import JobSpec
from everstep.model.version import VersionStatus
from soaks.look import ClusterProcess, GateLook, census
from soaks.machines import leased_twice, lost
from soaks.plan import GAP

WARM_UP = 3
"""Number of gates for warm-up: memory and descriptors of a process are measured after them."""
GROWTH = 1.5
"""A process may grow to this many times its memory, since caches fill up; or, if that is more, …"""
GROWTH_MB = {"temporal": 400.0}
"""… by this many MB, by name, …"""
GROWTH_MB_OTHER = 60.0
"""… and by this many MB for any other name."""
MORE_DESCRIPTORS = 24
"""A process may hold this many more descriptors than before, since connections change."""
MORE_FILES = 6
"""So many files of one name, numbers left aside, may lie in shared memory: reports of generations that are about to be
cleared, what two fork servers keep."""
MAX_EVENTS = 10_240
"""Events of a job's history: from there on Temporal warns (reference of the server's limits)."""
FORK_SERVERS = 2
"""Fork servers of one machine: that of the job, and one that waits for the next job."""


ProcessAs = tuple[int, str, str]
"""Pid and name of a process; of an agent, whose its machine is as well: a standby's needs less than a job's."""


@dataclass(slots=True)
class Baseline:
    """Measurements at earlier gates."""

    memory_mb: dict[ProcessAs, tuple[int, float]] = field(default_factory=dict)
    """Number of samples, and its memory after warm-up, MB."""
    descriptors: dict[ProcessAs, int] = field(default_factory=dict)
    unheld: set[str] | None = None
    """Semaphores and buffers that no process held at the first gate: they belong to other programs."""


@dataclass(frozen=True, slots=True)
class Struck:
    """The faults between two gates."""

    requests: Sequence[DrillRequest] = ()
    promises: Sequence[Promise] = ()
    """Most steps that the strikes may cost, by the placement or by the copies that were left."""
    gate: int = 0
    """Step of the last gate: no fault may cost more than the way back to it."""
    gone: Sequence[str] = ()
    """Machines that were lost for good: each of them must leave its job."""
    away: Sequence[str] = ()
    """Machines that may have to leave: they were away for long, or have ranks that hang."""
    others_gone: Sequence[str] = ()
    """Machines of the second job that were lost for good at the same time."""
    behind: bool = False
    """At the gate before, machines backed up named steps only: those since the last one may be lost."""


Invariant = Callable[[GateLook, Struck, JobSpec, Baseline], list[str]]


def stands_at_the_gate(seen: GateLook, struck: Struck, spec: JobSpec, known: Baseline) -> list[str]:
    """All ranks are at the gate's step, and no further."""
    return [] if seen.newest == seen.step else [f"the job stands at step {seen.step} and its memory has {seen.newest}"]


def losses_are_equal(seen: GateLook, struck: Struck, spec: JobSpec, known: Baseline) -> list[str]:
    """Every loss equals that of the run without faults, bit for bit, and none is missing."""
    if seen.comparison is None or seen.comparison.losses is None:
        return ["no loss could be compared"]
    return seen.comparison.losses[:5]


def one_copy_of_a_rank(seen: GateLook, struck: Struck, spec: JobSpec, known: Baseline) -> list[str]:
    """No rank ever lives twice, and checks for it were made."""
    found = [f"{seen.copies} ranks had two copies"] if seen.copies else []
    if seen.blind_s > MAX_BLIND_S:
        found.append(f"nobody looked for two copies of a rank for {seen.blind_s:.1f} s")
    return found


def processes_are_those_of_the_job(seen: GateLook, struck: Struck, spec: JobSpec, known: Baseline) -> list[str]:
    """One process for each rank, one store, no fork server too many, and no unknown process."""
    by_name = census(seen.processes)
    world = spec.topology().world_size + seen.beside
    found = [f"a process of nobody: {name}" for name in by_name if name.startswith("unknown")]
    if len(by_name.get("rank", [])) != world:
        found.append(f"{len(by_name.get('rank', []))} processes of {world} ranks")
    if len(by_name.get("store", [])) > 1 + bool(seen.beside):
        found.append(f"{len(by_name['store'])} rendezvous stores")
    agents = sum(name.startswith("agent-") for name in by_name)
    if len(by_name.get("fork server", [])) > FORK_SERVERS * agents:
        found.append(f"{len(by_name['fork server'])} fork servers of {agents} agents")
    return found


def shared_memory_does_not_fill_up(seen: GateLook, struck: Struck, spec: JobSpec, known: Baseline) -> list[str]:
    """No file there has many versions."""
    return [f"{count} files {name} in shared memory" for name, count in seen.files.items() if count > MORE_FILES]


def no_semaphore_is_left(seen: GateLook, struck: Struck, spec: JobSpec, known: Baseline) -> list[str]:
    """No semaphore and no buffer between processes is left in /dev/shm by processes that are gone."""
    before = seen.unheld if known.unheld is None else known.unheld
    return [f"nobody holds {path}" for path in sorted(seen.unheld - before)]


def disk_does_not_fill_up(seen: GateLook, struck: Struck, spec: JobSpec, known: Baseline) -> list[str]:
    """No more checkpoints than are to be kept, and those since the gate before: what one machine could not write while
    its agent was away is whole nowhere, and goes once there is a later one. No file system is left mounted."""
    found = [f"{path} is left mounted" for path in seen.mounts]
    every = spec.checkpoint.disk_every_steps
    most = spec.checkpoint.disk_keep + 1 + (GAP // every if every else 0)
    return [*found, f"{seen.disk_folders} checkpoints on disk"] if seen.disk_folders > most else found


def what_was_struck_is_back(seen: GateLook, struck: Struck, spec: JobSpec, known: Baseline) -> list[str]:
    """Killed parts that are no ranks run again, and events of copies were reported."""
    return list(seen.untold)


def copies_are_where_they_belong(seen: GateLook, struck: Struck, spec: JobSpec, known: Baseline) -> list[str]:
    """Every rank's step is in its own memory, at its peer and on disk, as the placement promises."""
    return [seen.unsettled] if seen.unsettled else []


def incidents_are_few_and_closed(seen: GateLook, struck: Struck, spec: JobSpec, known: Baseline) -> list[str]:
    """One incident for each fault that hurts ranks, or fewer, and all of them over and recovered."""
    most = sum(request.fault.incidents_in_soaks for request in struck.requests)
    found = [f"{len(seen.incidents)} incidents of {most} faults"] if len(seen.incidents) > most else []
    for incident in seen.incidents:
        if incident.report is None:
            found.append(f"{incident.id} is still open")
        elif not incident.report.recovered:
            found.append(f"{incident.id}: {incident.report.headline}")
    return found


def crashes_are_noticed_as_crashes(seen: GateLook, struck: Struck, spec: JobSpec, known: Baseline) -> list[str]:
    """The end of a rank is detected as such: without a fault that hangs, no incident reports a hang."""
    if any(request.opening.may_hang for request in struck.requests):
        return []
    return [
        f"{incident.id}: a hang was seen and nothing stood still"
        for incident in seen.incidents
        for failure in (incident.report.failures if incident.report else [])
        if failure.symptom is Symptom.HANG
    ]


def steps_lost_are_few(seen: GateLook, struck: Struck, spec: JobSpec, known: Baseline) -> list[str]:
    """No more steps are repeated than the remaining copies require."""
    found = []
    for incident in seen.incidents:
        if incident.report is None:
            continue  # it is still open, and called so
        lost = incident.report.lost_steps
        if lost is None:
            if not nobody_is_left(struck, spec, at_once=len(seen.incidents) == 1):
                found.append(f"{incident.id}: nobody knows how many steps were lost")
        elif lost > (most := may_cost(struck)):
            found.append(f"{incident.id}: {lost} steps lost, {most} would have done")
        if incident.report.resume_step < struck.gate:
            back = incident.report.resume_step
            found.append(f"{incident.id}: back to step {back}, before the gate at step {struck.gate}")
    told = sum(incident.report.lost_steps or 0 for incident in seen.incidents if incident.report)
    # The step under way may have been reported and not completed: one more for each failure.
    failures = sum(max(len(incident.report.failures), 1) for incident in seen.incidents if incident.report)
    known_all = all(incident.report and incident.report.lost_steps is not None for incident in seen.incidents)
    if known_all and (seen.redone is None or not told <= seen.redone <= told + failures):
        found.append(f"the incidents say {told} steps lost, the step records show {seen.redone} done again")
    return found


def nobody_is_left(struck: Struck, spec: JobSpec, *, at_once: bool) -> bool:
    """Whether all machines lost their memory in one incident, so that the job's last step is not known."""
    lost = [set(request.opening.loss(spec).machines) for request in struck.requests]
    together = [set[int]().union(*lost)] if at_once else lost
    return any(len(machines) == spec.machines for machines in together)


def versions_are_what_ran(seen: GateLook, struck: Struck, spec: JobSpec, known: Baseline) -> list[str]:
    """Each step ran under the version that the job says, nothing waits any more, and no bad version is left."""
    found = list(seen.other_versions)
    found += [f"{one.name} is {one.status} at the gate" for one in seen.versions if one.status in WAITS]
    if struck.requests and struck.requests[0].fault.is_update and seen.versions:
        last, good = seen.versions[-1], isinstance(struck.requests[0].fault, Update)
        if (last.status is VersionStatus.RUNNING) is not good:
            found.append(f"after {struck.requests[0].fault.name} {last.name} is {last.status}: {last.why[:200]}")
    return found


def workflows_do_not_fail(seen: GateLook, struck: Struck, spec: JobSpec, known: Baseline) -> list[str]:
    """No workflow task failed: deaths of workers only cause timeouts, failures are defects of the code."""
    return list(seen.failed_tasks)


def histories_are_short(seen: GateLook, struck: Struck, spec: JobSpec, known: Baseline) -> list[str]:
    """The job's workflow continues as new in time."""
    return [f"{seen.history_events} events in the job's history"] if seen.history_events > MAX_EVENTS else []


def memory_is_flat(seen: GateLook, struck: Struck, spec: JobSpec, known: Baseline) -> list[str]:
    """No process that outlives the ranks keeps growing."""
    found = []
    for process in _lasting(seen):
        looks, before = known.memory_mb.get(_as(process, seen), (0, 0.0))
        most = max(before * GROWTH, before + GROWTH_MB.get(process.name, GROWTH_MB_OTHER))
        if looks > WARM_UP and process.memory_mb > most:
            found.append(f"{process.name} (pid {process.pid}) grew from {before:.0f} to {process.memory_mb:.0f} MB")
    return found


def descriptors_are_flat(seen: GateLook, struck: Struck, spec: JobSpec, known: Baseline) -> list[str]:
    """No process that outlives the ranks holds more and more files and sockets."""
    found = []
    for process in _lasting(seen):
        before = known.descriptors.get(_as(process, seen))
        if before is not None and process.descriptors > before + MORE_DESCRIPTORS:
            found.append(f"{process.name} (pid {process.pid}) holds {process.descriptors} descriptors, {before} before")
    return found


def status_is_true(seen: GateLook, struck: Struck, spec: JobSpec, known: Baseline) -> list[str]:
    """The answer of ``everstep status`` matches the observations."""
    if seen.report is None:
        return [f"nobody says how the job stands: {seen.silent}"]
    said, found = seen.report, []
    if said.status != "running":
        found.append(f"status says {said.status}")
    if said.step != seen.step:
        found.append(f"status says step {said.step}, the job stands at {seen.step}")
    if said.generation != seen.generation:
        found.append(f"status says generation {said.generation}, the ranks' newest is {seen.generation}")
    if said.open_incident is not None:
        found.append(f"status says that {said.open_incident.id} is open")
    if said.silent:
        found.append(f"status says that {', '.join(said.silent)} is silent")
    return found


def no_machine_is_leased_twice(seen: GateLook, struck: Struck, spec: JobSpec, known: Baseline) -> list[str]:
    """No machine ever has ranks of two jobs, no two jobs have the same one, and whose ranks are there has it."""
    shared = [f"{machine} had ranks of {' and '.join(jobs)} at the same time" for machine, jobs in seen.shared]
    return [*shared, *([seen.machines.unknown] if seen.machines.unknown else leased_twice(seen.machines))]


def no_machine_is_lost(seen: GateLook, struck: Struck, spec: JobSpec, known: Baseline) -> list[str]:
    """Each machine belongs to a job, is spare, or has just left a job."""
    out = [*struck.gone, *struck.away, *struck.others_gone, *_over_evicted(seen, struck)]
    return [] if seen.machines.unknown else lost(seen.machines, out)


def _over_evicted(seen: GateLook, struck: Struck) -> list[str]:
    reports = [incident.report for incident in seen.incidents if incident.report]
    return over_evicted(reports, [*struck.gone, *struck.away])


def the_right_machines_left(seen: GateLook, struck: Struck, spec: JobSpec, known: Baseline) -> list[str]:
    """Machines lost for good left the job, and no other machine did except by over-eviction."""
    left = {name for incident in seen.incidents if incident.report for name in incident.report.evicted}
    has = seen.machines.jobs.get(spec.name, [])
    found = [f"{name} is gone, and the job has it still" for name in struck.gone if name in has]
    healthy = sorted(left - {*struck.gone, *struck.away, *_over_evicted(seen, struck)})
    return [*found, *(f"{name} left the job, and nothing is wrong with it" for name in healthy)]


def the_other_job_goes_on(seen: GateLook, struck: Struck, spec: JobSpec, known: Baseline) -> list[str]:
    """The second job runs, undisturbed by the faults of the soak's job."""
    return list(seen.other)


INVARIANTS: tuple[Invariant, ...] = (
    stands_at_the_gate,
    losses_are_equal,
    one_copy_of_a_rank,
    processes_are_those_of_the_job,
    shared_memory_does_not_fill_up,
    no_semaphore_is_left,
    disk_does_not_fill_up,
    what_was_struck_is_back,
    copies_are_where_they_belong,
    incidents_are_few_and_closed,
    crashes_are_noticed_as_crashes,
    steps_lost_are_few,
    versions_are_what_ran,
    workflows_do_not_fail,
    histories_are_short,
    memory_is_flat,
    descriptors_are_flat,
    status_is_true,
    no_machine_is_leased_twice,
    no_machine_is_lost,
    the_right_machines_left,
    the_other_job_goes_on,
)


def violations(seen: GateLook, struck: Struck, spec: JobSpec, known: Baseline) -> list[str]:
    """All violations, each with the name of its invariant."""
    return [
        f"{invariant.__name__.replace('_', ' ')}: {text}"
        for invariant in INVARIANTS
        for text in invariant(seen, struck, spec, known)
    ]


def learn(seen: GateLook, known: Baseline) -> None:
    """Record the observations for later gates."""
    if known.unheld is None:
        known.unheld = seen.unheld
    for process in _lasting(seen):
        looks, before = known.memory_mb.get(_as(process, seen), (0, 0.0))
        known.memory_mb[_as(process, seen)] = (looks + 1, process.memory_mb if looks < WARM_UP else before)
        if looks < WARM_UP:
            known.descriptors[_as(process, seen)] = process.descriptors


def _as(process: ClusterProcess, seen: GateLook) -> ProcessAs:
    return process.pid, process.name, seen.machines.pool.get(process.name.removeprefix("agent-"), "")


def _lasting(seen: GateLook) -> list[ClusterProcess]:
    return [process for process in seen.processes if process.name not in ("rank", "store", "of the ledger", "gone")]


def may_cost(struck: Struck) -> int:
    """Most steps that an incident may lose; without a promise, all steps since the last gate."""
    if struck.behind:
        return GAP
    promised = [promise.steps for promise in struck.promises]
    known = [promise for promise in promised if promise is not None]
    if len(known) < len(promised) or (len(struck.requests) > 1 and not _independent(struck)):
        return GAP
    return max([MAX_LOST, *known])


def _independent(struck: Struck) -> bool:
    """Whether of two faults one takes no copies, and none that the other one needs: owner and peer may be struck, or
    the agent that was to back up what is lost."""
    takes = [request for request in struck.requests if request.fault.takes_machines]
    holds_up = [request for request in struck.requests if request.fault.holds_up_backups]
    return not takes or len(takes) + len(holds_up) == 1
