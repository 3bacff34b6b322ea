"""What a rank's end is classified as; stored with failures, so fields are only added, with defaults."""

from __future__ import annotations

from pydantic import Field

from everstep.model.message import Model


class Classification(Model):
    """What ended a rank, by its exit, exception and last output (``everstep.decisions.blame.classify``)."""

    fault: str
    """The class, e.g. ``gpu out of memory``; ``unknown`` where nothing says it."""
    owner: str
    """Who has to act: machine, network, code, data, storage, scheduler or unknown."""
    reason: str
    """Reason code: the name of the rule, e.g. ``gpu-out-of-memory``."""
    consequence: bool = False
    """It follows from the end of another process."""
    place: str = ""
    """Of an exception: ``file:line in function`` of the user's code."""
    evidence: list[str] = Field(default_factory=list)
    """The lines that say so, the first one first; empty: the exit alone does, or they are not kept."""
