"""Inputs and results of the activities. They are stored in histories: fields are only added, with defaults."""

from __future__ import annotations

from pydantic import Field, JsonValue

from everstep.model.evidence import Evidence
from everstep.model.incident import Anomaly, IncidentReport
from everstep.model.job import JobSpec
from everstep.model.launch import Confirmation, Launched, Showing
from everstep.model.machine import Machine
from everstep.model.message import Model
from everstep.model.notice import Notice
from everstep.model.state_copy import CopyToRestore
from everstep.model.version import CodeVersion, JobVersion, UpdateRequest

PREPARE = "Prepare machines"
STOP = "Stop ranks"
FIND = "Find checkpoints"
RESTORE = "Restore checkpoints"
FOLDER = "Look at checkpoint folder"
ROOM = "Check room"
LAUNCH = "Launch ranks"
CONFIRM = "Confirm steps"
AWAIT = "Await machines"
RELEASE = "Release machines"
POOL_LEASE = "Lease machines"
POOL_REPLACE = "Replace machines"
POOL_AWAIT = "Await standbys"
POOL_GIVE_BACK = "Give machines back"
POOL_LOOK = "Look at machines"
POOL_PROVISION = "Provision machines"
POOL_READY = "Ready standbys"
CLOSED = "Read closed incident"
DECIDE = "Decide"
"""Writes a conclusion of the incident to the ledger; the workflow decides. Histories have this name."""
RECORD = "Record job"
DELIVER = "Deliver notice"
MAKE_VERSION = "Make version"
CHECK_VERSION = "Check version"
ALIGN = "Align ranks"
DIAGNOSE = "Diagnose machines"
TRACE = "Trace ranks"
REPLAY_GROUP = "Replay group"
SLOW_ROUND = "Look for a slow machine"


class AwaitStandbysInput(Model):
    """Wait until the pool has so many machines to spare."""

    count: int
    patience_s: float


class PrepareInput(Model):
    """Start the fork servers."""

    spec: JobSpec
    machines: list[Machine]
    run: str = ""
    """Id of the job's run; see ``everstep.model.run_id``."""
    patience_s: float = 60.0
    """How long a silent agent is asked again, seconds."""
    probed: bool = False
    """As of :class:`StopInput`; who is silent then is given up, and not asked again."""
    like: list[Machine] = Field(default_factory=list)
    """Machines on which it was prepared before: with other libraries than theirs it is refused. Empty: with any."""


class MakeVersionInput(Model):
    """Make the version that a request asks for, and put it into the store of versions."""

    spec: JobSpec
    """The job as it runs."""
    running: CodeVersion
    request: UpdateRequest
    needed: list[str] = Field(default_factory=list)
    """Ids of the versions that the job knows: they stay in the store. Empty: nothing is removed from it."""


class VersionMade(Model):
    """A version is in the store."""

    runs: CodeVersion
    """Without the packages, which are in the store alone."""
    changed: str = ""
    """What changed against the version that runs, for people."""


class CheckVersionInput(Model):
    """Bring a version to machines, and try it there up to where it joins the job."""

    spec: JobSpec
    """The job as the version is to run it."""
    machines: list[Machine]
    run: str = ""
    """Id of the job's run; see ``everstep.model.run_id``."""
    patience_s: float = 60.0
    """How long a silent agent is asked again, seconds."""
    timeout_s: float = 600.0
    """How long the script may take to come to where it joins, seconds."""


class VersionChecked(Model):
    """What came of trying a version."""

    refused: str = ""
    """Why it cannot run: the first traceback, on which machine, and how many others say the same; empty: it can."""
    told: str = ""
    """What is no reason to refuse it: machines that were silent, or slow; empty: nothing."""


class AlignInput(Model):
    """Have all ranks of a generation end the same step, save it and wait there."""

    spec: JobSpec
    machines: list[Machine]
    generation: int
    patience_s: float
    """How long they may take, seconds."""
    backed_up: list[int] = Field(default_factory=list)
    """Ranks whose backup has to have the step as well: they go on from it, on other machines."""


