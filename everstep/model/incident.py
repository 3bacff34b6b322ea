"""Defines a failure as it is reported, and the incident that handles it.

These models are sent through Temporal and are stored in histories and in the ledger, so fields are only added, with
defaults.
"""

from __future__ import annotations

from pydantic import Field

from everstep.model.eviction import EvictAnswer
from everstep.model.evidence import Classification
from everstep.model.finding import MachineFinding
from everstep.model.hang import HangResult
from everstep.model.ladder import TriedRung
from everstep.model.launch import Confirmation, Launched, Showing
from everstep.model.machine import Machine
from everstep.model.message import Model, Words
from everstep.model.slow import SlowResult
from everstep.model.stage import StageRecord
from everstep.model.version import JobVersion


class Symptom(Words):
    """What an anomaly looks like from outside."""

    CRASH = "crash"
    """A rank ended by a signal or with an exit code other than 0."""
    EXCEPTION = "exception"
    """A rank ended with a Python exception."""
    CONNECTION_LOST = "connection lost"
    """A rank ended with an exception because a peer could not be reached any more, and no rank ended by itself."""
    EARLY_EXIT = "early exit"
    """A rank left with code 0 while the job was not over."""
    HANG = "hang"
    """No rank has completed a step for too long."""
    UNSAVED = "saves stopped"
    """Ranks step, but the newest checkpoint in memory is too old."""
    NOT_FINITE = "not finite"
    """Ranks step, but the loss or the gradient norm is NaN or infinite."""
    LAUNCH_FAILED = "launch failed"
    """The ranks could not be started."""
    MACHINE_FAULT = "machine fault"
    """An inspection reports a faulty machine while its ranks step."""
    MACHINE_SILENT = "machine silent"
    """A machine does not answer, and no rank of the job steps."""
    SLOW = "slow"
    """Steps take longer than they did."""
    UPDATE = "update"
    """Nothing failed: another version of the code has to run."""


STILL_RUNNING = frozenset({Symptom.MACHINE_FAULT, Symptom.SLOW})
"""Symptoms with which the job keeps running until its incident stops it."""


class Anomaly(Model):
    """A fault as a watcher reports it to the job."""

    id: str
    """Id of the observation from which the anomaly follows. It is the correlation id from the agent to the incident."""
    generation: int
    symptom: Symptom
    headline: str
    """One line, e.g. ``rank 5 on m2 ended by SIGKILL``."""
    ranks: list[int] = Field(default_factory=list)
    machines: list[str] = Field(default_factory=list)
    seen_ns: int = 0
    """When the machine noticed the fault, nanoseconds of the wall clock."""
    quiet_s: float = 0.0
    """Time without a step until ``seen_ns``, seconds. The fault began that long before its detection."""
    not_after: int | None = None
    """The newest state that may be restored, in completed steps, since later states are suspect; None: any state may
    be restored."""
    rule: str = ""
    """The rule that detected the fault (``everstep.decisions.detect.rules``); empty: no rule did, e.g. a launch
    failed."""
    findings: list[MachineFinding] = Field(default_factory=list)
    """The findings on which the anomaly is based; only the first findings if very many machines share the fault."""
    more_findings: int = 0
    """Number of findings that ``findings`` leaves out."""
    alike: dict[str, int] = Field(default_factory=dict)
    """Reason code → the number of machines with such a fault, of all findings."""
    classification: Classification | None = None
    """How the end of the rank is classified; None: no rank ended."""


class Failure(Model):
    """A failure of the job, kept for decisions about later failures."""

    generation: int
    step: int
    """Completed steps when it failed; -1: not known."""
    symptom: Symptom
    cause: str
    """Signature of the cause, equal for equal causes, e.g. ``SIGKILL`` or ``ValueError``."""
    time_ns: int = 0
    shown: int = -1
    """Steps that the failed process had shown; -1: not known. It is used if ``step`` is not known."""
    classification: Classification | None = None
    """How the end of the first failed rank is classified; None: no rank failed, or it is not known."""
    machine: str = ""
    """The machine of the first failed rank, or the machine that the anomaly names; empty: not known."""
    explained: bool = False
    """A machine caused the failure, and was handled before the next launch."""
    over_ns: int = 0
    """When the job stepped again, nanoseconds of the wall clock; 0: not known."""


