"""What a drill found. The keys of the JSON are a contract: more may be added, none changes."""

from __future__ import annotations

from pydantic import BaseModel, Field


class DrillResult(BaseModel):
    """One run of a drill; seconds as floats, None where it cannot be known."""

    fault: str
    ok: bool = False
    """Fired, and recovered as the fault deserves."""
    fired: bool = False
    detected_s: float | None = None
    """From the fault to the incident opened."""
    found_s: float | None = None
    """From the fault to when it was seen: a device's by the inspection of its machine, the end of a rank by its agent,
    else by a watcher."""
    recovered_s: float | None = None
    """From the fault to the first step that all ranks completed at full width; for a part beside the ranks, until
    it was back."""
    step_s: float | None = None
    """Median time of a step before the fault."""
    resolution: str | None = None
    """``reattempt``, …, or ``absorbed``: the job went on and lost nothing; ``observed``: and the fault was told."""
    stages: list[tuple[str, float]] = Field(default_factory=list)
    tried: list[tuple[str, float]] = Field(default_factory=list)
    """Rungs of the ladder in order, of all incidents, and what each cost in seconds."""
    evicted: list[str] = Field(default_factory=list)
    over_evicted: list[str] = Field(default_factory=list)
    steps_lost: int | None = None
    steps_promised: int | None = None
    """Most steps that the fault may cost; None: it is none after which copies are needed."""
    promise: str = ""
    """Why so many."""
    restored_from: dict[str, int] = Field(default_factory=dict, description="Tier → ranks that went on from it.")
    emptied: list[str] = Field(default_factory=list, description="Machines that lost memory and disk.")
    damaged: list[str] = Field(default_factory=list, description="Copies that were damaged, and how.")
    said: list[str] = Field(default_factory=list, description="Problems with backups and disks that agents told of.")
    lag: int | None = None
    """Most steps that a backup was seen to be behind; None: nobody looked."""
    pace: float | None = None
    """Step time while an agent hung, in step times before; None: none did."""
    steps_redone: int | None = None
    """Steps that the step records show twice; a report that was cut short by the fault counts as well."""
    losses_match: bool | None = None
    """None: the script reports no losses, or the job did not finish."""
    state_match: bool | None = None
    """Whether every rank ended with the state that it has without a fault; None: nobody tells of it."""
    compared: list[str] = Field(default_factory=list, description="What was held against the run without a fault …")
    not_compared: list[str] = Field(default_factory=list, description="… and what could not be.")
    incidents: list[str] = Field(default_factory=list)
    links: list[str] = Field(default_factory=list, description="The incidents in Temporal's Web UI.")
    ettr: float | None = None
    leaked: list[str] = Field(default_factory=list)
    duplicates: int = 0
    """Ranks of which two copies were seen or recorded; must be 0."""
    generations: int = 0
    job: str = ""
    steps: int | None = None
    """Steps of the job that were compared."""
    parts: dict[str, float] = Field(default_factory=dict)
    """Seconds from fork to the first step, by part."""
    headline: str = ""
    problems: list[str] = Field(default_factory=list)
    """Why ``ok`` is false."""
    cluster: str = ""
    """Where the cluster was left, with ``--keep``."""
    prefix: str = ""
    """What comes before commands that shall reach it; empty: nothing."""