class RanksAligned(Model):
    """Whether all ranks wait at the end of the same step."""

    step: int = -1
    """Completed steps at which all ranks wait; -1: they do not."""
    why: str = ""
    """Where they do not: why."""


class TraceInput(Model):
    """Look at what the ranks of a job do that does not step; they go on."""

    spec: JobSpec
    machines: list[Machine]
    generation: int
    incident: str
    """Its workflow's id: what is seen is kept with it."""
    apart_s: float = 0.3
    """Between two looks, seconds."""
    look_s: float = 5.0
    """One look takes no longer, seconds."""


class SlowRoundInput(Model):
    """One round of the vote for the machine that slows a job down; the ranks go on."""

    spec: JobSpec
    machines: list[Machine]
    generation: int
    incident: str
    """Its workflow's id: what is seen first in the round is kept with it."""
    number: int
    """Of the round, from 1."""
    round_s: float
    """Its length, seconds."""


class StopInput(Model):
    """Stop every rank up to a generation, and bring back what the machines know."""

    job: str
    generation: int
    machines: list[Machine]
    grace_s: float = 0.0
    patience_s: float = 30.0
    """How long a silent agent is asked again, seconds."""
    probed: bool = False
    """An agent that does not come back from a stop is asked whether it is there at all: where it does not answer that
    for ``patience_s`` either, it is silent."""
    dying_s: float = 15.0
    """Ranks that were killed and are not gone are waited for so long before the answer says so, seconds."""
    spec: JobSpec | None = None
    """Says where each rank runs."""
    run: str = ""
    """Id of the job's run; see ``everstep.model.run_id``."""


class FindInput(Model):
    """Ask what copies of training state there are, disk and remote storage included."""

    spec: JobSpec
    machines: list[Machine]
    at: int | None = None
    """A step that is looked for: of many copies those of this step are named first."""
    patience_s: float = 10.0


class FolderInput(Model):
    """Look at the folder of one disk checkpoint, of whatever job it is."""

    machines: list[Machine]
    path: str
    patience_s: float = 10.0


class FolderFound(Model):
    """Whether a job can start from a folder."""

    problem: str = ""
    """Why it cannot; empty when it can."""
    step: int = -1
    """Completed steps of the checkpoint."""
    ranks: int = 0
    """How many it holds."""


class RestoreInput(Model):
    """Bring copies to the machines that need them."""

    spec: JobSpec
    machines: list[Machine]
    copies: list[CopyToRestore]
    digests: dict[int, str] = Field(default_factory=dict)
    """Rank → digest of the tensors, where the storage says it."""
    bytes: dict[int, int] = Field(default_factory=dict)
    """Rank → size of its copy."""
    disk_shared: bool = False
    patience_s: float = 30.0
    """How long a silent agent is asked again, seconds."""
    reach_s: float = 10.0
    """How long a copy is tried again that could not be fetched, seconds."""
    run: str = ""
    """Id of the job's run; see ``everstep.model.run_id``."""


class RoomInput(Model):
    """Ask whether the machines have room for the job's checkpoints."""

    spec: JobSpec
    machines: list[Machine]
    patience_s: float = 10.0


class LaunchInput(Model):
    """Start all ranks of a generation."""

    spec: JobSpec
    machines: list[Machine]
    generation: int
    resume_step: int
    reason: str = ""
    patience_s: float = 30.0
    probed: bool = False
    """As of :class:`StopInput`; who is silent then is given up, and not asked again."""
    reshard_from: str = ""
    """Folder of a disk checkpoint that the ranks start from, saved with any parallel sizes; empty: none."""
    run: str = ""
    """Id of the job's run; see ``everstep.model.run_id``."""
    begins_run: bool = False
    """It is the first generation of its run, whatever its number: a job's name counts on from run to run."""


