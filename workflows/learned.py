"""Updates a job's state from the report of an incident."""

from __future__ import annotations

from temporalio import workflow

with workflow.unsafe.imports_passed_through():
    from everstep.decisions.act.evict.rules import BY_TEST_OR_REPLAY
    from everstep.decisions.act.ladder.next_rung import kept
    from everstep.decisions.act.progress import still_counting
    from everstep.decisions.act.versions.book import VersionBook
    from everstep.decisions.blame.alerts import alerts_kept
    from everstep.decisions.keep.lineage import extended
    from everstep.model.incident import IncidentReport, Symptom
    from everstep.model.job_state import JobState
    from everstep.model.machine import Machine
    from everstep.model.version import JobVersion

FAILURES_KEPT = 50
TRIED_KEPT = 100
EVICTED_KEPT = 1000
"""The largest number of eviction times that a job keeps."""
LEFT_KEPT = 1000
"""The largest number of former machines that a job keeps."""


def learn(state: JobState, report: IncidentReport) -> bool:
    """Update a job's state; returns whether the first step must still be awaited."""
    state.generation = report.generation
    learn_versions(state, report.versions, report.version)
    state.status = "running" if report.recovered else "failed"
    state.unproductive_s += report.seconds or 0.0
    learn_failures(state, report)
    if report.machines:
        change_machines(state, report.machines)
    state.evicted_ns = [*state.evicted_ns, *report.evicted_ns][-EVICTED_KEPT:]
    newest_ns = max((found.finding.since_ns for found in report.findings), default=0)
    state.alerts = alerts_kept(state.alerts, report.findings, newest_ns)
    state.resume_step = report.resume_step
    state.save_every = report.save_every or state.save_every
    if report.showing.kind:
        state.showing = report.showing
    state.first_step_s = max(state.first_step_s, report.first_step_s)
    state.lineage = extended(state.lineage, report.lineage)
    if report.recovered and report.confirmation and not report.confirmed:
        state.unconfirmed = report.confirmation.reason
        return True
    return False


def learn_failures(state: JobState, report: IncidentReport) -> None:
    """Keep the failures of an incident and the attempts to solve them, as far as they count for the next incident."""
    begun_ns, policy = report.begun_again_ns, state.spec.policy
    if begun_ns:
        state.failures, state.tried = [], []
    failures = [one for one in report.failures if one.symptom is not Symptom.UPDATE and one.time_ns >= begun_ns]
    if failures:
        still = still_counting(state.failures, failures[0], policy)
        if report.recovered and report.confirmation:
            failures[-1] = failures[-1].model_copy(update={"over_ns": report.confirmation.stepped_ns})
        state.failures = [*still, *failures][-FAILURES_KEPT:]
    unsolved = {one.generation for one in state.failures}
    tried = [one for one in report.tried if one.time_ns >= begun_ns]
    if failures and failures[-1].explained and evicted_by_test(report):
        symptoms = {one.symptom for one in failures}
        state.tried = [one for one in state.tried if one.symptom not in symptoms]
    elif tried:
        state.tried = kept(state.tried, tried, policy, TRIED_KEPT, unsolved)


def evicted_by_test(report: IncidentReport) -> bool:
    """Return whether a machine left because a test or a replay showed that it is faulty.

    Such an eviction solves the fault, so earlier attempts do not count for a later fault. An eviction for another
    reason, e.g. an inspection's finding after the tests had passed, does not solve it.
    """
    tested = {answer.machine for answer in report.asked if answer.yes and answer.rule in BY_TEST_OR_REPLAY}
    return not tested.isdisjoint(report.evicted)


def learn_versions(state: JobState, versions: list[JobVersion], running: int) -> None:
    """Keep an incident's code versions, and the number of the running version; 0: the incident knows no version."""
    if not running:
        return
    book = VersionBook.of(state.versions, running)
    book.merge(versions)
    state.versions = book.all()
    runs = book.versions[running].runs if running in book.versions else None
    if runs is not None and state.spec.version != running:
        state.spec = runs.applied(state.spec, running)


def ended_with_job(state: JobState) -> list[JobVersion]:
    """Return the versions of a job that is over: the running version ended with it, and pending ones are not
    applied."""
    book = VersionBook.of(state.versions, state.spec.version)
    book.end(f"the job {state.outcome}")
    return book.all()


def change_machines(state: JobState, machines: list[Machine]) -> None:
    """Note that the job runs on these machines from now on."""
    now = {machine.name for machine in machines}
    before = [machine.name for machine in state.machines if machine.name not in now]
    state.left = [*(name for name in state.left if name not in {*before, *now}), *before][-LEFT_KEPT:]
    state.machines = machines
