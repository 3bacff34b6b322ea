"""What is seen of a failure, and what an incident made of it.

These models cross Temporal and are stored in histories and in the ledger:
fields are only added, with defaults.
"""

from __future__ import annotations

from pydantic import Field

from everstep.model.eviction import EvictAnswer
from everstep.model.evidence import Classification
from everstep.model.finding import MachineFinding
from everstep.model.hang import HangFound
from everstep.model.ladder import Tried
from everstep.model.launch import Confirmation, Launched, Showing
from everstep.model.machine import Machine
from everstep.model.message import Model, Words
from everstep.model.slow import SlowFound
from everstep.model.stage import StageRecord
from everstep.model.version import JobVersion


class Symptom(Words):
    """What an anomaly looks like from outside."""

    CRASH = "crash"
    """A rank ended by a signal or with an exit code other than 0."""
    USER_ERROR = "user error"
    """A rank ended with a Python exception."""
    CONNECTION_LOST = "connection lost"
    """A rank ended with an exception because a peer could not be reached any more, and no rank ended by itself."""
    EARLY_EXIT = "early exit"
    """A rank left with code 0 while the job was not over."""
    HANG = "hang"
    """No rank completed a step for too long."""
    UNSAVED = "saves stopped"
    """Steps go on, and the newest checkpoint in memory is too old."""
    NOT_FINITE = "not finite"
    """The loss or the gradient norm is NaN or infinite, while steps go on."""
    LAUNCH_FAILED = "launch failed"
    """The ranks could not be started."""
    MACHINE_FAULT = "machine fault"
    """An inspection found a machine faulty while its ranks go on."""
    MACHINE_SILENT = "machine silent"
    """Nothing is heard of a machine, and no rank of the job steps."""
    SLOW = "slow"
    """Steps go on, and take longer than they did."""
    UPDATE = "update"
    """Nothing failed: another version of the code is to run."""


GOES_ON = frozenset({Symptom.MACHINE_FAULT, Symptom.SLOW})
"""With these the job goes on until its incident says otherwise."""


class Anomaly(Model):
    """One fault as a watcher reports it to the job."""

    id: str
    """Id of the observation that it follows from: the correlation id from agent to incident."""
    generation: int
    symptom: Symptom
    headline: str
    """One line, e.g. ``rank 5 on m2 ended by SIGKILL``."""
    ranks: list[int] = Field(default_factory=list)
    machines: list[str] = Field(default_factory=list)
    seen_ns: int = 0
    """When the machine saw it, nanoseconds of the wall clock."""
    quiet_s: float = 0.0
    """How long no step had been seen by then, seconds: the job had stopped earlier than it was seen."""
    not_after: int | None = None
    """The state to go on from is of this many completed steps at most: later ones are not to be trusted. None: any."""
    rule: str = ""
    """Name of the rule that found it (``everstep.decisions.detect.rules``); empty: none did, e.g. a launch failed."""
    findings: list[MachineFinding] = Field(default_factory=list)
    """What inspections said, where it rests on that; of very many the first."""
    more_findings: int = 0
    """How many more they said."""
    classification: Classification | None = None
    """Of the rank that ended; None: none did, or the release that wrote it did not say."""


class Failure(Model):
    """A failure of the job, as kept for the decision about the next one."""

    generation: int
    step: int
    """Completed steps when it failed; -1: unknown."""
    symptom: Symptom
    cause: str
    """Signature of the cause, equal for equal causes, e.g. ``SIGKILL`` or ``ValueError``."""
    time_ns: int = 0
    shown: int = -1
    """Steps that the process that failed had shown; -1: not known. Says the place where ``step`` does not."""
    classification: Classification | None = None
    """Of the rank that failed first; None: none did, or it is not known."""
    machine: str = ""
    """On which that rank ran, or the one that is named; empty: not known."""
    explained: bool = False
    """A machine was to blame, and was dealt with before the next launch."""
    over_ns: int = 0
    """When the job stepped again after it; 0: not known."""


