"""What the ends of ranks say: success, a failure, or a rank that left before the others."""

from __future__ import annotations

from collections.abc import Collection

from everstep.decisions.detect.facts import JobFacts, ObservedExit
from everstep.decisions.detect.root_cause import classification_of, headline_of, symptom_of
from everstep.model.incident import Anomaly


def is_success(seen: ObservedExit) -> bool:
    """Whether a rank ended as it should: with code 0, as under torchrun."""
    if seen.end.code == 0:
        return True
    # The status is lost when the parent died first; the rank's own word is enough, and nothing less.
    return seen.end.code is None and not seen.end.signal and seen.finished


def has_finished(exits: Collection[ObservedExit], world_size: int) -> bool:
    """Whether all ranks of a generation left with success: the job is done."""
    return len(exits) >= world_size and all(map(is_success, exits))


def anomaly_of(facts: JobFacts, seen: ObservedExit) -> Anomaly:
    """The anomaly that a rank's end is reported as."""
    end = seen.end
    return Anomaly(
        id=seen.id,
        generation=facts.generation,
        symptom=symptom_of(end),
        headline=headline_of(end),
        ranks=[end.rank],
        machines=[end.machine],
        seen_ns=end.time_ns,
        classification=classification_of(end),
    )
