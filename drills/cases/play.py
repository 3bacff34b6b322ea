"""Plays a case in simulated time, and compares the course of the recovery with what the case expects."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from activities.agents.diagnose_machines import DiagnoseMachines
from drills.cases.case import Case
from drills.cases.cluster import JOB, SimulatedCluster
from drills.cases.temporal import S
from everstep.model.incident import IncidentReport
from everstep.model.job_state import JobState, incident_workflow_id, job_workflow_id
from everstep.model.stage import Stage, StageRecord
from workflows.job import JobWorkflow

START_LIMIT_S = 3600.0
"""The longest time in which the job of a case completes its first step."""

LOOK_S = 10.0
"""The time between two looks whether the case is over."""
QUIET_S = 120.0
"""A longer time in which a job trains and nothing happens is skipped."""
PARKED_S = 120.0
"""A job that is parked for so long waits for a person."""


@dataclass(frozen=True, slots=True)
class Chapter:
    """One incident of a course."""

    headline: str
    stages: list[StageRecord]


@dataclass(frozen=True, slots=True)
class Course:
    """What happened."""

    evicted: dict[str, str]
    """Machine that left → the rule by which it did."""
    parked: str
    """The rule that parked the job for a person, and for which it waits at the end; empty: it does not wait."""
    rungs: list[str]
    tests: list[str]
    owner: str
    cause: str
    incidents: int
    version: int
    lost_steps: int
    seconds: float | None
    """From the first strike to the step after which nothing failed any more; None: it did not train at the end."""
    story: list[Chapter] = field(default_factory=list)
    """The incidents, for people."""

    def as_object(self) -> dict[str, Any]:
        """The course as JSON: the fields, and the headline of each incident."""
        fields = {one.name: getattr(self, one.name) for one in dataclasses.fields(self) if one.name != "story"}
        return fields | {"headlines": [chapter.headline for chapter in self.story]}


@dataclass(frozen=True, slots=True)
class Difference:
    """A part of a course that is not as expected."""

    part: str
    """The name of the field of ``Expected``."""
    expected: str
    actual: str


def differences(case: Case, course: Course) -> list[Difference]:
    """Return in what a course differs from what its case expects."""
    found = []
    for part in case.expect.model_fields_set | {"evicted", "parked"}:
        expected = getattr(case.expect, part)
        if expected is None:
            continue
        if part == "within_s":
            actual, wrong = course.seconds, course.seconds is None or course.seconds > expected
        elif part == "lost_steps":
            actual, wrong = course.lost_steps, course.lost_steps > expected
        else:
            actual = getattr(course, part)
            wrong = actual != expected
        if wrong:
            found.append(Difference(part, _shown(expected), _shown(actual)))
    return sorted(found, key=lambda one: one.part)


def _shown(value: object) -> str:
    match value:
        case dict():
            return ", ".join(f"{name} ({rule})" for name, rule in value.items()) or "none"
        case list():
            return ", ".join(map(str, value)) or "none"
        case float():
            return f"{value:g}"
        case _:
            return "none" if value in {None, ""} else str(value)


def play(case: Case) -> Course:
    """Play a case.

    Raises:
        WorkflowFailedError: a workflow failed.
    """
    cluster = SimulatedCluster(case)
    temporal = cluster.temporal
    cluster.begin()
    assert temporal.advance(lambda: cluster.first_step_ns > 0, START_LIMIT_S), "the job of the case does not start"
    cluster.skip(case.job.ran_h * 3600.0)
    for answer in case.answer:
        cluster.at(answer.at_s, lambda command=answer.command: _answer(cluster, command))
    until_ns = temporal.now_ns + round(case.play_s * S)
    while temporal.now_ns < until_ns:
        temporal.advance(lambda: False, LOOK_S)
        if _is_over(cluster):
            break
        if cluster.is_quiet and (next_s := cluster.next_s) is not None and next_s > QUIET_S:
            cluster.skip(next_s - LOOK_S)
    course = _course(cluster)
    temporal.close()
    return course


def _is_over(cluster: SimulatedCluster) -> bool:
    """Whether nothing more will happen: the job trains or is parked, and no fault is to come."""
    if cluster.next_s is not None:
        return False
    job, now_ns = _job(cluster), cluster.temporal.now_ns
    if not cluster.temporal.is_open(job_workflow_id(JOB)):
        return True
    if job.state.status == "parked":
        incident = cluster.temporal.workflow(incident_workflow_id(JOB, job.state.incident_count)).incident
        return bool(now_ns - incident.timeline.since_ns > PARKED_S * S)
    return cluster.is_quiet


def _answer(cluster: SimulatedCluster, command: str) -> None:
    state = _job(cluster).state
    cluster.temporal.signal(incident_workflow_id(JOB, state.incident_count), command, {"operator": "a person"})


def _job(cluster: SimulatedCluster) -> JobWorkflow:
    job: JobWorkflow = cluster.temporal.workflow(job_workflow_id(JOB))
    return job


def _course(cluster: SimulatedCluster) -> Course:
    temporal, state = cluster.temporal, _job(cluster).state
    evicted: dict[str, str] = {}
    rungs: list[str] = []
    story, owner, cause, parked = [], "", "", ""
    for number in range(1, state.incident_count + 1):
        incident = temporal.workflow(incident_workflow_id(JOB, number)).incident
        known = incident.state
        evicted |= {one.machine: one.rule for one in known.evictions.done}
        rungs += [str(one.rung) for one in known.ladder.all_tried]
        report = temporal.result(incident_workflow_id(JOB, number), IncidentReport)
        headline = report.headline if report else f"{incident.timeline.stage}: {incident.timeline.reason}"
        story.append(Chapter(headline, list(known.page.stages)))
        first = known.failures[0] if known.failures else None
        if not owner and first is not None and first.classification is not None:
            owner, cause = first.classification.owner, first.classification.reason
        if report is None and incident.timeline.stage == Stage.PARKED:
            parked = incident.parked_by
    tests = next((one.tests for one in cluster.performed if isinstance(one, DiagnoseMachines)), [])
    first_ns = min((one.first_ns for one in cluster.broken if one.strikes), default=0)
    generation = cluster.generation
    trains = (
        generation is not None and not generation.frozen_ns and cluster.completed() > max(generation.resume_step, 0)
    )
    again_ns = generation.loop_ns + round(cluster.case.job.step_s * S) if generation is not None else 0
    return Course(
        evicted=evicted,
        parked=parked,
        rungs=rungs,
        tests=list(tests),
        owner=owner,
        cause=cause,
        incidents=state.incident_count,
        version=state.spec.version,
        lost_steps=cluster.computed_again,
        seconds=max((again_ns - first_ns) / S, 0.0) if trains else None,
        story=story,
    )
