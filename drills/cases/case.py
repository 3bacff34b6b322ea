"""A case: what happens to a job, in time, and the course of the recovery that is right.

A case is a TOML file. Its faults say what is broken and how that shows: a fault strikes a rank or a machine, once or as
long as its cause is there. What the recovery does about it is not written here: it follows from the product's own
workflows and decisions (:mod:`drills.cases.play`), and is compared with what the case expects.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from everstep.errors import ConfigError
from everstep.model.finding import FindingSource, Health, Owner
from everstep.model.recovery_policy import RecoveryPolicy

Seconds = Annotated[float, Field(ge=0)]


class CaseModel(BaseModel):
    """A table of a case; an unknown name is an error."""

    model_config = ConfigDict(extra="forbid")


class CaseJob(CaseModel):
    """The job, and the machines that it has."""

    machines: int = Field(4, ge=1)
    ranks_per_machine: int = Field(2, ge=1)
    tp: int = Field(1, ge=1)
    pp: int = Field(1, ge=1)
    standbys: int = Field(1, ge=0)
    step_s: float = Field(10.0, gt=0)
    """The time of a step."""
    start_s: float = Field(20.0, ge=0)
    """The time from a launch until all ranks are in their loops."""
    longest_pause_s: float = Field(0.0, ge=0)
    """The longest time without a step that was seen before, e.g. of an evaluation."""
    ran_h: float = Field(0.0, ge=0)
    """How long the job has trained before the first fault, hours, beside the time until it strikes."""
    older_version_h: float = Field(0.0, ge=0)
    """How long an older version of its code ran before, hours; 0: there is only one version."""
    policy: RecoveryPolicy = Field(default_factory=RecoveryPolicy)


class Costs(CaseModel):
    """How long the parts of a recovery take on the machines of the case, seconds."""

    stop_s: Seconds = 0.5
    launch_s: Seconds = 1.0
    trace_s: Seconds = 1.0
    tests_s: Seconds = 120.0
    replay_s: Seconds = 60.0
    """One group of a replay."""
    restore_s: Seconds = 2.0
    check_s: Seconds = 5.0


class CaseFinding(CaseModel):
    """What an inspection reports about the machine from then on."""

    reason: str
    """The reason code."""
    inspection: str = "kernel"
    item: str = ""
    text: str = ""
    owner: Owner = Owner.MACHINE
    verdict: Health = Health.FAULTY
    sure: bool = False
    source: FindingSource = FindingSource.INSPECTION
    after_s: Seconds = 0.0
    """After the strike."""
    for_s: Seconds = 0.0
    """The finding is over after this time; 0: it stays."""


class CaseFault(CaseModel):
    """Something that is broken, and how it shows."""

    at_s: Seconds = 60.0
    """When it strikes first, seconds after the job's first step."""
    rank: int = 0
    """The rank that it strikes."""
    machine: str = ""
    """The machine that it strikes, e.g. ``m2``, or ``all``; empty: that of the rank."""
    every_rank: bool = False
    """All ranks show it, not one."""

    raises: str = ""
    """The exception with which a rank ends."""
    log: str = ""
    """The last output of the rank."""
    signal: int = 0
    exit: int | None = None
    """The exit code; an exception without one ends with 1."""
    silent: bool = False
    """The machine does not answer any more: neither its agent nor its ranks."""
    hangs: bool = False
    """The rank does not go on, and the others wait for it; after ``for_s`` it goes on by itself."""
    stack: list[str] = Field(default_factory=list)
    """What a rank that hangs does: ``function (file.py)``, the innermost first; empty: its stack cannot be read."""
    blocked_in: str = ""
    """What the kernel shows that a rank waits for that hangs, e.g. ``sleep``; empty: not known."""
    works: bool = False
    """A rank that hangs uses its CPU, e.g. in an endless loop or an evaluation."""
    unfit: bool = False
    """The machine cannot be made ready for a job, e.g. since its libraries cannot be imported."""
    finding: CaseFinding | None = None
    others: Literal["wait", "connection lost"] = "wait"
    """What the other ranks do: they wait, or lose their connection to the rank and end."""
    dying_s: Seconds = 0.0
    """A process of the rank stays this long after SIGKILL, e.g. in state D."""

    lasts: Literal["once", "machine", "code", "always"] = "once"
    """How long its cause is there: for one strike; as long as the machine, or the version of the code, is the job's."""
    times: int = Field(0, ge=0)
    """It strikes at most so often; 0: as often as ``lasts`` says."""
    for_s: Seconds = 0.0
    """It is over so long after its first strike; 0: as ``lasts`` says."""
    again_s: float = 60.0
    """It strikes again so long after the first step of a later generation; below 0: before its first step."""
    tests: list[str] = Field(default_factory=list)
    """The diagnostic tests that find it on the machine."""
    in_replay: bool = False
    """A replay shows it in each group with the machine."""

    @model_validator(mode="after")
    def _shows(self) -> CaseFault:
        if not (self.ends_rank or self.silent or self.hangs or self.unfit or self.finding):
            raise ValueError("it shows nothing: give raises, signal, exit, silent, hangs, unfit or a finding")
        return self

    @property
    def ends_rank(self) -> bool:
        """Whether a rank ends by it."""
        return bool(self.raises or self.signal or self.exit is not None)


class CaseAnswer(CaseModel):
    """What an operator does."""

    at_s: Seconds
    """Seconds after the job's first step."""
    command: Literal["resume", "approve", "abandon"] = "resume"


class Expected(CaseModel):
    """The course that is right. What is left out is not compared, but for ``evicted`` and ``parked``."""

    evicted: dict[str, str] = Field(default_factory=dict)
    """Machine that leaves the job → the rule by which it does, in order; every other machine stays."""
    parked: str = ""
    """The rule that parks the job for a person; empty: none does."""
    rungs: list[str] | None = None
    """The rungs that are tried, in order, over all incidents."""
    tests: list[str] | None = None
    """The diagnostic tests of the first diagnosis."""
    owner: str | None = None
    """The owner of the first failure, as it is classified."""
    cause: str | None = None
    """The reason code of the first failure, as it is classified."""
    incidents: int | None = None
    version: int | None = None
    """The version of the code that runs at the end."""
    lost_steps: int | None = None
    """At most so many steps are computed again, over all incidents."""
    within_s: float | None = None
    """The job trains again at most so long after the first strike, for good."""


class Case(CaseModel):
    """A case."""

    title: str
    source: str = ""
    """Where it is from: a paper's table, a public report, a finding."""
    note: str = ""
    job: CaseJob = Field(default_factory=CaseJob)
    costs: Costs = Field(default_factory=Costs)
    fault: list[CaseFault] = Field(min_length=1)
    answer: list[CaseAnswer] = Field(default_factory=list)
    play_s: float = Field(3600.0, gt=0)
    """How long it is played after the first step, seconds."""
    expect: Expected = Field(default_factory=Expected)


def read_case(path: Path) -> Case:
    """Read a case.

    Raises:
        ConfigError: the file cannot be read, or is no case; the message names the file and the fields.
    """
    try:
        fields: dict[str, Any] = tomllib.loads(path.read_text())
        return Case.model_validate(fields)
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"the case {path} cannot be read: {error}") from error
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, one['loc'])) or 'case'}: {one['msg']}" for one in error.errors())
        raise ConfigError(f"the case {path} is not valid: {wrong}") from error
