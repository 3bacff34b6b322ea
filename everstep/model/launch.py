"""Defines a launch of a job's ranks, and the confirmation that the ranks were seen to step again.

These models are sent through Temporal and are stored in histories, so fields are only added, with defaults.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from everstep.model.message import AnyWord, Model
from everstep.model.ranks import NO_RANKS, Ranks


class Launched(Model):
    """A launch of a generation that succeeded."""

    generation: int
    resume_step: int
    """Completed steps of the restored state; 0: from the beginning; -1: the script restores by itself."""
    started_ns: int
    forked_ns: int = 0
    """When the last rank was forked, nanoseconds of the wall clock."""
    backups: str = ""
    """For people: where the backups are, and which failures lose a copy together with its backup; empty: no backups."""


class Showing(Model):
    """How a script shows that it steps, as far as known."""

    kind: Annotated[Literal["", "calls", "steps"], AnyWord] = ""
    """``steps``: by ``run.steps``; ``calls``: by calls of ``run.report`` or the optimizer; empty: not known."""
    silent: Ranks = NO_RANKS
    """Ranks that showed no step while others did."""


class Confirmation(Model):
    """The answer to whether all ranks stepped again."""

    generation: int
    ok: bool
    """Whether the job runs."""
    reason: str
    confirmed: bool = True
    """Whether a running job was seen to step, as its script showed it before; False: its ranks are only alive."""
    showing: Showing = Field(default_factory=Showing)
    """How the script shows its steps, as far as known now."""
    timed_out: bool = False
    """No rank ended, but not all ranks stepped in time."""
    emptied: list[str] = Field(default_factory=list)
    """Machines that lost their memory, and the launched ranks with it."""
    stepped_ns: int = 0
    """When the last rank completed its first step, nanoseconds of the wall clock."""
    completed_steps: int = -1
    parts: dict[str, float] = Field(default_factory=dict)
    """Part of the time from fork to first step → its seconds for the slowest rank, in order."""
