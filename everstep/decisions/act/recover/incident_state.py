"""Holds the state of one incident: the failure, the machines and copies that are left, the attempts, and the cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr

from everstep.decisions.act.progress import still_counting
from everstep.decisions.act.recover.confirm import showing_of
from everstep.decisions.act.recover.doubt import Doubt, is_remembered
from everstep.decisions.act.recover.rules import UNFIT_EXCEPTION
from everstep.decisions.act.recover.tried_rungs import TriedRungs
from everstep.decisions.act.versions.book import VersionBook
from everstep.decisions.act.versions.next_version import VersionChange
from everstep.decisions.act.versions.rollback import Blame, blame, older_state
from everstep.decisions.blame.first_failure import (
    MACHINE_LOST,
    explanation,
    failure_of,
    first_failure,
    headline_of,
    headline_of_loss,
    is_hint,
)
from everstep.decisions.keep.choose_restore import Restore, choose_restore
from everstep.decisions.keep.lineage import FROM_NOTHING, Runs, extended, found_damaged, usable
from everstep.model.eviction import EvictionState
from everstep.model.evidence import Evidence
from everstep.model.finding import MachineFinding
from everstep.model.hang import HangResult
from everstep.model.incident import Anomaly, Failure, Symptom
from everstep.model.job import JobSpec, PlacedJob
from everstep.model.launch import Launched, Showing
from everstep.model.machine import Assignment, Machine
from everstep.model.message import Words
from everstep.model.slow import SlowResult
from everstep.model.stage import StageRecord
from everstep.model.state_copy import Restored, StateCopies

FINDINGS_KEPT = 64
FAILURES_KEPT = 100
STAGES_KEPT = 200
PARKED_KEPT = 500
REJECTED_KEPT = 5
TRIED_KEPT = 100
"""The largest number of entries of each kind that the state keeps."""


class IncidentPage(BaseModel):
    """The past of an incident, for its page; the workflow adds the current stage."""

    model_config = ConfigDict(extra="allow")

    headline: str = ""
    """The cause of the incident, as far as it is known."""
    stages: list[StageRecord] = Field(default_factory=list)
    """The completed stages."""
    rejected: list[str] = Field(default_factory=list)
    """Rejected messages of operators, each with the reason."""
    parked: list[tuple[int, int]] = Field(default_factory=list)
    """The times at which the job was parked: beginning and end, nanoseconds."""
    noted: int = 0
    """The number of entries that were written into the ledger."""
    picture: str = ""
    """The activity of each rank when its stacks were sampled, as text; empty: they were not sampled."""
    replays: int = 0
    """How often the job was replayed; the page links to the last replay."""


class OperatorDecisions(BaseModel):
    """The decisions of operators about an incident."""

    model_config = ConfigDict(extra="allow")

    resumed: bool = False
    """An operator has just resumed the job; the next plan takes that into account."""
    resumed_by: str = ""
    """The last operator who resumed the job; empty: no operator did."""
    begun_again_ns: int = 0
    """When an operator's resume or urgent code last reset the ladder and the counts; 0: never."""


class Continued(Words):
    """The point at which an incident continued as new."""

    NO = ""
    PARKED = "parked"
    """The incident was parked and resumes: the failure is known, and the machines are asked once more."""
    REATTEMPTED = "reattempted"
    """A reattempt had failed, and its failure is not known yet."""


