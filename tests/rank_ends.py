"""Makes ends of ranks as agents report them."""

from __future__ import annotations

from typing import Any

from everstep.decisions.blame.classify.first_cause import classification
from everstep.model.evidence import RankExit


def exited(**fields: Any) -> RankExit:
    """Return the end of a rank that ended by itself, with its class."""
    end = RankExit.model_validate(fields)
    code = -end.signal if end.signal else end.code
    return end.model_copy(update={"classification": classification(end.exception, end.log_tail, code)})
