"""Writes the samples of ranks into the ledger, in full."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from temporalio import activity

from activities.agents.looks import RankLook
from activities.ledger.ledger import Ledger
from everstep.errors import LedgerError

KEEP_S = 0.2
"""The longest wait for the ledger, seconds; the write continues after that."""


_writing: set[asyncio.Future[None]] = set()
"""Writes that continue after the wait for them has ended."""


async def keep_looks(ledger: Ledger, incident: str, looks: Sequence[RankLook], first: int = 1) -> str:
    """Write samples into the ledger, without waiting for a slow ledger; returns why some are missing.

    Args:
        ledger: The cluster's ledger.
        incident: The incident that the samples belong to.
        looks: The samples, in order.
        first: The first sample's number within the incident.
    """
    rows = [
        (number, machine, reply.time_ns, reply.SerializeToString())
        for number, look in enumerate(looks, first)
        for machine, reply in look.replies.items()
    ]
    writing = asyncio.ensure_future(ledger.call(Ledger.looks_taken, incident, rows))
    _writing.add(writing)
    writing.add_done_callback(_written)
    await asyncio.wait([writing], timeout=KEEP_S)
    if not writing.done():
        return "the ledger did not take the stacks in time"
    return str(writing.exception() or "")


def _written(writing: asyncio.Future[None]) -> None:
    _writing.discard(writing)
    if not writing.cancelled() and isinstance(error := writing.exception(), LedgerError):
        activity.logger.warning("the ledger did not take the stacks", extra={"error": str(error)})
