"""What is seen, what is decided and what comes of it.

These models cross Temporal and are stored in histories and in the ledger:
fields are only added, with defaults.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from everstep.model.classification import Classification
from everstep.model.eviction import EvictAnswer
from everstep.model.hang import HangFound
from everstep.model.health import MachineFinding
from everstep.model.ladder import Tried
from everstep.model.machine import Machine
from everstep.model.message import AnyWord, Model
from everstep.model.slow import SlowFound
from everstep.model.stage_record import StageRecord
from everstep.model.version import JobVersion
from everstep.model.words import Words


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


class RankExit(Model):
    """How one rank ended."""

    rank: int
    machine: str
    pid: int = 0
    code: int | None = None
    signal: int | None = None
    time_ns: int = 0
    stopped_by_us: bool = False
    completed_steps: int = -1
    exception: str = ""
    log_tail: str = ""
    shown_steps: int = -1
    """Steps that it showed: the most of reports, calls of the optimizer, and 0 or 1 ``run.steps``; -1: not known."""
    classification: Classification | None = None
    """What ended it, as its agent classified it; None: it lived until a stop killed it."""


class Tier(Words):
    """Where a copy of a rank's state lies, in the order in which a restore prefers them."""

    OWN = "own memory"
    """Shared memory of the machine that runs the rank."""
    BACKUP = "backup"
    """Shared memory of the rank's peer."""
    DISK = "disk"
    """A machine's local disk."""
    REMOTE = "remote"
    """Object storage or a shared file system."""


CopyKey = tuple[int, int, Tier, str, int]
"""Which copy of which rank: rank, completed steps, tier, machine, and when it was saved."""


class StateCopy(Model):
    """A copy of the state of a rank after ``completed_steps`` steps."""

    rank: int
    machine: str
    """Where it is; of a remote copy: the machine whose agent listed it."""
    completed_steps: int
    bytes: int = 0
    valid: bool = True
    reason: str = ""
    tier: Tier = Tier.OWN
    generation: int = 0
    """Of the job, when it was saved."""
    saved_ns: int = 0
    digest: str = ""
    """Of its tensors, on disk and remote: equal for equal bytes, so that one rank can read for its whole dp group."""
    run: str = ""
    """That saved it; in memory: that holds it. Empty: not known (``everstep.model.run_id``)."""
    topology: str = ""
    """Of the job that saved it, on disk and remote; empty: not known."""
    verified: bool = True
    """Of what is valid in memory: its contents were compared with their checksum; else only its header."""

    @property
    def key(self) -> CopyKey:
        """Which copy it is."""
        return self.rank, self.completed_steps, self.tier, self.machine, self.saved_ns

    @property
    def unlisted(self) -> bool:
        """Whether it stands for a folder or storage that could not be listed, with the reason; nothing is known bad."""
        return not self.valid and self.completed_steps < 0 and self.tier in {Tier.DISK, Tier.REMOTE}


class CopyToRestore(Model):
    """What one rank has to be given before it can restore: which copy, and where it is."""

    rank: int
    completed_steps: int
    tier: Tier
    machine: str
    saved_ns: int = 0
    """When the rank saved it: two copies of a rank's step are the same when they say the same here. 0: any."""

    @property
    def key(self) -> CopyKey:
        """Which copy it is."""
        return self.rank, self.completed_steps, self.tier, self.machine, self.saved_ns


class Restored(Model):
    """What came of bringing copies to the machines that need them."""

    moved: list[CopyToRestore] = Field(default_factory=list)
    failed: list[StateCopy] = Field(default_factory=list)
    """Copies that turned out damaged or gone, not valid, with reasons."""
    unreached: list[StateCopy] = Field(default_factory=list)
    """Copies that may be good and could not be brought, not valid for now, with reasons."""
    verified: list[CopyToRestore] = Field(default_factory=list)
    """Own slots whose contents were compared where they are, and hold."""
    bytes: int = 0
    seconds: float = 0.0
    unreachable: list[str] = Field(default_factory=list)
    """Machines that should have been given copies and did not answer."""


class Unlisted(Model):
    """Places that may hold copies and could not be looked at: what lies there is unknown, and not nothing."""

    tier: Tier
    machines: list[str] = Field(default_factory=list)
    """Whose disks; of remote storage none: one machine that lists it suffices."""
    reason: str = ""


