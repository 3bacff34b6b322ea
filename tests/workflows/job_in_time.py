"""A job in simulated time. The decisions about each failure are real, but there is no server and no clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from everstep.decisions.act.recover.incident_state import IncidentState
from everstep.decisions.act.recover.plan import RestartPlan, plan_restart
from everstep.decisions.act.recover.rules import Action
from everstep.decisions.act.recover.tried_rungs import TriedRungs
from everstep.decisions.act.versions.book import VersionBook
from everstep.model.eviction import EvictAnswer
from everstep.model.evidence import Evidence, RankExit
from everstep.model.incident import Anomaly, Failure, IncidentReport, Symptom
from everstep.model.job import JobSpec
from everstep.model.job_state import JobState
from everstep.model.ladder import Rung
from everstep.model.launch import Confirmation, Showing
from everstep.model.machine import Machine
from everstep.model.recovery_policy import RecoveryPolicy
from everstep.model.state_copy import StateCopies
from everstep.model.version import CodeVersion, JobVersion, VersionStatus
from workflows.learned import learn

S = 10**9
HOUR = 3600
STEP_S = 10.0
RESTART_S, TESTS_S = 2, 300
MACHINES = [Machine(name=f"m{index}", address=f"127.0.0.1{index}:1") for index in range(4)]


@dataclass(frozen=True)
class Strike:
    """One failure of the job."""

    after_s: float
    """How long the job stepped before the failure, seconds."""
    machine: str = ""
    symptom: Symptom = Symptom.CRASH
    explained: bool = False
    """Whether an inspection names the cause."""
    cause: str = "SIGKILL"
    again: int = 0
    """The number of restarts after this failure that fail before their first step."""
    finds: Rung | None = None
    """The rung that finds the machine at fault, which then leaves; None: no rung finds it."""
    leaves_by: str = ""
    """The rule that evicts this machine; empty: the rule of the rung that found it."""
    step: int = -1
    """The step at which the job fails; -1: the step that it reaches in ``after_s``."""


@dataclass
class JobInTime:
    """The job, its simulated time, and a record of the decisions."""

    policy: RecoveryPolicy = field(default_factory=RecoveryPolicy)
    versions: int = 1
    ran_s: float = 0.0
    """How long the newest version ran before the first failure, seconds."""
    now_ns: int = 1000 * HOUR * S
    state: JobState = field(init=False)
    step: int = 1000
    rungs: list[list[Rung]] = field(default_factory=list)
    """The rungs that were tried in each incident."""
    plans: list[RestartPlan] = field(default_factory=list)
    known: list[set[Rung]] = field(default_factory=list)
    """For each plan, the rungs that were remembered as tried before it."""
    parked: str = ""
    """The reason why the job is parked; empty: it is not parked."""
    launches_ns: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        spec = JobSpec(name="job", script="/job.py", machines=4, ranks_per_machine=1, policy=self.policy)
        self.state = JobState(spec=spec, machines=MACHINES, generation=1, showing=Showing(kind="steps"))
        self.state.lineage, self.state.resume_step = [(1, 0)], 0
        self.state.spec = spec.model_copy(update={"version": self.versions})
        self.state.versions = [
            JobVersion(
                number=number,
                runs=CodeVersion(script="/job.py", code=f"code{number}"),
                status=VersionStatus.RUNNING if number == self.versions else VersionStatus.REPLACED,
                ranges=[(number - self.versions, number - 1, -1 if number == self.versions else number)],
                steady=self.ran_s > 0 or number < self.versions,
                began_ns=self.now_ns - int(self.ran_s * S) if number == self.versions else 1,
            )
            for number in range(1, self.versions + 1)
        ]

    def strike(self, *strikes: Strike) -> None:
        """Let the job fail by one strike after the other until it is parked."""
        for one in strikes:
            if self.parked:
                return
            self._incident(one)

    def resume(self) -> None:
        """Let an operator resume the parked job, which then steps."""
        self.parked = ""
        self.now_ns += HOUR * S
        begun_ns = self.now_ns
        self._state.begin_again()
        self._take(Strike(0.0, step=self.step, symptom=self._state.failures[-1].symptom), again=True)
        self._restart(plan_restart(self._evidence(), self._state, by_operator=True))
        self._learn(begun_ns)

    @property
    def last(self) -> list[Rung]:
        """The rungs that were tried in the last incident."""
        return self.rungs[-1]

    def _incident(self, strike: Strike) -> None:
        self.now_ns += int(strike.after_s * S)
        self.step = strike.step if strike.step >= 0 else self.step + int(strike.after_s / STEP_S)
        job = self.state
        self._state = IncidentState(
            number=1,
            spec=job.spec,
            machines=job.machines,
            anomaly=Anomaly(id="m0-1", generation=job.generation, symptom=strike.symptom, headline="seen"),
            generation=job.generation,
            resume_step=job.resume_step,
            lineage=list(job.lineage),
            showing=job.showing,
            history=list(job.failures),
            book=VersionBook.of(job.versions, job.spec.version),
            ladder=TriedRungs(remembered=list(job.tried)),
        )
        self._evicted: list[str] = []
        self._asked: list[EvictAnswer] = []
        again = strike.again
        self._take(strike)
        while True:
            state, plan = self._state, plan_restart(self._evidence(), self._state)
            self.plans.append(plan)
            self.known.append({one.rung for one in (*state.ladder.remembered, *state.ladder.tried)})
            assert plan.rung is not None
            if plan.action in {Action.DIAGNOSE, Action.REPLAY}:
                self.now_ns += TESTS_S * S
                path = plan.rung.path
                state.ladder.add(plan.rung.rung, state.failures[-1], "", path=path, found="all pass")
                if plan.rung.rung is strike.finds:
                    state.joined, self._evicted = {"m9"}, ["m1"]
                    rule = strike.leaves_by or ("failed-test" if strike.finds is Rung.DIAGNOSE else "failed-replay")
                    self._asked = [EvictAnswer(rule=rule, machine="m1", yes=True, why="so it says")]
                continue
            if plan.action is Action.PARK:
                self.parked = plan.verdict.text
                self.rungs.append([one.rung for one in state.ladder.all_tried])
                return None
            self._restart(plan)
            if not again:
                return self._learn()
            again -= 1
            state.record_failed_reattempt()
            self._take(strike)

    def _take(self, strike: Strike, *, again: bool = False) -> None:
        """Record the failure of a strike; ``again``: this failure replaces the incident's last one."""
        state = self._state
        failure = Failure(
            generation=state.generation,
            step=self.step,
            symptom=strike.symptom,
            cause=strike.cause,
            time_ns=self.now_ns,
            machine=strike.machine,
        )
        state.explained = strike.explained
        if again:
            state.failures[-1] = failure
        else:
            state.record_failure(failure)

    def _evidence(self) -> Evidence:
        exits = [RankExit(rank=rank, machine=f"m{rank}", signal=9, completed_steps=self.step) for rank in range(4)]
        held = [
            StateCopies.one(rank=rank, machine=f"m{rank}", completed_steps=self.step, generation=self._state.generation)
            for rank in range(4)
        ]
        return Evidence(generation=self._state.generation, exits=exits, held=held)

    def _restart(self, plan: RestartPlan) -> None:
        state, rung = self._state, Rung.REATTEMPT
        if plan.change is not None:
            rung = Rung.ROLLBACK if plan.change.suspect else rung
            state.switch_version(plan.change, self.now_ns)
        state.attempts += 1
        if plan.rung is not None:
            state.ladder.add(rung, state.failures[-1], "", path=plan.rung.path)
        state.record_launch(plan.restore)
        state.book.launched(state.generation, plan.restore.step, self.now_ns)
        self.now_ns += int((RESTART_S + plan.verdict.delay_s) * S)
        self.launches_ns.append(self.now_ns)

    def _learn(self, begun_again_ns: int = 0) -> None:
        state = self._state
        self.rungs.append([one.rung for one in state.ladder.tried])
        confirmation = Confirmation(generation=state.generation, ok=True, reason="all stepped", stepped_ns=self.now_ns)
        report: dict[str, Any] = {"headline": "", "resolution": "reattempt", "cause": "", "step": self.step}
        learn(
            self.state,
            IncidentReport(
                **report,
                lost_steps=0,
                evicted=self._evicted,
                asked=self._asked,
                stages=[],
                generation=state.generation,
                resume_step=state.resume_step,
                recovered=True,
                seconds=1.0,
                failures=state.failures,
                confirmation=confirmation,
                lineage=state.launches,
                version=state.book.running,
                versions=state.book.changed(),
                tried=state.ladder.all_tried,
                begun_again_ns=begun_again_ns,
            ),
        )

    def version(self, number: int) -> JobVersion:
        """Return a version as the job knows it."""
        return next(one for one in self.state.versions if one.number == number)


def tried(rungs: Sequence[Sequence[Rung]]) -> list[Rung]:
    """Return the rungs of all incidents, in order."""
    return [rung for of_incident in rungs for rung in of_incident]