class IncidentState(BaseModel):
    """Everything that an incident knows. Its decisions depend only on this state and on the evidence.

    The job's workflow creates it when it opens the incident. When the incident continues as new, the next run of its
    workflow gets the same state. It is mutable, and has neither I/O nor a clock.
    """

    model_config = ConfigDict(extra="allow")

    # The facts with which the incident was opened.

    number: int
    """The number of the incident within its job."""
    anomaly: Anomaly
    opened_ns: int = 0
    spec: JobSpec
    machines: list[Machine]
    """All machines of the job now."""
    run: str = ""
    """Id of the job's run (``everstep.model.run_id``)."""
    origin_runs: list[str] = Field(default_factory=list)
    """Ids of the earlier runs whose copies the job was started from."""
    first_step_s: float = 0.0
    """The longest time from a start of the job to its first step, seconds; 0: no start reached a step."""
    alerts: list[MachineFinding] = Field(default_factory=list)
    """The last network alerts of the job's machines, before and in this incident."""
    evicted_ns: list[int] = Field(default_factory=list)
    """Times of earlier evictions from the job that count for the breaker: one entry for each machine."""
    only_tells: bool = False
    """The incident only reports a fault. It does nothing about the fault, and the job does not wait for it."""
    continued: Continued = Continued.NO
    """Why the previous run of the incident's workflow continued as new; ``NO``: there was none."""

    # The failure, and the machines and copies that are left.

    generation: int
    """The newest generation that was launched: the current generation."""
    resume_step: int
    """The step at which the current generation began; -1: the script restores by itself."""
    lineage: list[tuple[int, int]]
    """The launches of the job's run, including this incident. Each entry is a generation and the step of its launch."""
    folder: str = ""
    """The disk checkpoint from which the job was first started; empty: none."""
    folder_step: int = -1
    """The step of that checkpoint."""
    save_every: int = 0
    """After how many steps the ranks saved last; 0: not known."""
    launches: list[tuple[int, int]] = Field(default_factory=list)
    """The launches of this incident: generation and step."""
    emptied: set[str] = Field(default_factory=set)
    """Machines that lost their memory since the last launch; an agent reports that only once."""
    bad: list[StateCopies] = Field(default_factory=list)
    """Copies that could not be used, with reasons."""
    unreached: list[StateCopies] = Field(default_factory=list)
    """The copies in ``bad`` that are only out of reach, and may be good."""
    verified: list[StateCopies] = Field(default_factory=list)
    """Own slots whose contents were compared with their checksums since the ranks ended."""
    farthest: int = -1
    """The number of steps that the current generation completed."""
    lost_from: int = -1
    """The farthest step that the job reached in any generation of this incident."""
    lost_steps: int | None = None
    """The number of steps that are computed again; None: not known."""
    nobody_knows: bool = False
    """Whether every machine that knew how far the job had progressed has lost its memory."""
    accepted_from: int | None = None
    """The oldest step from which an operator lets the job resume although newer steps may exist; None: no step."""
    accepted: str = ""
    """The operator who accepted that loss, and what is lost."""
    showing: Showing = Field(default_factory=Showing)
    """How the script shows its steps."""
    history: list[Failure] = Field(default_factory=list)
    """Earlier failures that are not solved, oldest first, without the current failure."""
    failures: list[Failure] = Field(default_factory=list)
    """The failures of this incident, oldest first; the last is the current failure."""
    attempts: int = 0
    """The number of reattempts since the incident began or was resumed."""
    failed_restores: int = 0
    """The number of failed restores since the last launch, or since an operator resumed."""
    asked: int = 0
    """How often storage was asked for copies since the incident began or was resumed."""
    findings: list[MachineFinding] = Field(default_factory=list)
    """The findings of the inspections at all stops, the newest stop first."""
    hold: str = ""
    """Why an operator has to decide how the job resumes; empty: no decision is needed."""
    waits: str = ""
    """Why machines that are to leave the job are still in it; empty: there are no such machines."""
    gone: dict[str, list[int]] = Field(default_factory=dict)
    """Silent machine that left the job since the last launch → the ranks that it ran."""
    joined: set[str] = Field(default_factory=set)
    """Machines that joined the job since the last launch: they have no copies, and have lost none."""
    book: VersionBook = Field(default_factory=VersionBook)
    """The versions of the job's code."""
    explained: bool = False
    """A finding of an inspection explains the current failure."""
    hinted: bool = False
    """The finding that explains the failure does not name the machine for sure: a test has to confirm it."""
    ladder: TriedRungs = Field(default_factory=TriedRungs)
    """The rungs that were tried so far."""
    trusted: int | None = None
    """The newest step that the running version can restore, since a version that was rolled back saved the later ones;
    None: any step."""
    version_changes: list[VersionChange] = Field(default_factory=list)
    """Other versions of the code that were launched in this incident."""
    launched: Launched | None = None
    """The answer to the last launch; None: nothing was launched."""
    hang: HangResult | None = None
    """The result of samples of the ranks, for the generation that it names."""
    slow: SlowResult | None = None
    """The result of a vote over the ranks, for the generation that it names."""
    evictions: EvictionState = Field(default_factory=EvictionState)
    operator: OperatorDecisions = Field(default_factory=OperatorDecisions)
    page: IncidentPage = Field(default_factory=IncidentPage)
    _chosen: tuple[Evidence, tuple[object, ...], Restore] | None = PrivateAttr(default=None)
    """The last result of ``choose``, with the facts that it depends on."""

    @property
    def job(self) -> str:
        """The name of the job."""
        return self.spec.name

    @property
    def placed(self) -> PlacedJob:
        """The job with its machines, for activities."""
        return PlacedJob(spec=self.spec, machines=self.machines, run=self.run)

    @property
    def runs(self) -> Runs:
        """The job's current run, and the earlier runs whose copies it may use."""
        return Runs(self.run, tuple(self.origin_runs))

    def shorten(self) -> None:
        """Drop old entries of the lists that only grow: the state of the next run of the workflow has to stay small."""
        self.lineage, self.launches = extended(self.lineage, []), extended(self.launches, [])
        self.history, self.failures = self.history[-FAILURES_KEPT:], first_and_last(self.failures)
        self.ladder.all_tried = self.ladder.all_tried[-TRIED_KEPT:]
        self.book.versions = {version.number: version for version in self.book.all()}
        page = self.page
        page.rejected, page.parked = page.rejected[-REJECTED_KEPT:], page.parked[-PARKED_KEPT:]
        if len(page.stages) > STAGES_KEPT:
            gap = StageRecord(name="…", seconds=0.0, found="further stages, see the ledger")
            page.stages = [*page.stages[: STAGES_KEPT // 2 - 1], gap, *page.stages[-STAGES_KEPT // 2 :]]

    def merge_evidence(self, evidence: Evidence) -> Evidence:
        """Record the evidence of a stop; return it with all machines that lost their memory since the last launch."""
        self.emptied |= set(evidence.emptied) - self.joined
        self.save_every = evidence.save_every or self.save_every
        newer = {(seen.machine, *seen.finding.key) for seen in evidence.findings}
        earlier = [seen for seen in self.findings if (seen.machine, *seen.finding.key) not in newer]
        self.findings = [*evidence.findings, *earlier[: max(FINDINGS_KEPT - len(evidence.findings), 0)]]
        if self.lineage and self.lineage[-1] == (evidence.generation, self.resume_step):
            damaged = found_damaged(evidence, self.resume_step, self.assignment)
            self.bad += [copies for copies in damaged if copies not in self.bad]
        return evidence.model_copy(update={"emptied": sorted(self.emptied)})

    def record_failure(self, failure: Failure) -> None:
        """Record a failure: the failure that opened the incident, or the failure of a reattempt."""
        policy = self.spec.policy
        if not self.failures:  # after a reattempt that failed, the job has made no progress
            unclear = [earlier for earlier in self.history if not earlier.explained]
            self.book.record_progress(failure, policy, unclear[-1] if unclear else None)
        if not self.failures and failure.symptom is not Symptom.UPDATE:
            self.history = still_counting(self.history, failure, policy)
        self.failures.append(failure)
        if blame(failure, explained=self.is_explained) is not Blame.OTHER:
            self.book.count_failure()

    def record_replacement(self, machines: Sequence[Machine], gone: Mapping[str, list[int]]) -> None:
        """Record that other machines have replaced some machines of the job.

        Args:
            machines: All machines of the job from now on.
            gone: Machines that left and did not answer → their ranks.
        """
        before = {machine.name for machine in self.machines}
        self.joined |= {machine.name for machine in machines} - before
        self.emptied -= before - {machine.name for machine in machines}
        self.gone.update(gone)
        self.machines = list(machines)
        self._chosen = None

    def record_failed_reattempt(self) -> None:
        """Record the current failure as unsolved, since its reattempt failed."""
        if self.failures[-1].symptom is not Symptom.UPDATE:
            self.history.append(self.failures[-1])

    def switch_version(self, change: VersionChange, now_ns: int) -> None:
        """Change to another version of the code from the next launch on. Earlier reattempts do not count against it."""
        self.book.switch_to(change.number, suspect=change.suspect, now_ns=now_ns)
        runs = self.book.versions[change.number].runs
        assert runs is not None  # a version that cannot run is never chosen
        self.spec, self.attempts = runs.applied(self.spec, change.number), 0

    @property
    def unsolved(self) -> frozenset[int]:
        """Generations whose failures are not solved, without failures that are blamed on a machine."""
        return frozenset(failure.generation for failure in self.history if not failure.explained)

    @property
    def is_explained(self) -> bool:
        """Return whether a machine is to blame for the current failure: it was lost, it left, or a finding names it."""
        return self.explained or self.is_handled

    @property
    def is_handled(self) -> bool:
        """Return whether a machine is to blame for the current failure, and no test has to confirm that any more."""
        named = self.explained and not self.hinted
        return named or bool(self.lost_machines() or self.joined)

    @property
    def failed_machine_left(self) -> bool:
        """Return whether a machine that failed a test or a replay has left since the last launch."""
        current = {machine.name for machine in self.machines}
        return bool(self.joined) and any(failed.machine not in current for failed in self.ladder.tested)

    def limit_to_readable(self, evidence: Evidence) -> None:
        """If the ranks could not restore a step that a rolled-back version saved, resume from before that version."""
        unfit = [end for end in evidence.exits if end.exception.split(":")[0].endswith(UNFIT_EXCEPTION)]
        step = older_state(self.book.all(), self.book.running, self.resume_step) if unfit else None
        if step is not None and self.launches:
            self.trusted, self._chosen = step, None

    @property
    def assignment(self) -> Assignment[str]:
        """The machines, by name, that run the job's ranks."""
        return self.spec.assignment([machine.name for machine in self.machines])

    def lost_machines(self) -> list[str]:
        """Return the machines that lost the ranks of the current generation; none if the first launch failed."""
        first = not self.launches and self.anomaly.symptom is Symptom.LAUNCH_FAILED
        return [] if first else sorted(self.emptied | self.gone.keys())

    def explain(self, evidence: Evidence) -> str:
        """Record which finding explains the current failure; return its cause as text, empty if it is not known."""
        end = first_failure(evidence.exits)
        findings = [*self.findings, *self.anomaly.findings]
        explained = explanation(findings, end, job=self.spec.name, seen_ns=self.anomaly.seen_ns)
        self.explained = explained is not None
        self.hinted = explained is not None and is_hint(explained.finding)
        if explained in self.findings:  # the finding that explains the failure is shown first
            self.findings = [explained, *(seen for seen in self.findings if seen != explained)]
        lost = set(self.lost_machines())
        if lost:
            ranks = {machine: ranks for machine, ranks in self.assignment.each() if machine in lost}
            ended = headline_of_loss(ranks, end, gone=self.gone)
        else:
            ended = headline_of(end) if end else ""
        return "; ".join(filter(None, [explained.headline if explained else "", ended]))

    def read_failure(self, evidence: Evidence, *, now_ns: int, first: bool) -> Failure:
        """Record from the evidence how far the job had progressed; return the current failure.

        Args:
            evidence: The evidence of the stop.
            now_ns: The current time.
            first: The failure opened the incident; False: it is the failure of a reattempt.
        """
        end = first_failure(evidence.exits)
        ranks = ((end.ranks, end.completed_steps >= 0, end.shown_steps) for end in evidence.exits)
        self.showing = showing_of(ranks, self.showing)
        completed = max((end.completed_steps for end in evidence.exits), default=-1)
        lost = self.lost_machines()
        if completed < 0 and lost:
            # No rank reported its completed steps, but a step that was saved was completed.
            valid = (copies.completed_steps for copies in self.usable(evidence) if copies.valid)
            completed = max(valid, default=-1)
            self.nobody_knows |= not is_remembered(evidence, lost, self.assignment)
        self.farthest = step = max(completed, self.resume_step)
        if lost:
            symptom, cause = Symptom.CRASH, MACHINE_LOST
        elif end is None:
            symptom = self.anomaly.symptom if first else Symptom.LAUNCH_FAILED
            cause = str(symptom)
            if first and self.anomaly.not_after is not None:
                step = self.anomaly.not_after  # the same fault returns at the step where it began
        else:
            if end.completed_steps >= 0:
                # A fault of a step returns at the step of the rank that failed; other ranks may be one step ahead.
                step = max(end.completed_steps, self.resume_step)
            return failure_of(end, generation=self.generation, step=step, now_ns=now_ns)
        # The number of steps that the ranks of a lost machine had shown is not known.
        shown = -1 if lost else max((end.shown_steps for end in evidence.exits), default=-1)
        named = lost or (self.anomaly.machines if first else [])
        return Failure(
            generation=self.generation,
            step=step,
            symptom=symptom,
            cause=cause,
            time_ns=now_ns,
            shown=shown,
            machine=named[0] if len(named) == 1 else "",
        )

    def usable(self, evidence: Evidence) -> list[StateCopies]:
        """Return the copies of the job's own line; those that failed are marked as not valid."""
        return usable(evidence.held, self.lineage, self.bad, self.runs, verified=self.verified)

    def choose(self, evidence: Evidence) -> Restore:
        """Return the step from which the job would resume, with its copies.

        The result is kept, since a workflow asks for it several times and it takes long with thousands of machines.
        """
        facts = (list(self.lineage), list(self.bad), list(self.verified))
        if self._chosen is None or self._chosen[0] is not evidence or self._chosen[1] != facts:
            self._chosen = evidence, facts, self._choose(evidence)
        return self._chosen[2]

    def _choose(self, evidence: Evidence) -> Restore:
        copies, limit = self.usable(evidence), self.not_after
        if self.trusted is not None:
            copies = [each for each in copies if each.completed_steps <= self.trusted]
        if limit is not None:
            trusted = self._newest_of([each for each in copies if each.completed_steps <= limit], limit)
            if trusted.step > 0:
                reason = f"{trusted.reason}; later steps are not trusted: {self.anomaly.headline}"
                return replace(trusted, reason=reason)
        return self._newest_of(copies, None)

    def _newest_of(self, copies: Sequence[StateCopies], limit: int | None) -> Restore:
        restore = choose_restore(copies, self.assignment, held_before=self.resume_step >= 0)
        if self.folder and restore.step < self.folder_step and (limit is None or self.folder_step <= limit):
            reason = f"{restore.reason}; the job begins again from the folder from which it was started"
            return replace(restore, step=self.folder_step, reason=reason, copies=(), folder=self.folder)
        return restore

    @property
    def not_after(self) -> int | None:
        """The newest step without the fault, if the fault is in the saved state; None: every step is trusted.

        The limit concerns only steps of the generation with the fault. If the first step of that generation was bad,
        the state that it restored was bad, or always leads to the fault. In both cases an older state is needed.
        """
        limit = self.anomaly.not_after
        if limit is None or self.launches:
            return None
        return limit if limit > self.resume_step else self.resume_step - 1

    def accept(self, restore: Restore, doubt: Doubt, operator: str) -> str:
        """Record that an operator accepts the loss of newer steps; return the text that is recorded."""
        self.accepted_from = max(restore.step, 0)
        self.accepted = f"{operator} lets the job resume {restore.origin}, although {doubt.text}"
        return self.accepted

    def accepts(self, restore: Restore) -> bool:
        """Return whether an operator accepted a restart from this step or from an older one."""
        return self.accepted_from is not None and max(restore.step, 0) >= self.accepted_from

    def record_restored(self, restored: Restored) -> bool:
        """Record the result of bringing copies to their ranks; return whether other copies have to be chosen.

        A copy that failed is not chosen again, so the number of rounds is limited.
        """
        failed = [*restored.failed, *restored.unreached]
        self.bad += failed
        self.unreached += restored.unreached
        self.verified += restored.verified
        return bool(failed)

    def begin_again(self) -> None:
        """Reset the counts and the ladder. Copies that could not be used may be chosen again."""
        self.history, self.attempts, self.asked, self.hold, self.waits = [], 0, 0, "", ""
        self.trusted, self._chosen = None, None
        self.failed_restores = 0
        self.ladder.begin_again()
        self.bad.clear()
        self.unreached.clear()
        self.verified.clear()

    def try_unreached_again(self) -> None:
        """Let copies that were out of reach be chosen again, since they may be reachable after some time."""
        self.bad = [copies for copies in self.bad if copies not in self.unreached]
        self.unreached.clear()

    def record_launch(self, restore: Restore) -> None:
        """Record the launch of the next generation, and the number of steps that it computes again."""
        if self.failures and self.is_handled:
            self.failures[-1] = self.failures[-1].model_copy(update={"explained": True})
        self.lost_from = max(self.lost_from, self.farthest)
        gone = restore.step == 0 and self.farthest == self.resume_step > 0
        if self.nobody_knows or gone:
            # The checkpoints are gone, so the number of steps that the lost generation completed is not known.
            self.lost_steps = None
        elif self.lost_from >= 0 and restore.step >= 0:
            self.lost_steps = max(self.lost_from - restore.step, 0)
        self.generation += 1
        self.failed_restores = 0
        self.resume_step = restore.step
        launch = (self.generation, FROM_NOTHING if restore.folder else restore.step)
        self.launches.append(launch)
        self.lineage.append(launch)
        self.emptied.clear()
        self.gone.clear()
        self.joined.clear()
        self.verified.clear()
        self.accepted_from = None  # the accepted loss does not concern steps of the new generation


def first_and_last(failures: list[Failure]) -> list[Failure]:
    """Return the failure that opened an incident, and its last failures."""
    return failures if len(failures) <= FAILURES_KEPT else [failures[0], *failures[1 - FAILURES_KEPT :]]