class ConfirmInput(Model):
    """Watch until every rank of a generation completed a step."""

    spec: JobSpec
    machines: list[Machine]
    launched: Launched
    restore_s: float = 0.0
    """More time than that, for large states that are restored first, seconds."""
    timeout_s: float = 0.0
    """How long; 0: the policy's ``confirm.timeout_s``."""
    showing: Showing = Field(default_factory=Showing)
    """How the script showed its steps before."""
    patient: bool = False
    """That the ranks live is known: wait for their steps."""
    silent_s: float = 0.0
    """A machine of which nothing is heard for so long, while no rank completes a step, is not waited for; 0: it is."""


class AwaitInput(Model):
    """Wait until machines that did not answer do."""

    machines: list[Machine]
    patience_s: float
    """How long."""


class ReleaseInput(Model):
    """Give back what a job holds on its machines."""

    job: str
    machines: list[Machine]
    run: str = ""
    """Id of the job's run; see ``everstep.model.run_id``."""
    dying_s: float = 600.0
    """Ranks that were killed have this long to be gone, seconds (the policy's ``stop.kill_patience_s``)."""


class ClosedInput(Model):
    """Find out what an incident did that was closed from outside."""

    incident: str
    """Id of its workflow."""


class DecideInput(Model):
    """Write one conclusion of an incident into the ledger; its first entry opens the incident."""

    incident: str
    job: str
    anomaly: Anomaly
    opened_ns: int
    position: int
    """Place of this entry within the incident, from 1: what makes a repeated write harmless."""
    time_ns: int
    stage: str
    text: str
    evidence: Evidence | None = None
    launched: Launched | None = None
    report: IncidentReport | None = None
    """Given with the last entry: closes the incident."""
    parked: list[tuple[int, int]] = Field(default_factory=list)
    """When the job was parked, begin and end in nanoseconds."""


class RecordInput(Model):
    """Write the state of a job into the ledger."""

    spec: JobSpec
    time_ns: int
    started_ns: int = 0
    """Given with the first entry: opens a run of the job."""
    launched: Launched | None = None
    confirmation: Confirmation | None = None
    outcome: str = ""
    """Given when the job ended."""
    versions: list[JobVersion] = Field(default_factory=list)
    """Of its code, those that changed."""


class DeliverInput(Model):
    """Tell one receiver of an event."""

    notice: Notice
    receiver: str
    """Its name in the file of the workers."""


class DiagnoseInput(Model):
    """Run diagnostic tests on machines whose ranks are stopped, or that no job has."""

    machines: list[Machine]
    tests: list[str]
    """Their names (``everstep.model.diagnosis.Diagnostic``), in order; those between machines come after the others."""
    job: str = ""
    """Which is stopped on the machines; empty: they have none."""
    run: str = ""
    """Id of the job's run; see ``everstep.model.run_id``."""
    settings: dict[str, dict[str, JsonValue]] = Field(default_factory=dict)
    """Test → its settings that are other than by default (docs/concepts/diagnostic-tests.md)."""
    limit_s: float = 600.0
    """All tests of one machine together, and each test between two, have this long, seconds; what has not begun by then
    is unknown."""
    patience_s: float = 30.0
    """How long a silent agent is asked again, seconds."""
    slow_share: float = 0.2
    """A bandwidth below this share of the others' median is a fault ( ``everstep.decisions.blame.diagnose.compare``)
    …"""
    low_share: float = 0.5
    """… and below this one unknown."""


class ReplayGroupInput(Model):
    """Run a job's script on one group of its machines, apart from the job, which is stopped."""

    spec: JobSpec
    """What the group runs (``everstep.decisions.blame.replay.group_jobs.spec_of_group``)."""
    machines: list[Machine]
    """Of the group, in order."""
    group: str
    """Name of the group."""
    repeat: int = 1
    """Which run of this group it is, from 1."""
    run: str = ""
    """Id of the job's run; see ``everstep.model.run_id``."""
    steps: int = 10
    """After so many every rank is done."""
    start_s: float = 300.0
    """All ranks have so long to come to a first step, seconds."""
    limit_s: float = 300.0
    """From there they have so long for the others, seconds."""
    patience_s: float = 10.0
    """How long a silent agent is asked again, seconds."""
