"""Which copies ranks found damaged as they restored from them."""

from __future__ import annotations

from everstep.model.evidence import Evidence
from everstep.model.state_copy import StateCopy, Tier

CORRUPT = "CorruptCheckpoint"
"""End of the name of what a rank raises when the state that it restores is damaged."""


def found_damaged(evidence: Evidence, resume_step: int) -> list[StateCopy]:
    """Own slots that their ranks could not restore from, as those ranks said when they ended.

    Args:
        evidence: Of the stop of the generation that restored.
        resume_step: Where it began.
    """
    exceptions = {
        (end.rank, end.machine): end.exception
        for end in evidence.exits
        if not end.stopped_by_us and end.exception.split(":")[0].endswith(CORRUPT)
    }
    return [
        copy.model_copy(
            update={"valid": False, "reason": f"its rank found it damaged: {exceptions[copy.rank, copy.machine]}"}
        )
        for copy in evidence.held
        if copy.valid and copy.tier is Tier.OWN and copy.completed_steps == resume_step > 0
        if (copy.rank, copy.machine) in exceptions
    ]
