"""What every rule of detection looks like."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from everstep.decisions.detect.facts import JobFacts
from everstep.model.incident import Anomaly


@dataclass(frozen=True, slots=True)
class Rule:
    """One way to see that a job does not train as it should: the facts of one generation in, an anomaly or none out."""

    name: str
    """Kept with each anomaly that the rule finds; it does not change."""
    finds: str
    """What it finds, in one line."""
    threshold: str
    """When that is an anomaly; ``{policy.…}`` and ``{checkpoint.…}`` stand for the numbers of a job."""
    source: str
    """Where the threshold is from; empty: the papers leave it open."""
    judge: Callable[[JobFacts], Anomaly | None]
    """Keeps nothing between two calls."""
