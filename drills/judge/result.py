"""The result of a drill. The keys of the JSON are a contract: more may be added, none changes."""

from __future__ import annotations

from pydantic import BaseModel, Field


class DrillResult(BaseModel):
    """One run of a drill; times are seconds; None: not known."""

    fault: str
    ok: bool = False
    """The fault fired, and the job recovered as expected."""
    fired: bool = False
    detected_s: float | None = None
    """Time from the fault to the opening of the incident."""
    found_s: float | None = None
    """Time from the fault to its detection: of a device by an inspection, of a rank's end by its agent,
    else by a watcher."""
    recovered_s: float | None = None
    """Time from the fault to the first step that all ranks completed at full width; for a part that is no rank,
    until it was back."""
    step_s: float | None = None
    """Median time of a step before the fault."""
    resolution: str | None = None
    """``reattempt``, …; ``absorbed``: the job continued and lost nothing; ``observed``: and the fault was reported."""
    stages: list[tuple[str, float]] = Field(default_factory=list)
    tried: list[tuple[str, float]] = Field(default_factory=list)
    """Rungs of the ladder in all incidents, in order, with their seconds."""
    evicted: list[str] = Field(default_factory=list)
    over_evicted: list[str] = Field(default_factory=list)
    steps_lost: int | None = None
    steps_promised: int | None = None
    """Most steps that the fault may cost; None: no copies are needed after it."""
    promise: str = ""
    """The reason for this number."""
    restored_from: dict[str, int] = Field(default_factory=dict, description="Tier → ranks that went on from it.")
    emptied: list[str] = Field(default_factory=list, description="Machines that lost memory and disk.")
    damaged: list[str] = Field(default_factory=list, description="Copies that were damaged, and how.")
    said: list[str] = Field(default_factory=list, description="Problems with backups and disks that agents told of.")
    lag: int | None = None
    """Most steps that a backup was behind; None: not measured."""
    pace: float | None = None
    """Step time while an agent hung over step time before; None: no agent hung."""
    steps_redone: int | None = None
    """Number of steps that the step records show twice; a step that the fault cut short counts too."""
    losses_match: bool | None = None
    """Whether all losses are equal; None: the script reports none, or the job did not finish."""
    state_match: bool | None = None
    """Whether every rank ended with the same state as without a fault; None: not reported."""
    compared: list[str] = Field(default_factory=list, description="What was held against the run without a fault …")
    not_compared: list[str] = Field(default_factory=list, description="… and what could not be.")
    incidents: list[str] = Field(default_factory=list)
    links: list[str] = Field(default_factory=list, description="The incidents in Temporal's Web UI.")
    ettr: float | None = None
    leaked: list[str] = Field(default_factory=list)
    duplicates: int = 0
    """Number of ranks with two copies at once; must be 0."""
    generations: int = 0
    job: str = ""
    steps: int | None = None
    """Number of steps that were compared."""
    parts: dict[str, float] = Field(default_factory=dict)
    """Seconds from fork to the first step, by part."""
    headline: str = ""
    problems: list[str] = Field(default_factory=list)
    """Why ``ok`` is false."""
    cluster: str = ""
    """Folder of the cluster that ``--keep`` left up."""
    prefix: str = ""
    """Prefix that commands need to reach it; empty: none."""
