"""The result of a drill. Its JSON is a contract: keys may be added, and no key changes."""

from __future__ import annotations

from pydantic import BaseModel, Field


class DrillResult(BaseModel):
    """The result of one run of a drill. Times are in seconds; None: not known."""

    fault: str
    ok: bool = False
    """Whether the fault fired, and the job recovered as expected."""
    fired: bool = False
    detected_s: float | None = None
    """Time from the fault to the opening of the incident."""
    found_s: float | None = None
    """Time from the fault to its detection: by an inspection if a device broke, by the agent if a rank ended, and
    otherwise by a watcher."""
    recovered_s: float | None = None
    """Time from the fault until all ranks of the job completed a step again; or, if a part that is no rank was struck,
    until that part was back."""
    step_s: float | None = None
    """Median time of a step before the fault."""
    resolution: str | None = None
    """Resolution of the last incident, such as ``reattempt``. ``absorbed``: the job continued without an incident;
    ``observed``: the job continued, and an incident only reported the fault."""
    stages: list[tuple[str, float]] = Field(default_factory=list)
    """Stages of all incidents, in order, with their seconds."""
    tried: list[tuple[str, float]] = Field(default_factory=list)
    """Rungs of the ladder in all incidents, in order, with their seconds."""
    evicted: list[str] = Field(default_factory=list)
    over_evicted: list[str] = Field(default_factory=list)
    """The evicted machines that are healthy and were evicted on purpose."""
    steps_lost: int | None = None
    steps_promised: int | None = None
    """The largest number of steps that the fault may cost; None: no copies are needed after it."""
    promise: str = ""
    """The reason for ``steps_promised``."""
    restored_from: dict[str, int] = Field(
        default_factory=dict, description="Tier → number of ranks that restored their state from it."
    )
    emptied: list[str] = Field(default_factory=list, description="Machines that lost their memory and disk.")
    damaged: list[str] = Field(default_factory=list, description="Copies that the drill damaged, and how.")
    said: list[str] = Field(default_factory=list, description="Problems with backups and disks that agents reported.")
    lag: int | None = None
    """The largest number of steps by which a backup was behind; None: not measured."""
    pace: float | None = None
    """Duration of a step while an agent hung, as a multiple of the duration before; None: no agent hung."""
    steps_redone: int | None = None
    """Number of steps that were done again according to the step records; a step that was cut short counts too."""
    losses_match: bool | None = None
    """Whether all losses are equal to those without a fault; None: there are none, or the job did not finish."""
    state_match: bool | None = None
    """Whether every rank ended with the same state as without a fault; None: no rank logged its state."""
    compared: list[str] = Field(
        default_factory=list, description="Values that were compared with the run without a fault."
    )
    not_compared: list[str] = Field(default_factory=list, description="Values that could not be compared.")
    incidents: list[str] = Field(default_factory=list)
    links: list[str] = Field(default_factory=list, description="Addresses of the incidents in Temporal's Web UI.")
    ettr: float | None = None
    """The productive share of the job's time."""
    leaked: list[str] = Field(default_factory=list)
    """Processes, files and mounts that were left."""
    duplicates: int = 0
    """Number of ranks that had two processes at once; it must be 0."""
    generations: int = 0
    job: str = ""
    steps: int | None = None
    """Number of different steps that the ranks reported."""
    parts: dict[str, float] = Field(default_factory=dict)
    """Parts of the time from the fork of the ranks to their first step, seconds."""
    headline: str = ""
    problems: list[str] = Field(default_factory=list)
    """Why ``ok`` is false."""
    cluster: str = ""
    """Folder of the cluster that ``--keep`` left up."""
    prefix: str = ""
    """Text that a user has to put before a command so that it reaches this cluster."""
