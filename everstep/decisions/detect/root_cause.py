"""Which rank failed first, and why.

When one rank dies, its peers follow within milliseconds with broken
connections. They are victims: the cause is the earliest end that is not such a
consequence.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from everstep.model.incident import Failure, RankExit, Symptom
from everstep.signals import signal_name
from everstep.text import listed

MACHINE_LOST = "machine lost"
"""Cause of a failure in which a machine lost all that it knew and ran."""

# What a rank says when a peer went away: gloo ("Connection closed by peer [127.0.0.1]:4213", "Timed out waiting
# 1800000ms for recv operation to complete"), torch's TCPStore ("failed to recv, got 0 bytes. Connection was likely
# closed", "The client socket has timed out after 60000ms") and NCCL ("ncclRemoteError").
PEER_WENT_AWAY = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection was likely closed",
    "Connection refused",
    "Broken pipe",
    "ms for recv operation to complete",
    "ms for send operation to complete",
    "The client socket has timed out after",
    "ncclRemoteError",
)
# The kernel's words for ETIMEDOUT, EHOSTUNREACH and ENETUNREACH: a dataset's server may be what cannot be reached, so
# they count on a line of those who talk to peers only.
KERNEL_SAYS = ("Connection timed out", "No route to host", "Network is unreachable")
NETWORK_FAILED = re.compile(
    rf"^.*(?:gloo|TCPStore|Dist(?:Network|Store|Backend)Error|NCCL).*(?:{'|'.join(KERNEL_SAYS)})", re.MULTILINE
)
_TRACEBACK = "Traceback (most recent call last)"
_CHAINED = ("During handling of the above exception", "The above exception was the direct cause")

TAIL = 4096
"""Characters at the end of a rank's output that are looked at: libraries wrap an exception in another one, and the
cause stands above it (2,400 characters above the end for one of torch's pipelining, measured)."""


def is_victim(end: RankExit) -> bool:
    """Whether a rank ended because another one went away."""
    return said_of_a_peer(end) != ""


def said_of_a_peer(end: RankExit) -> str:
    """The words by which a rank says that a peer went away; empty: it does not."""
    return _peer_in(f"{end.exception}\n{end.log_tail[-TAIL:]}")


def _peer_in(text: str) -> str:
    if said := next((phrase for phrase in PEER_WENT_AWAY if phrase in text), ""):
        return said
    # Most outputs have none of these words, and then need not be searched: that takes ten times as long.
    failed = NETWORK_FAILED.search(text) if any(words in text for words in KERNEL_SAYS) else None
    return failed.group().strip() if failed else ""


def _raised(end: RankExit) -> str:
    """The exception that ended a rank, with those that led to it; not what was logged before."""
    parts = end.log_tail[-TAIL:].split(_TRACEBACK)
    first = len(parts) - 1
    while first > 1 and any(link in parts[first - 1] for link in _CHAINED):
        first -= 1
    return "\n".join([end.exception, *parts[first:]]) if first else end.exception


def first_failure(ends: Sequence[RankExit]) -> RankExit | None:
    """The end that explains the others; None when no rank ended by itself.

    A rank that left with code 0 explains those that failed because a peer went
    away, and those that were stopped; it does not explain a failure of its own kind.
    """
    own = [end for end in ends if not end.stopped_by_us and (end.code is not None or end.signal or end.time_ns)]
    by_themselves = [end for end in own if not is_victim(end)]
    candidates = [end for end in by_themselves if end.code != 0] or by_themselves or own
    return min(candidates, key=lambda end: (end.time_ns, end.rank), default=None)


def cause_of(end: RankExit) -> str:
    """Signature of an end, the same for the same cause: ``SIGKILL``, ``ValueError`` or ``exit code 3``."""
    if end.signal:
        return signal_name(end.signal)
    if end.exception:
        return end.exception.split(":", 1)[0].strip() or "exception"
    if end.code is None:
        return "exit status unknown"
    if end.code == 0:
        return "early exit"
    return f"exit code {end.code}"


def symptom_of(end: RankExit) -> Symptom:
    """What an end looks like from outside."""
    if end.signal:
        return Symptom.CRASH
    if end.exception:
        return Symptom.CONNECTION_LOST if _peer_in(_raised(end)) else Symptom.USER_ERROR
    if end.code == 0:
        return Symptom.EARLY_EXIT
    return Symptom.CRASH


def headline_of(end: RankExit) -> str:
    """One line for a person: ``rank 5 on m2 ended by SIGKILL``."""
    where = f"rank {end.rank} on {end.machine}"
    if end.signal:
        return f"{where} ended by {signal_name(end.signal)}"
    if end.exception:
        return f"{where} raised {end.exception[:120]}"
    if end.code is None:
        return f"{where} ended, its exit status is unknown"
    if end.code == 0:
        return f"{where} left with code 0 before the job was over"
    return f"{where} ended with exit code {end.code}"


def headline_of_loss(lost: Mapping[str, Sequence[int]], end: RankExit | None) -> str:
    """One line about machines that came back empty: ``m2 came back empty and lost ranks 4, 5``.

    Args:
        lost: Machine → the ranks that it ran.
        end: The first end of a rank elsewhere; it is named unless it only followed.
    """
    ranks = sorted(rank for ranks in lost.values() for rank in ranks)
    noun = "rank" if len(ranks) == 1 else "ranks"
    text = f"{listed(sorted(lost))} came back empty and lost {noun} {listed(ranks)}"
    return text if end is None or is_victim(end) else f"{text}; {headline_of(end)}"


def failure_of(end: RankExit, *, generation: int, step: int, now_ns: int) -> Failure:
    """The failure as it is kept for later decisions; ``now_ns``: when, by the clock of the one that keeps it."""
    return Failure(
        generation=generation,
        step=step,
        symptom=symptom_of(end),
        cause=cause_of(end),
        time_ns=now_ns,
        shown=end.shown_steps,
    )
