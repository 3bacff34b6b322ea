"""The end of one rank, classified by what its agent knows: exit, exception and the end of its output."""

from __future__ import annotations

from functools import lru_cache

from everstep.decisions.blame.classify.first_cause import first_cause
from everstep.decisions.blame.classify.match import LineMatcher
from everstep.decisions.blame.classify.scan import LogScanner
from everstep.decisions.blame.classify.verdict import LogVerdict
from everstep.model.classification import Classification

TAIL = 4096
"""Characters at the end of a rank's output that are looked at: libraries wrap an exception in another one, and the
cause stands above it (2,400 characters above the end for one of torch's pipelining, measured)."""
EVIDENCE_LINES = 3
"""Lines that are kept of one rank's output as evidence of its class."""
_MATCHER = LineMatcher()


def classification(exception: str, log_tail: str, exit_code: int | None) -> Classification:
    """What ended a rank, as it is kept; the arguments are those of ``classify_end``."""
    verdict = classify_end(exception, log_tail, exit_code)
    return Classification(
        fault=verdict.fault.value,
        owner=verdict.owner.value,
        reason=verdict.reason,
        consequence=verdict.consequence,
        place=verdict.place,
        evidence=[line.text for line in verdict.evidence[:EVIDENCE_LINES]],
    )


@lru_cache(maxsize=4096)
def classify_end(exception: str, log_tail: str, exit_code: int | None) -> LogVerdict:
    """What ended a rank.

    Args:
        exception: The line that names what it raised; empty: it raised nothing.
        log_tail: The end of its error output.
        exit_code: Its code, or minus its signal; None: not known.
    """
    scanner = LogScanner("output", matcher=_MATCHER)
    scanner.feed(log_tail[-TAIL:].encode(errors="replace") + b"\n")
    if exception and not scanner.raised_last(exception):
        scanner.feed(exception.encode(errors="replace") + b"\n")
    return first_cause([scanner.close()], exit_code)
