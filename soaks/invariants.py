"""The invariants that hold at every gate of a soak, one function for each. Pure.

Each function returns the violations in words; the name of the function is the name of the invariant.
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
from soaks.machines import leased_twice, lost
from soaks.observe import ClusterProcess, GateObservations, by_name
from soaks.plan import GAP

WARM_UP = 3
"""Number of gates at which a process warms up; later, its memory and descriptors are compared with the last of
these."""
GROWTH = 1.5
"""A process may grow to this many times its memory, since caches fill up."""
GROWTH_MB = {"temporal": 400.0}
"""Name of a process → MB by which it may grow, if that is more than ``GROWTH`` allows."""
GROWTH_MB_OTHER = 60.0
"""MB by which any other process may grow, if that is more than ``GROWTH`` allows."""
MORE_DESCRIPTORS = 24
"""A process may have this many more descriptors than before, since connections change."""
MORE_FILES = 6
"""The largest number of files in shared memory whose names differ only in numbers: reports of old generations, and
files of two fork servers."""
MAX_EVENTS = 10_240
"""The largest number of events in a job's history; Temporal warns of longer histories."""
FORK_SERVERS = 2
"""The largest number of fork servers on a machine: that of the job, and one that waits for the next job."""
ProcessKey = tuple[int, str, str]
"""Pid and name of a process, and for an agent the job of its machine: the agent of a standby needs less memory."""


@dataclass(slots=True)
class Baseline:
    """Measurements at earlier gates."""

    memory_mb: dict[ProcessKey, tuple[int, float]] = field(default_factory=dict)
    """Process → number of its samples, and its memory after warm-up, MB."""
    descriptors: dict[ProcessKey, int] = field(default_factory=dict)
    unheld: set[str] | None = None
    """Semaphores and buffers of other programs: no process held them at the first gate."""


@dataclass(frozen=True, slots=True)
class Struck:
    """The faults between two gates."""

    requests: Sequence[DrillRequest] = ()
    promises: Sequence[Promise] = ()
    """The largest number of steps that each strike may cost."""
    gate: int = 0
    """Step of the last gate, before which the job must not resume."""
    gone: Sequence[str] = ()
    """Machines that were lost for good, and must leave the job."""
    away: Sequence[str] = ()
    """Machines that may leave the job: they were away for long, or have ranks that hang."""
    second_job_gone: Sequence[str] = ()
    """Machines of the second job that were lost for good."""
    behind: bool = False
    """Whether machines backed up only named steps at the last gate, so that the steps since then may be lost."""


Invariant = Callable[[GateObservations, Struck, JobSpec, Baseline], list[str]]


def all_ranks_are_at_the_gate(seen: GateObservations, struck: Struck, spec: JobSpec, baseline: Baseline) -> list[str]:
    """All ranks wait at the step of the gate."""
    return [] if seen.newest == seen.step else [f"the gate is at step {seen.step}, and a rank saved step {seen.newest}"]


def losses_are_equal(seen: GateObservations, struck: Struck, spec: JobSpec, baseline: Baseline) -> list[str]:
    """Every loss equals that of the run without faults, bit for bit, and no loss is missing."""
    if seen.comparison is None or seen.comparison.losses is None:
        return ["no loss could be compared"]
    return seen.comparison.losses[:5]


def one_copy_of_a_rank(seen: GateObservations, struck: Struck, spec: JobSpec, baseline: Baseline) -> list[str]:
    """No rank had two processes at once, according to frequent samples."""
    found = [f"{seen.copies} ranks had two processes at once"] if seen.copies else []
    if seen.blind_s > MAX_BLIND_S:
        found.append(f"the processes were not sampled for {seen.blind_s:.1f} s")
    return found


def processes_are_those_of_the_job(
    seen: GateObservations, struck: Struck, spec: JobSpec, baseline: Baseline
) -> list[str]:
    """There is one process for each rank, one store for each job, no needless fork server and no unknown process."""
    groups = by_name(seen.processes)
    world = spec.topology().world_size + seen.other_ranks
    found = [f"process {name}" for name in groups if name.startswith("unknown")]
    if len(groups.get("rank", [])) != world:
        found.append(f"{len(groups.get('rank', []))} processes of {world} ranks")
    if len(groups.get("store", [])) > 1 + bool(seen.other_ranks):
        found.append(f"{len(groups['store'])} rendezvous stores")
    agents = sum(name.startswith("agent-") for name in groups)
    if len(groups.get("fork server", [])) > FORK_SERVERS * agents:
        found.append(f"{len(groups['fork server'])} fork servers of {agents} agents")
    return found


