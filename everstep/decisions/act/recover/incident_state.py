"""The state of one incident: the failure, the remaining machines and copies, the attempts, and the cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr

from everstep.decisions.act.progress import still_counting
from everstep.decisions.act.recover.climbed import Climbed
from everstep.decisions.act.recover.confirm import showing_of
from everstep.decisions.act.recover.doubt import Doubt, Known, doubt_of, remembering
from everstep.decisions.act.recover.rules import UNFIT_EXCEPTION, is_unreadable, is_unsound
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
from everstep.decisions.keep.choose_restore import Restore, choose_restore, copy_of
from everstep.decisions.keep.lineage import FROM_NOTHING, Runs, extended, found_damaged, usable
from everstep.model.eviction import EvictionState
from everstep.model.evidence import Evidence, RankExit
from everstep.model.finding import MachineFinding
from everstep.model.hang import HangResult
from everstep.model.incident import Anomaly, Failure, Symptom
from everstep.model.job import JobSpec, PlacedJob
from everstep.model.launch import Launched, Showing
from everstep.model.machine import Assignment, Machine
from everstep.model.message import Words
from everstep.model.slow import SlowResult
from everstep.model.stage import StageRecord
from everstep.model.state_copy import CopyToRestore, Restored, StateCopy

FINDINGS_KEPT = 64
"""Findings of inspections that an incident keeps."""
FAILURES_KEPT = 100
STAGES_KEPT = 200
PARKED_KEPT = 500
REJECTED_KEPT = 5
TRIED_KEPT = 100


class IncidentPage(BaseModel):
    """The part of an incident's page about its past; the workflow adds the current stage."""

    model_config = ConfigDict(extra="allow")

    headline: str = ""
    """The cause of the incident, as far as it is known."""
    stages: list[StageRecord] = Field(default_factory=list)
    """Stages that are over."""
    rejected: list[str] = Field(default_factory=list)
    """Messages of operators that made no sense, with the reason."""
    parked: list[tuple[int, int]] = Field(default_factory=list)
    """The times at which the job was parked: begin and end, in nanoseconds."""
    noted: int = 0
    """Entries that were written into the ledger."""
    picture: str = ""
    """The activity of each rank when its stacks were sampled, as text; empty: they were not sampled."""
    replays: int = 0
    """How often the job was replayed; the page links to the last replay."""


class OperatorSaid(BaseModel):
    """The decisions of operators about an incident."""

    model_config = ConfigDict(extra="allow")

    resumed: bool = False
    """An operator has just resumed the job: the next plan goes by that."""
    resumed_by: str = ""
    """The last operator who resumed the job; empty: none did."""
    begun_again_ns: int = 0
    """When the job last started with a fresh ladder, since it was resumed or urgent code arrived; 0: never."""


class Continued(Words):
    """The point at which an incident continued as new."""

    NO = ""
    PARKED = "parked"
    """The incident was parked and resumes: the failure is known, and the machines are asked once more."""
    REATTEMPTED = "reattempted"
    """A reattempt had failed, and what failed now is not known yet."""


