"""What is known of an incident that was closed from outside.

It crosses Temporal and is stored in histories: fields are only added, with defaults.
"""

from __future__ import annotations

from pydantic import Field

from everstep.model.incident import Launched
from everstep.model.message import Model

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
