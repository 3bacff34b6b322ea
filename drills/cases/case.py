"""A case: which faults strike a job at which times, and the right course of the recovery.

A case is a TOML file. Its faults describe what is broken, and what can be seen of it. A fault strikes a rank or a
machine, once or as long as its cause is there. A case does not describe what the recovery does: this follows from the
product's own workflows and decisions (:mod:`drills.cases.play`), and is compared with what the case expects.
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
    """A table of a case. An unknown key is an error."""

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
    """How long the job trains before the case begins, hours; the time until the first fault is added."""
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
    """The run of one group of a replay."""
    restore_s: Seconds = 2.0
    check_s: Seconds = 5.0


class CaseFinding(CaseModel):
    """What an inspection reports about the machine after a fault has struck it."""

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
    """The time from the strike to the finding."""
    for_s: Seconds = 0.0
    """The finding is over after this time; 0: it stays."""


class CaseFault(CaseModel):
    """Something that is broken, and what can be seen of it."""

    at_s: Seconds = 60.0
    """When the fault strikes first, seconds after the job's first step."""
    rank: int = 0
    """The rank that the fault strikes."""
    machine: str = ""
    """The machine that the fault strikes, e.g. ``m2``, or ``all``; empty: the machine of the rank."""
    every_rank: bool = False
    """All ranks show the fault, and not only one."""

    raises: str = ""
    """The exception that ends a rank."""
    log: str = ""
    """The last output of the rank."""
    signal: int = 0
    exit: int | None = None
    """The exit code. If none is given, an exception ends the rank with 1."""
    silent: bool = False
    """The machine does not answer any more: neither its agent nor its ranks."""
    hangs: bool = False
    """The rank hangs, and the others wait for it. After ``for_s`` it continues by itself."""
    stack: list[str] = Field(default_factory=list)
    """The stack of a rank that hangs: ``function (file.py)``, the innermost first; empty: it cannot be read."""
    blocked_in: str = ""
    """What a rank that hangs waits for, as the kernel shows it, e.g. ``sleep``; empty: not known."""
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
    """How long the cause of the fault is there: for one strike, as long as the job has the machine, as long as the job
    runs this version of the code, or always."""
    times: int = Field(0, ge=0)
    """The largest number of strikes; 0: only ``lasts`` decides."""
    for_s: Seconds = 0.0
    """The time from the fault's first strike until the fault is over; 0: only ``lasts`` decides."""
    again_s: float = 60.0
    """The time from the first step of a later generation until the fault strikes again; below 0: before that step."""
    tests: list[str] = Field(default_factory=list)
    """The diagnostic tests that find the fault on the machine."""
    in_replay: bool = False
    """A replay shows the fault in each group that has the machine."""

    @model_validator(mode="after")
    def _shows(self) -> CaseFault:
        if not (self.ends_rank or self.silent or self.hangs or self.unfit or self.finding):
            raise ValueError("it shows nothing: give raises, signal, exit, silent, hangs, unfit or a finding")
        return self

    @property
    def ends_rank(self) -> bool:
        """Whether the fault ends a rank."""
        return bool(self.raises or self.signal or self.exit is not None)


class CaseAnswer(CaseModel):
    """What an operator does."""

    at_s: Seconds
    """Seconds after the job's first step."""
    command: Literal["resume", "approve", "abandon"] = "resume"


class Expected(CaseModel):
    """The right course. A field that is left out is not compared, except ``evicted`` and ``parked``."""

    evicted: dict[str, str] = Field(default_factory=dict)
    """Machine that leaves the job → the rule that evicts it, in order. Every other machine stays."""
    parked: str = ""
    """The rule that parks the job for a person; empty: the job is not parked."""
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
    """The largest number of steps that are computed again, over all incidents."""
    within_s: float | None = None
    """The longest time from the first strike until the job trains again for good, seconds."""


class Case(CaseModel):
    """A case."""

    title: str
    source: str = ""
    """The origin of the case: a paper's table, a public report, a finding."""
    note: str = ""
    job: CaseJob = Field(default_factory=CaseJob)
    costs: Costs = Field(default_factory=Costs)
    fault: list[CaseFault] = Field(min_length=1)
    answer: list[CaseAnswer] = Field(default_factory=list)
    play_s: float = Field(3600.0, gt=0)
    """How long the case is played after the first step, seconds."""
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