class IncidentState(BaseModel):
    """All that an incident knows and decides by: it outlives every run of the incident's workflow.

    The job's workflow fills it in when it opens the incident, and a run that continues as new hands it on whole. It is
    mutable, and has neither I/O nor a clock.
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
    """Id of the job's run; see ``everstep.model.run_id``."""
    origin_runs: list[str] = Field(default_factory=list)
    """Ids of the earlier runs whose copies the job was started from."""
    first_step_s: float = 0.0
    """The longest time from a start of the job to its first step, seconds; 0: no start reached a step."""
    alerts: list[MachineFinding] = Field(default_factory=list)
    """Network alerts of the job's machines that were reported before."""
    evicted_ns: list[int] = Field(default_factory=list)
    """Times of earlier evictions from the job without an operator: one entry for each machine."""
    only_tells: bool = False
    """The incident reports a fault and does nothing about it; the job does not wait for it."""
    continued: Continued = Continued.NO
    """How the run of the workflow before this one ended."""

    # The failure, and the machines and copies that are left.

    generation: int
    """The newest that was launched."""
    resume_step: int
    """The step at which that generation began; -1: the script restores by itself."""
    lineage: list[tuple[int, int]]
    """The job's line, this incident's launches included."""
    folder: str = ""
    """Checkpoint on disk from which the job was started first; empty: none."""
    folder_step: int = -1
    launches: list[tuple[int, int]] = Field(default_factory=list)
    """The launches of this incident: generation and step."""
    emptied: set[str] = Field(default_factory=set)
    """Machines that lost their copies of the generation; an agent reports that once."""
    bad: list[StateCopy] = Field(default_factory=list)
    """Copies that could not be used, with reasons."""
    unreached: list[StateCopy] = Field(default_factory=list)
    """Those of them that may be good."""
    verified: list[CopyToRestore] = Field(default_factory=list)
    """Own slots whose contents were compared since the ranks ended."""
    farthest: int = -1
    """Completed steps of the generation at hand."""
    lost_from: int = -1
    """The farthest step that the job reached in any generation of this incident."""
    lost_steps: int | None = None
    """Steps that are computed anew; None: not known."""
    nobody_knows: bool = False
    """Every machine that knew how far the job had progressed has lost that knowledge."""
    accepted_from: int | None = None
    """An operator lets the job resume from this step or a later one, although newer steps may exist; None: no."""
    accepted: str = ""
    """The operator who accepted that step, and the accepted loss."""
    showing: Showing = Field(default_factory=Showing)
    """How the script shows its steps."""
    history: list[Failure] = Field(default_factory=list)
    """Earlier failures that are not solved, oldest first, without the current failure."""
    failures: list[Failure] = Field(default_factory=list)
    """The failures of this incident, oldest first; the last is the current failure."""
    attempts: int = 0
    """Reattempts so far, since an operator resumed."""
    failed_restores: int = 0
    """Restores that failed since the last launch, or since an operator resumed."""
    asked: int = 0
    """How often storage was asked for copies since the incident began, or was resumed."""
    findings: list[MachineFinding] = Field(default_factory=list)
    """The results of the machine inspections at all stops, the newest stop first."""
    hold: str = ""
    """Why an operator has to decide how the job resumes; empty: no decision is needed."""
    waits: str = ""
    """Why machines that are to leave the job are still in it; empty: there are none."""
    gone: dict[str, list[int]] = Field(default_factory=dict)
    """Silent machine that left the job since the launch of the generation at hand → the ranks that it ran."""
    joined: set[str] = Field(default_factory=set)
    """Machines that joined the job since that launch: they have no copies, and have lost none."""
    book: VersionBook = Field(default_factory=VersionBook)
    """The versions of the job's code."""
    explained: bool = False
    """An inspection names what explains the failure at hand."""
    hinted: bool = False
    """The inspection does not name the machine for sure: a test has to."""
    ladder: Climbed = Field(default_factory=Climbed)
    """The rungs that were tried so far."""
    trusted: int | None = None
    """The newest step that the running version can restore: later steps were saved by a version that was rolled back.
    """
    version_changes: list[VersionChange] = Field(default_factory=list)
    """Other versions of the code that were launched in this incident."""
    launched: Launched | None = None
    """The answer to the last launch; None: nothing was launched."""
    hang: HangResult | None = None
    """The result of samples of the ranks, for the generation that it names."""
    slow: SlowResult | None = None
    """The result of a vote over the ranks, for the generation that it names."""
    evictions: EvictionState = Field(default_factory=EvictionState)
    operator: OperatorSaid = Field(default_factory=OperatorSaid)
    page: IncidentPage = Field(default_factory=IncidentPage)
    _chosen: tuple[Evidence, tuple[object, ...], Restore] | None = PrivateAttr(default=None)
    """The last choice, with what it rests on."""

    @property
    def job(self) -> str:
        """The name of the job."""
        return self.spec.name

    @property
    def placed(self) -> PlacedJob:
        """The job with its machines, as activities get it."""
        return PlacedJob(spec=self.spec, machines=self.machines, run=self.run)

    @property
    def runs(self) -> Runs:
        """The job's current run, and the earlier runs whose copies it may use."""
        return Runs(self.run, tuple(self.origin_runs))

    def cut(self) -> None:
        """Forget what is old of the lists that only grow, before the state is handed on: it has to stay small."""
        self.lineage, self.launches = extended(self.lineage, []), extended(self.launches, [])
        self.history, self.failures = self.history[-FAILURES_KEPT:], first_and_last(self.failures)
        self.ladder.all_tried = self.ladder.all_tried[-TRIED_KEPT:]
        self.book.versions = {one.number: one for one in self.book.all()}
        page = self.page
        page.rejected, page.parked = page.rejected[-REJECTED_KEPT:], page.parked[-PARKED_KEPT:]
        if len(page.stages) > STAGES_KEPT:
            gap = StageRecord(name="…", seconds=0.0, found="further stages, see the ledger")
            page.stages = [*page.stages[: STAGES_KEPT // 2 - 1], gap, *page.stages[-STAGES_KEPT // 2 :]]

    def merge_evidence(self, evidence: Evidence) -> Evidence:
        """Merge the evidence of a stop; return it with all machines that lost their copies."""
        self.emptied |= set(evidence.emptied) - self.joined
        known = {(seen.machine, *seen.finding.key) for seen in evidence.findings}
        earlier = [seen for seen in self.findings if (seen.machine, *seen.finding.key) not in known]
        self.findings = [*evidence.findings, *earlier][:FINDINGS_KEPT]
        if self.lineage and self.lineage[-1] == (evidence.generation, self.resume_step):
            damaged = found_damaged(evidence, self.resume_step)
            found = set(self.bad)
            self.bad += [copy for copy in damaged if copy not in found]
        return evidence.model_copy(update={"emptied": sorted(self.emptied)})

    def failed(self, failure: Failure) -> None:
        """Record a failure: the failure that opened the incident, or a further failure after a reattempt."""
        policy = self.spec.policy
        if not self.failures:  # else the job came to no step since the one before
            unclear = [one for one in self.history if not one.explained]
            self.book.came_to(failure, policy, unclear[-1] if unclear else None)
        if not self.failures and failure.symptom is not Symptom.UPDATE:
            self.history = still_counting(self.history, failure, policy)
        self.failures.append(failure)
        if blame(failure, explained=self.is_explained) is not Blame.OTHER:
            self.book.count_failure()

    def clear_code(self) -> None:
        """Clear the code after a rollback that did not help, except if a machine is to blame for the failure: once a
        machine is gone, the other ranks may raise any error, until its loss is known."""
        if not self.is_dealt_with:
            self.ladder.acquit(self.failures[-1], self.book, self.unsolved)

    def replaced(self, machines: Sequence[Machine], gone: Mapping[str, list[int]]) -> None:
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

    def reattempted_in_vain(self) -> None:
        """Record the current failure as unsolved: its reattempt failed, and another failure follows."""
        if self.failures[-1].symptom is not Symptom.UPDATE:
            self.history.append(self.failures[-1])

    def come(self, change: VersionChange, now_ns: int) -> None:
        """Choose another version of the code for the next launch: earlier failures do not count against it."""
        self.book.come(change.number, suspect=change.suspect, now_ns=now_ns)
        runs = self.book.versions[change.number].runs
        assert runs is not None  # else it would not have been chosen
        self.spec, self.attempts = runs.applied(self.spec, change.number), 0

    @property
    def unsolved(self) -> frozenset[int]:
        """Generations whose failures are not solved, and of which no machine was to blame that is dealt with."""
        return frozenset(one.generation for one in self.history if not one.explained)

    @property
    def is_explained(self) -> bool:
        """A machine is to blame for the failure at hand: it is lost, left the job, or an inspection names it."""
        return self.explained or self.is_dealt_with

    @property
    def is_dealt_with(self) -> bool:
        """A machine is to blame for the current failure, and no test of the machine is left to do."""
        named = self.explained and not self.hinted
        return named or bool(self.lost_machines() or self.joined)

    @property
    def found_out(self) -> bool:
        """Whether a machine that failed a test or a replay has left since the last launch."""
        here = {machine.name for machine in self.machines}
        return bool(self.joined) and any(one.machine not in here for one in self.ladder.tested)

    def distrust_what_does_not_fit(self, evidence: Evidence) -> None:
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
        """Machines that lost the ranks of the generation at hand, if it was ever launched there."""
        first = not self.launches and self.anomaly.symptom is Symptom.LAUNCH_FAILED
        return [] if first else sorted(self.emptied | self.gone.keys())

    def headline(self, evidence: Evidence) -> str:
        """The cause of the failure as the evidence shows it; empty: the evidence does not show it."""
        end = first_failure(evidence.exits)
        found = [*self.findings, *self.anomaly.findings]
        explained = explanation(found, end, job=self.spec.name, seen_ns=self.anomaly.seen_ns)
        self.explained = explained is not None
        self.hinted = explained is not None and is_hint(explained.finding)
        if explained in self.findings:  # what explains the end is told first
            self.findings = [explained, *(seen for seen in self.findings if seen != explained)]
        seen = self._seen(end)
        return "; ".join(filter(None, [explained.headline if explained else "", seen]))

    def _seen(self, end: RankExit | None) -> str:
        """Return the state of ranks and machines as seen from outside."""
        if lost := self.lost_machines():
            gone = set(lost)
            ranks = {machine: ranks for machine, ranks in self.assignment.each() if machine in gone}
            return headline_of_loss(ranks, end, gone=self.gone)
        return headline_of(end) if end else ""

    def failure(self, evidence: Evidence, *, now_ns: int, first: bool) -> Failure:
        """Return the current failure; ``first``: the fault that opened the incident, not a reattempt."""
        end = first_failure(evidence.exits)
        ranks = ((end.rank, end.completed_steps >= 0, end.shown_steps) for end in evidence.exits)
        self.showing = showing_of(ranks, self.showing)
        completed = max((end.completed_steps for end in evidence.exits), default=-1)
        lost = self.lost_machines()
        if completed < 0 and lost:
            # No rank says how far it had come. What was saved was completed.
            completed = max((copy.completed_steps for copy in self.usable(evidence) if copy.valid), default=-1)
            self.nobody_knows |= not remembering(evidence, lost)
        self.farthest = step = max(completed, self.resume_step)
        if lost:
            symptom, cause = Symptom.CRASH, MACHINE_LOST
        elif end is None:
            symptom = self.anomaly.symptom if first else Symptom.LAUNCH_FAILED
            cause = str(symptom)
            if first and self.anomaly.not_after is not None:
                step = self.anomaly.not_after  # where it went wrong, which is what comes again
        else:
            if end.completed_steps >= 0:
                # The culprit's own step is what comes again when the fault is in the step; its peers may be one ahead.
                step = max(end.completed_steps, self.resume_step)
            return failure_of(end, generation=self.generation, step=step, now_ns=now_ns)
        # How many steps the ranks of a lost machine had shown is not known.
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

    def usable(self, evidence: Evidence) -> list[StateCopy]:
        """The copies of the job's own line; those that failed are marked."""
        return usable(evidence.held, self.lineage, self.bad, self.runs, verified=self.verified)

    def choose(self, evidence: Evidence) -> Restore:
        """Choose the step from which the job would resume, and its copies."""
        # A workflow asks for the same choice several times, and with thousands of machines each one takes long.
        known = (list(self.lineage), list(self.bad), list(self.verified))
        if self._chosen is None or self._chosen[0] is not evidence or self._chosen[1] != known:
            self._chosen = evidence, known, self._choose(evidence)
        return self._chosen[2]

    def _choose(self, evidence: Evidence) -> Restore:
        copies, limit = self.usable(evidence), self.not_after
        if self.trusted is not None:
            copies = [copy for copy in copies if copy.completed_steps <= self.trusted]
        if limit is not None:
            trusted = self._newest_of([copy for copy in copies if copy.completed_steps <= limit], limit)
            if trusted.step > 0:
                reason = f"{trusted.reason}; later ones are not trusted: {self.anomaly.headline}"
                return replace(trusted, reason=reason)
        return self._newest_of(copies, None)

    def _newest_of(self, copies: Sequence[StateCopy], limit: int | None) -> Restore:
        restore = choose_restore(copies, self.assignment, held_before=self.resume_step >= 0)
        if self.folder and restore.step < self.folder_step and (limit is None or self.folder_step <= limit):
            reason = f"{restore.reason}; it begins again where it was started from"
            return replace(restore, step=self.folder_step, reason=reason, copies=(), folder=self.folder)
        return restore

    @property
    def not_after(self) -> int | None:
        """The newest step that is trusted if the fault is in the state; None: every step is trusted.

        The limit concerns steps saved by the generation with the fault, not later ones. A generation whose very first
        step was bad began with a bad state, or with a state that always leads to the fault: then an older step is
        needed.
        """
        limit = self.anomaly.not_after
        if limit is None or self.launches:
            return None
        return limit if limit > self.resume_step else self.resume_step - 1

    def doubt(self, evidence: Evidence, restore: Restore) -> Doubt | None:
        """Return the newer steps that may exist beyond the step of the restart; None: there are none."""
        known = Known(
            held=self.usable(evidence),
            unreached=self.unreached,
            evidence=evidence,
            assignment=self.assignment,
            resume_step=self.resume_step,
            policy=self.spec.checkpoint,
            not_after=min((one for one in (self.not_after, self.trusted) if one is not None), default=None),
        )
        in_vain = is_unreadable(restore.step, self.trusted) or is_unsound(restore.step, self.not_after)
        return doubt_of(0 if in_vain else restore.step, known)

    def accept(self, restore: Restore, doubt: Doubt, who: str) -> str:
        """An operator gives up what may be newer; returns what is recorded."""
        self.accepted_from = max(restore.step, 0)
        self.accepted = f"{who} lets the job go on {restore.origin}, although {doubt.text}"
        return self.accepted

    def accepts(self, restore: Restore) -> bool:
        """Return whether an operator accepted this step or an older one."""
        return self.accepted_from is not None and max(restore.step, 0) >= self.accepted_from

    def record_restored(self, restored: Restored) -> bool:
        """Record the result of bringing copies; return whether another choice has to be made.

        Each copy that failed is left out from then on, so every round has fewer copies and the rounds end.
        """
        failed = [*restored.failed, *restored.unreached]
        self.bad += failed
        self.unreached += restored.unreached
        self.verified += restored.verified
        return bool(failed)

    def begin_again(self) -> None:
        """An operator resumed: reset the counts, and try again what could not be reached."""
        self.history, self.attempts, self.asked, self.hold, self.waits = [], 0, 0, "", ""
        self.trusted, self._chosen = None, None
        self.failed_restores = 0
        self.ladder.begin_again()
        self.bad.clear()
        self.unreached.clear()
        self.verified.clear()

    def try_unreached_again(self) -> None:
        """Some time has passed: copies that could not be brought may be reachable now."""
        stuck = {copy_of(copy) for copy in self.unreached}
        self.bad = [copy for copy in self.bad if copy_of(copy) not in stuck]
        self.unreached.clear()

    def launch(self, restore: Restore) -> None:
        """Record the launch of the next generation: its first step, and the steps that it computes anew."""
        if self.failures and self.is_dealt_with:
            self.failures[-1] = self.failures[-1].model_copy(update={"explained": True})
        self.lost_from = max(self.lost_from, self.farthest)
        gone = restore.step == 0 and self.farthest == self.resume_step > 0
        if self.nobody_knows or gone:
            # The checkpoints are gone, and with them what would say how far the job had come since it was resumed.
            self.lost_steps = None
        elif self.lost_from >= 0 and restore.step >= 0:
            self.lost_steps = max(self.lost_from - restore.step, 0)
        self.generation += 1
        self.failed_restores = 0
        self.resume_step = restore.step
        begun = (self.generation, FROM_NOTHING if restore.folder else restore.step)
        self.launches.append(begun)
        self.lineage.append(begun)
        self.emptied.clear()
        self.gone.clear()
        self.joined.clear()
        self.verified.clear()
        self.accepted_from = None  # what the new generation saves was not given up


def first_and_last(failures: list[Failure]) -> list[Failure]:
    """Return the failure that opened an incident, and the last failures."""
    return failures if len(failures) <= FAILURES_KEPT else [failures[0], *failures[1 - FAILURES_KEPT :]]
