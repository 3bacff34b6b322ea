"""A launch of a job's ranks, and whether they were seen to step again.

These models cross Temporal and are stored in histories: fields are only added, with defaults.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from everstep.model.message import AnyWord, Model


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