def shared_memory_does_not_fill_up(
    seen: GateObservations, struck: Struck, spec: JobSpec, baseline: Baseline
) -> list[str]:
    """Shared memory has few files whose names differ only in numbers."""
    return [f"{count} files {name} in shared memory" for name, count in seen.files.items() if count > MORE_FILES]


def no_semaphore_is_left(seen: GateObservations, struck: Struck, spec: JobSpec, baseline: Baseline) -> list[str]:
    """No semaphore or shared buffer that no process holds is left in /dev/shm."""
    before = seen.unheld if baseline.unheld is None else baseline.unheld
    return [f"no process holds {path}" for path in sorted(seen.unheld - before)]


def disk_does_not_fill_up(seen: GateObservations, struck: Struck, spec: JobSpec, baseline: Baseline) -> list[str]:
    """There are only checkpoints that the policy keeps or that are newer than the last gate, and no mounted file
    system.

    A checkpoint that a machine could not write is incomplete, and is removed only after a later complete one.
    """
    found = [f"{path} is left mounted" for path in seen.mounts]
    every = spec.checkpoint.disk_every_steps
    most = spec.checkpoint.disk_keep + 1 + (GAP // every if every else 0)
    return [*found, f"{seen.disk_folders} checkpoints on disk"] if seen.disk_folders > most else found


def struck_parts_are_back(seen: GateObservations, struck: Struck, spec: JobSpec, baseline: Baseline) -> list[str]:
    """Killed parts run again, and problems with copies were reported."""
    return list(seen.unreported)


def copies_are_where_they_belong(
    seen: GateObservations, struck: Struck, spec: JobSpec, baseline: Baseline
) -> list[str]:
    """The copies of every rank's step are in its own memory, at its peer and on disk."""
    return [seen.missing_copies] if seen.missing_copies else []


def incidents_are_few_and_closed(
    seen: GateObservations, struck: Struck, spec: JobSpec, baseline: Baseline
) -> list[str]:
    """There are no more incidents than faults that open one, and all of them are over and recovered."""
    most = sum(request.fault.incidents_in_soaks for request in struck.requests)
    found = [f"{len(seen.incidents)} incidents, and at most {most} are due"] if len(seen.incidents) > most else []
    for incident in seen.incidents:
        if incident.report is None:
            found.append(f"{incident.id} is still open")
        elif not incident.report.recovered:
            found.append(f"{incident.id}: {incident.report.headline}")
    return found


def crashes_are_reported_as_crashes(
    seen: GateObservations, struck: Struck, spec: JobSpec, baseline: Baseline
) -> list[str]:
    """Without a fault that hangs, no incident reports a hang."""
    if any(request.opening.may_hang for request in struck.requests):
        return []
    return [
        f"{incident.id}: a hang was reported, and no rank hung"
        for incident in seen.incidents
        for failure in (incident.report.failures if incident.report else [])
        if failure.symptom is Symptom.HANG
    ]


def steps_lost_are_few(seen: GateObservations, struck: Struck, spec: JobSpec, baseline: Baseline) -> list[str]:
    """No more steps are lost than follows from the copies that were left."""
    found = []
    for incident in seen.incidents:
        if incident.report is None:
            continue  # another invariant reports that it is still open
        lost = incident.report.lost_steps
        if lost is None:
            if not all_memory_is_lost(struck, spec, at_once=len(seen.incidents) == 1):
                found.append(f"{incident.id}: the number of lost steps is not known")
        elif lost > (most := may_cost(struck)):
            found.append(f"{incident.id}: {lost} steps were lost, and at most {most} may be")
        if incident.report.resume_step < struck.gate:
            back = incident.report.resume_step
            found.append(f"{incident.id}: resumed from step {back}, before the gate at step {struck.gate}")
    lost_steps = sum(incident.report.lost_steps or 0 for incident in seen.incidents if incident.report)
    # At each failure, a step may have been reported and not completed.
    failures = sum(max(len(incident.report.failures), 1) for incident in seen.incidents if incident.report)
    all_known = all(incident.report and incident.report.lost_steps is not None for incident in seen.incidents)
    if all_known and (seen.redone is None or not lost_steps <= seen.redone <= lost_steps + failures):
        found.append(
            f"by the incidents {lost_steps} steps were lost, by the step records {seen.redone} were done again"
        )
    return found


def all_memory_is_lost(struck: Struck, spec: JobSpec, *, at_once: bool) -> bool:
    """Return whether all machines lost their memory in one incident, so that the job's last step is not known.

    Args:
        struck: The faults.
        spec: The job.
        at_once: Whether all faults belong to one incident.
    """
    lost = [set(request.opening.loss(spec).machines) for request in struck.requests]
    together = [set[int]().union(*lost)] if at_once else lost
    return any(len(machines) == spec.machines for machines in together)


def recorded_versions_ran(seen: GateObservations, struck: Struck, spec: JobSpec, baseline: Baseline) -> list[str]:
    """Each step ran under the version that the job recorded, no version waits, and only good versions run."""
    found = list(seen.other_versions)
    found += [f"{v.name} is {v.status} at the gate" for v in seen.versions if v.status in WAITS]
    if struck.requests and struck.requests[0].fault.is_update and seen.versions:
        last, good = seen.versions[-1], isinstance(struck.requests[0].fault, Update)
        if (last.status is VersionStatus.RUNNING) is not good:
            found.append(f"after {struck.requests[0].fault.name} {last.name} is {last.status}: {last.why[:200]}")
    return found


def workflows_do_not_fail(seen: GateObservations, struck: Struck, spec: JobSpec, baseline: Baseline) -> list[str]:
    """No workflow task failed. A killed worker only causes time-outs; a failure is a defect of the code."""
    return list(seen.failed_tasks)


def histories_are_short(seen: GateObservations, struck: Struck, spec: JobSpec, baseline: Baseline) -> list[str]:
    """The job's workflow continues as new before its history is too long."""
    return [f"{seen.history_events} events in the job's history"] if seen.history_events > MAX_EVENTS else []


def memory_is_flat(seen: GateObservations, struck: Struck, spec: JobSpec, baseline: Baseline) -> list[str]:
    """No process that outlives the ranks grows without bound."""
    found = []
    for process in _lasting(seen):
        samples, before = baseline.memory_mb.get(_key(process, seen), (0, 0.0))
        most = max(before * GROWTH, before + GROWTH_MB.get(process.name, GROWTH_MB_OTHER))
        if samples > WARM_UP and process.memory_mb > most:
            found.append(f"{process.name} (pid {process.pid}) grew from {before:.0f} to {process.memory_mb:.0f} MB")
    return found


def descriptors_are_flat(seen: GateObservations, struck: Struck, spec: JobSpec, baseline: Baseline) -> list[str]:
    """No process that outlives the ranks has more and more descriptors."""
    found = []
    for process in _lasting(seen):
        before = baseline.descriptors.get(_key(process, seen))
        if before is not None and process.descriptors > before + MORE_DESCRIPTORS:
            found.append(f"{process.name} (pid {process.pid}) has {process.descriptors} descriptors, {before} before")
    return found


def status_is_true(seen: GateObservations, struck: Struck, spec: JobSpec, baseline: Baseline) -> list[str]:
    """The answer of ``everstep status`` agrees with the observations."""
    if seen.report is None:
        return [f"status does not answer: {seen.silent}"]
    report, found = seen.report, []
    if report.status != "running":
        found.append(f"status shows {report.status}")
    if report.step != seen.step:
        found.append(f"status shows step {report.step}, and the gate is at step {seen.step}")
    if report.generation != seen.generation:
        found.append(f"status shows generation {report.generation}, and the ranks' newest is {seen.generation}")
    if report.open_incident is not None:
        found.append(f"status shows {report.open_incident.id} as open")
    if report.silent:
        found.append(f"status shows {', '.join(report.silent)} as silent")
    return found


def no_machine_is_leased_twice(seen: GateObservations, struck: Struck, spec: JobSpec, baseline: Baseline) -> list[str]:
    """No machine had ranks of two jobs at once, no two jobs have it, and ranks run only on machines of their job."""
    shared = [f"{machine} had ranks of {' and '.join(jobs)} at the same time" for machine, jobs in seen.shared]
    return [*shared, *([seen.machines.unknown] if seen.machines.unknown else leased_twice(seen.machines))]


def no_machine_is_lost(seen: GateObservations, struck: Struck, spec: JobSpec, baseline: Baseline) -> list[str]:
    """Each machine belongs to a job, is spare, or has just left a job."""
    out = [*struck.gone, *struck.away, *struck.second_job_gone, *_over_evicted(seen, struck)]
    return [] if seen.machines.unknown else lost(seen.machines, out)


def _over_evicted(seen: GateObservations, struck: Struck) -> list[str]:
    reports = [incident.report for incident in seen.incidents if incident.report]
    return over_evicted(reports, [*struck.gone, *struck.away])


def the_right_machines_left(seen: GateObservations, struck: Struck, spec: JobSpec, baseline: Baseline) -> list[str]:
    """Machines that were lost for good left the job, and no healthy machine did, except by over-eviction."""
    left = {name for incident in seen.incidents if incident.report for name in incident.report.evicted}
    has = seen.machines.jobs.get(spec.name, [])
    found = [f"{name} is lost, and the job still has it" for name in struck.gone if name in has]
    healthy = sorted(left - {*struck.gone, *struck.away, *_over_evicted(seen, struck)})
    return [*found, *(f"{name} left the job, and nothing is wrong with it" for name in healthy)]


def the_second_job_runs(seen: GateObservations, struck: Struck, spec: JobSpec, baseline: Baseline) -> list[str]:
    """The second job runs, and the faults of the soak's job do not disturb it."""
    return list(seen.other)


INVARIANTS: tuple[Invariant, ...] = (
    all_ranks_are_at_the_gate,
    losses_are_equal,
    one_copy_of_a_rank,
    processes_are_those_of_the_job,
    shared_memory_does_not_fill_up,
    no_semaphore_is_left,
    disk_does_not_fill_up,
    struck_parts_are_back,
    copies_are_where_they_belong,
    incidents_are_few_and_closed,
    crashes_are_reported_as_crashes,
    steps_lost_are_few,
    recorded_versions_ran,
    workflows_do_not_fail,
    histories_are_short,
    memory_is_flat,
    descriptors_are_flat,
    status_is_true,
    no_machine_is_leased_twice,
    no_machine_is_lost,
    the_right_machines_left,
    the_second_job_runs,
)


def violations(seen: GateObservations, struck: Struck, spec: JobSpec, baseline: Baseline) -> list[str]:
    """Return all violations, each after the name of its invariant."""
    return [
        f"{invariant.__name__.replace('_', ' ')}: {text}"
        for invariant in INVARIANTS
        for text in invariant(seen, struck, spec, baseline)
    ]


def learn(seen: GateObservations, baseline: Baseline) -> None:
    """Record the observations for later gates."""
    if baseline.unheld is None:
        baseline.unheld = seen.unheld
    for process in _lasting(seen):
        key = _key(process, seen)
        samples, before = baseline.memory_mb.get(key, (0, 0.0))
        baseline.memory_mb[key] = (samples + 1, process.memory_mb if samples < WARM_UP else before)
        if samples < WARM_UP:
            baseline.descriptors[key] = process.descriptors


def _key(process: ClusterProcess, seen: GateObservations) -> ProcessKey:
    return process.pid, process.name, seen.machines.pool.get(process.name.removeprefix("agent-"), "")


def _lasting(seen: GateObservations) -> list[ClusterProcess]:
    return [process for process in seen.processes if process.name not in ("rank", "store", "of the ledger", "gone")]


def may_cost(struck: Struck) -> int:
    """Return the largest number of steps that an incident may lose; without a promise, all steps since the last
    gate."""
    if struck.behind:
        return GAP
    promised = [promise.steps for promise in struck.promises]
    steps = [promise for promise in promised if promise is not None]
    if len(steps) < len(promised) or (len(struck.requests) > 1 and not _independent(struck)):
        return GAP
    return max([MAX_LOST, *steps])


def _independent(struck: Struck) -> bool:
    """Return whether the promises of two faults still hold together.

    They do not hold together if both faults take copies, or if one holds up the backups that the other one needs.
    """
    takes = [request for request in struck.requests if request.fault.takes_machines]
    holds_up = [request for request in struck.requests if request.fault.holds_up_backups]
    return not takes or len(takes) + len(holds_up) == 1