class IncidentReport(Model):
    """The result of an incident: what a person on call reads. Field order is the order shown."""

    headline: str
    resolution: str
    """``reattempt``, ``eviction``, ``update``, ``rollback``, ``resumed by operator``, ``running, not confirmed``,
    ``observed``, ``abandoned`` or ``closed from outside``."""
    cause: str
    step: int
    lost_steps: int | None
    evicted: list[str]
    """Machines that were taken out of the job."""
    stages: list[str]
    generation: int
    recovered: bool
    """The job goes on; ``confirmed`` says whether it was seen to step."""
    seconds: float | None
    """From the fault as seen by the machine to the first step of all ranks; None: none was seen."""
    failures: list[Failure]
    confirmation: Confirmation | None = None
    timings: list[StageRecord] = Field(default_factory=list)
    resume_step: int = -1
    """Where the newest generation began; -1: the script restores by itself."""
    lineage: list[tuple[int, int]] = Field(default_factory=list)
    """Of each generation that was launched: its number and where it began."""
    accepted_loss: str = ""
    """Who let the job go on although something newer might exist, and what; empty: nobody had to."""
    confirmed: bool = True
    """Where the job goes on: its ranks did again what the script was seen to do."""
    showing: Showing = Field(default_factory=Showing)
    """How the script shows its steps, as far as it was seen."""
    first_step_s: float = 0.0
    """From the last launch to the first step of all ranks; 0: none was seen."""
    unwritten: int = 0
    """Place of the last entry in the ledger, where that did not take it in time: the job writes it; 0: it did."""
    launched: Launched | None = None
    """What was launched last, where the job writes that too."""
    findings: list[MachineFinding] = Field(default_factory=list)
    """What inspections of the machines said, the worst first."""
    classification: Classification | None = None
    """Of the failure that opened it: class, owner and the lines that say so; None: no rank failed by itself."""
    asked: list[EvictAnswer] = Field(default_factory=list)
    """What the rules of eviction said, "no" included (``everstep policy explain``)."""
    machines: list[Machine] = Field(default_factory=list)
    """All of the job, in order, where they are others than before; empty: they are the same."""
    evicted_ns: list[int] = Field(default_factory=list)
    """When machines left without an operator, one entry for each."""
    approved: dict[str, str] = Field(default_factory=dict)
    """Machine that left because an operator approved it → who that was, and the note."""
    version: int = 0
    """Of the code that the job runs on; 0: versions are not known."""
    versions: list[JobVersion] = Field(default_factory=list)
    """Those that came, went, or are suspect, as they are now; empty: none did."""
    hang: HangFound | None = None
    slow: SlowFound | None = None
    """What looks at the ranks showed of why the job stood still; None: nobody looked."""
    tried: list[Tried] = Field(default_factory=list)
    """What was tried, rung by rung of the ladder, with what came of it; in order."""
    begun_again_ns: int = 0
    """When an operator resumed it, or it went on for other code, last: what was before does not count any more."""


CLOSED_OUTSIDE = "closed from outside"
"""Resolution of an incident that did not end by itself: it was terminated or cancelled, or its workflow failed."""


class Left(Model):
    """What an incident did before it was closed from outside."""

    how: str
    """How it was closed, and by whom, e.g. ``terminated by ada: too slow``."""
    known: bool = True
    """False: its history is gone, and with it what it did."""
    launches: list[tuple[int, int]] = Field(default_factory=list)
    """Of each generation that it launched, or began to launch: its number and where it began."""
    resume_step: int = -1
    """Where the newest of them began, from whatever it was; -1: the script restores by itself."""
    launched: Launched | None = None
    """The newest of them, where its launch succeeded and nothing was stopped since."""
    emptied: list[str] = Field(default_factory=list)
    """Machines that said, since the newest launch, that they lost what they had; they say so once."""