class IncidentReport(Model):
    """The result of an incident, for a person on call. The fields are shown in this order."""

    headline: str
    resolution: str
    """``reattempt``, ``eviction``, ``update``, ``rollback``, ``resumed by operator``, ``running, not confirmed``,
    ``observed``, ``abandoned`` or ``closed from outside``."""
    cause: str
    step: int
    lost_steps: int | None
    evicted: list[str]
    """Machines that were evicted."""
    stages: list[str]
    generation: int
    recovered: bool
    """Whether the job runs again; ``confirmed`` is True if it was also seen to step."""
    seconds: float | None
    """Seconds from the fault, as the machine noticed it, to the first step of all ranks; None: no step was seen."""
    failures: list[Failure]
    confirmation: Confirmation | None = None
    timings: list[StageRecord] = Field(default_factory=list)
    resume_step: int = -1
    """The step from which the newest generation began; -1: the script restores by itself."""
    save_every: int = 0
    """After how many steps the ranks saved last before the incident; 0: not known."""
    lineage: list[tuple[int, int]] = Field(default_factory=list)
    """Number and first step of each generation that was launched."""
    accepted_loss: str = ""
    """The operator who accepted that newer state may be lost, and the state that may be lost; empty: that was not
    necessary."""
    confirmed: bool = True
    """Whether the ranks were seen to step again, in the way in which the script showed its steps before."""
    showing: Showing = Field(default_factory=Showing)
    """How the script shows its steps, as far as known."""
    first_step_s: float = 0.0
    """Seconds from the last launch to the first step of all ranks; 0: no step was seen."""
    unwritten: int = 0
    """Position of the last ledger entry, which the job has to write because the ledger was down; 0: it is written."""
    launched: Launched | None = None
    """The newest launch, if the job has to write its ledger entry too; None: it is written."""
    findings: list[MachineFinding] = Field(default_factory=list)
    """Findings of inspections, the worst first."""
    classification: Classification | None = None
    """Classification of the failure that opened the incident; None: no rank failed by itself."""
    asked: list[EvictAnswer] = Field(default_factory=list)
    """The answers of the rules of eviction, "no" included (``everstep policy explain``)."""
    machines: list[Machine] = Field(default_factory=list)
    """All machines of the job, in order, if they changed; empty: they did not change."""
    evicted_ns: list[int] = Field(default_factory=list)
    """Times of evictions that count for the breaker, nanoseconds of the wall clock."""
    approved: dict[str, str] = Field(default_factory=dict)
    """Machine that left because an operator approved it → the operator, and the note."""
    version: int = 0
    """Number of the version that the job runs; 0: not known."""
    versions: list[JobVersion] = Field(default_factory=list)
    """Versions that changed in this incident, as they are now."""
    hang: HangResult | None = None
    slow: SlowResult | None = None
    """The verdict of a vote; None: there was none."""
    tried: list[TriedRung] = Field(default_factory=list)
    """The rungs of the ladder that were tried, in order, with their outcomes."""
    begun_again_ns: int = 0
    """When an operator last resumed the incident or gave it other code, nanoseconds; earlier attempts do not count."""


CLOSED_OUTSIDE = "closed from outside"
"""Resolution of an incident that did not end by itself: it was terminated or cancelled, or its workflow failed."""


class Left(Model):
    """The effects of an incident that was closed from outside."""

    how: str
    """How the incident was closed and by whom, e.g. ``terminated by ada: too slow``."""
    known: bool = True
    """Whether the incident's history still exists; without the history, the effects are unknown."""
    launches: list[tuple[int, int]] = Field(default_factory=list)
    """Number and first step of each generation that it launched, or began to launch."""
    resume_step: int = -1
    """The step from which the newest of these generations began; -1: the script restores by itself."""
    launched: Launched | None = None
    """The newest launch, if it succeeded and nothing was stopped since."""
    emptied: list[str] = Field(default_factory=list)
    """Machines that reported since the newest launch that they lost their memory; they report it only once."""
