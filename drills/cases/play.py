"""Plays a case in simulated time, and compares the course of the recovery with what the case expects."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from activities.agents.diagnose_machines import DiagnoseMachines
from activities.registry import ACTIVITIES
from drills.cases.answers import POOL, Answers
from drills.cases.case import Case
from drills.cases.temporal import S
from drills.cases.watcher import CaseWatcher
from drills.cases.world import JOB, World
from everstep.errors import ConfigError
from everstep.model.incident import IncidentReport
from everstep.model.job_state import JobState, incident_workflow_id, job_workflow_id
from everstep.model.pool import POOL_WORKFLOW, PoolState
from everstep.model.stage import StageRecord
from workflows.incident.incident import Incident
from workflows.job import JobWorkflow
from workflows.registry import WORKFLOWS

START_LIMIT_S = 3600.0
"""The longest time in which the job of a case completes its first step."""

LOOK_S = 10.0
"""The time between two checks of whether the case is over."""
QUIET_S = 120.0
"""If a job trains for longer than this and nothing happens, the time is skipped."""
PARKED_S = 120.0
"""A job that is parked for this long waits for a person."""


@dataclass(frozen=True, slots=True)
class Chapter:
    """One incident of a course."""

    headline: str
    stages: list[StageRecord]


@dataclass(frozen=True, slots=True)
class Course:
    """What happened."""

    evicted: dict[str, str]
    """Machine that left → the rule that evicted it."""
    parked: str
    """The rule that parked the job, if it waits for a person at the end; empty: it does not wait."""
    rungs: list[str]
    tests: list[str]
    owner: str
    cause: str
    incidents: int
    version: int
    lost_steps: int
    seconds: float | None
    """The time from the first strike to the step after which nothing failed; None: the job did not train at the end."""
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
    """Return the differences between a course and what its case expects."""
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
    played = _Played(case)
    try:
        played.run()
        return played.course()
    finally:
        played.temporal.close()


class _Played:
    """A case that is played."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.answers = Answers()
        self.world = self.answers.world = World(case, WORKFLOWS, ACTIVITIES, self.answers)
        self.temporal = self.world.temporal
        self.temporal.start(POOL_WORKFLOW, POOL, PoolState())
        machines = self.world.machines[: case.job.machines]
        self.temporal.start("Job", job_workflow_id(JOB), JobState(spec=self.world.spec, machines=machines))
        self.watcher = CaseWatcher(self.world)

    def run(self) -> None:
        """Play until nothing more can happen, or the time of the case is over."""
        world, case = self.world, self.case
        started = self.temporal.advance(lambda: world.first_step_ns > 0, START_LIMIT_S)
        if not started:
            raise ConfigError(f"the job of the case {case.title!r} completes no step")
        if case.job.older_version_h:
            self._update(case.job.older_version_h * 3600.0)
        self.temporal.advance(lambda: False, LOOK_S)
        world.skip(case.job.ran_h * 3600.0)
        world.begin_faults()
        for answer in case.answer:
            world.at(answer.at_s, lambda answer=answer: self._answer(answer.command))  # type: ignore[misc]
        until_ns = self.temporal.now_ns + round(case.play_s * S)
        while self.temporal.now_ns < until_ns and not self._is_over():
            self.temporal.advance(lambda: False, LOOK_S)
            next_s = world.next_s
            if self._trains and next_s is not None and next_s > QUIET_S:
                world.skip(next_s - LOOK_S)

    def _update(self, after_s: float) -> None:
        """Let the job run another version of its code after a time."""
        self.world.skip(after_s)
        request = {"code": "/code/2", "urgency": "urgent", "operator": "a person", "reason": "new code"}
        self.temporal.signal(job_workflow_id(JOB), "update", request)
        state = self.job.state
        done = self.temporal.advance(lambda: state.spec.version > 1 and self._trains, START_LIMIT_S)
        if not done:
            raise ConfigError(f"the job of the case {self.case.title!r} does not train after its update")
        self.world.computed_again = 0

    @property
    def job(self) -> JobWorkflow:
        job: JobWorkflow = self.temporal.workflow(job_workflow_id(JOB))
        return job

    def incident(self, number: int) -> Incident:
        found: Incident = self.temporal.workflow(incident_workflow_id(JOB, number)).incident
        return found

    @property
    def _trains(self) -> bool:
        state = self.job.state
        return state.status == "running" and not state.pending and self.watcher.is_calm and self.world.stepped() > 0

    def _is_over(self) -> bool:
        """Whether nothing more will happen: the job trains, is parked or is over, and no fault is to come."""
        if self.world.next_s is not None:
            return False
        if not self.temporal.is_open(job_workflow_id(JOB)):
            return True
        state = self.job.state
        if state.status == "parked":
            since_ns = self.incident(state.incident_count).timeline.since_ns
            return self.temporal.now_ns - max(since_ns, self.world.last_ns) > PARKED_S * S
        return self._trains

    def _answer(self, command: str) -> None:
        incident = incident_workflow_id(JOB, self.job.state.incident_count)
        self.temporal.signal(incident, command, {"operator": "a person"})

    def course(self) -> Course:
        """Return what happened."""
        state, world = self.job.state, self.world
        before = 1 if self.case.job.older_version_h else 0
        numbers = range(1 + before, state.incident_count + 1)
        incidents = [self.incident(number) for number in numbers]
        reports = [self.temporal.result(incident_workflow_id(JOB, number), IncidentReport) for number in numbers]
        ends = [one.state.anomaly.classification for one in incidents]
        first = next((found for found in ends if found is not None), None)
        tests = [one.tests for one in self.answers.performed if isinstance(one, DiagnoseMachines)]
        evicted: dict[str, str] = {}
        for one in incidents:
            evicted |= {left.machine: left.rule for left in one.state.evictions.done}
        return Course(
            evicted=evicted,
            parked=incidents[-1].parked_by if incidents and state.status == "parked" else "",
            rungs=[str(tried.rung) for one in incidents for tried in one.state.ladder.all_tried],
            tests=list(tests[0]) if tests else [],
            owner=first.owner if first else "",
            cause=first.reason if first else "",
            incidents=len(incidents),
            version=state.spec.version,
            lost_steps=world.computed_again,
            seconds=self._seconds(),
            story=[_chapter(one, report) for one, report in zip(incidents, reports, strict=True)],
        )

    def _seconds(self) -> float | None:
        """Return the time from the first strike to the first step of the last generation, if the job trains."""
        generation, world = self.world.generation, self.world
        if generation is None or generation.frozen_ns or not world.stepped():
            return None
        struck_ns = min((one.first_ns for one in world.broken if one.strikes), default=0)
        stepped_ns = generation.loop_ns + round(self.case.job.step_s * S)
        return max((stepped_ns - struck_ns) / S, 0.0)


def _chapter(incident: Incident, report: IncidentReport | None) -> Chapter:
    timeline = incident.timeline
    headline = report.headline if report else f"{timeline.stage}: {timeline.reason or timeline.page.headline}"
    return Chapter(headline, list(timeline.page.stages))