class Evidence(Model):
    """What the machines know once a generation is stopped."""

    generation: int
    exits: list[RankExit] = Field(default_factory=list)
    held: list[StateCopy] = Field(default_factory=list)
    unreachable: list[str] = Field(default_factory=list)
    problem: str = ""
    """Why the machines could not be asked at all."""
    emptied: list[str] = Field(default_factory=list)
    """Machines that answered and know nothing of the job: they, or their agents' memory, were lost."""
    disk_shared: bool = False
    """Several machines listed the same files: the folder of disk checkpoints is shared."""
    dying: list[str] = Field(default_factory=list)
    """Ranks that were killed and are not gone yet, with machine and time. Nothing else is known then."""
    left_out: str = ""
    """What was told and is not kept here, in numbers; empty: nothing."""
    held_cut: bool = False
    """Copies are among what is not kept."""
    unlisted: list[Unlisted] = Field(default_factory=list)
    """Disks and remote storage that were asked for copies and did not tell, by reason."""
    searched: bool = False
    """All disks and remote storage were asked, those too of which a machine that came back empty knows nothing."""
    findings: list[MachineFinding] = Field(default_factory=list)
    """What the inspections of the machines say, the worst first, not more than fit."""
    disk_asked: int | None = None
    """The newest step asked for on disk since the launch, beside those due; 0: none; None: no machine can say."""


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


class Stage(Words):
    """Where an incident stands, in the order in which it gets there."""

    OPEN = "open"
    ALIGN = "align"
    """Before an update the ranks come to the end of the same step, and save it."""
    VOTE = "vote"
    """The ranks of a job that became slow are looked at, round by round, while it goes on."""
    TRACE = "trace"
    """The ranks of a job that stands still are looked at, to see on which machine it hangs."""
    STOP = "stop"
    """Every rank of the failed generation is ended, and the machines are asked what they know."""
    FIND = "find"
    """Disks and remote storage are asked for copies."""
    EVICT = "evict"
    """Machines that are at fault, or gone, leave the job, and standbys take their places."""
    DECIDE = "decide"
    DIAGNOSE = "diagnose"
    """The machines of the stopped job are tested."""
    REPLAY = "replay"
    """The script runs on groups of the job's machines, and the groups are compared."""
    RESTORE = "restore"
    """Copies are brought to the machines whose ranks need them."""
    BACKOFF = "backoff"
    """A reattempt waits its time."""
    REATTEMPT = "reattempt"
    CONFIRM = "confirm"
    PARKED = "parked"
    """It waits for an operator, or for machines that are silent."""
    ACCEPTED = "accepted"
    """An operator gave up what may be newer; only noted, an incident does not stay in it."""
    OBSERVED = "observed"
    """A fault was seen with which the job goes on; nothing was done."""
    RECOVERED = "recovered"
    NOT_CONFIRMED = "running, not confirmed"
    ABANDONED = "abandoned"
    CLOSED = "closed"
    """The last entry in the ledger."""


NOT_CONFIRMED = str(Stage.NOT_CONFIRMED)
"""What a job is called that goes on as far as anybody can see, and was not seen to step."""


class Launched(Model):
    """A generation was started."""

    generation: int
    resume_step: int
    """Completed steps of the restored state; 0: from the beginning; -1: the script restores by itself."""
    started_ns: int
    forked_ns: int = 0
    """When the last rank was forked."""
    backups: str = ""
    """Where the backups lie and what may be lost with their owners, for people; empty: there are none."""


class Showing(Model):
    """How a script shows that it steps, as far as it was seen."""

    kind: Annotated[Literal["", "calls", "steps"], AnyWord] = ""
    """``steps``: bodies of ``run.steps``; ``calls``: of ``run.report`` or of the optimizer; empty: nothing was seen."""
    silent: list[int] = Field(default_factory=list)
    """Ranks that showed nothing while others went on."""


class Confirmation(Model):
    """Whether all ranks stepped again."""

    generation: int
    ok: bool
    """The job goes on."""
    reason: str
    confirmed: bool = True
    """Where it goes on: its ranks did again what the script was seen to do; False: they live, more is not known."""
    showing: Showing = Field(default_factory=Showing)
    """How the script shows its steps, as far as it was seen now and earlier."""
    timed_out: bool = False
    """No rank ended, but not all of them stepped in time."""
    emptied: list[str] = Field(default_factory=list)
    """Machines that lost the ranks that were launched there, and know nothing of them."""
    stepped_ns: int = 0
    """When the last rank completed its first step, nanoseconds of the wall clock."""
    completed_steps: int = -1
    parts: dict[str, float] = Field(default_factory=dict)
    """Seconds from fork to the first step by part, in order (the slowest rank of each)."""


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
