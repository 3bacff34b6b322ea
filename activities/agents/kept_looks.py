"""What looks at ranks showed, in the ledger, in full."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from temporalio import activity

from activities.agents.looks import RankLook
from activities.ledger.ledger import Ledger
from everstep.errors import LedgerError

KEEP_S = 0.2
"""The ledger is waited for so long; it goes on taking what was seen after that."""


_writing: set[asyncio.Future[None]] = set()
"""Writes that go on although nobody waits for them any more."""


async def keep_looks(ledger: Ledger, incident: str, looks: Sequence[RankLook], first: int = 1) -> str:
    """Write samples into the ledger, without waiting for one that is slow; returns why they are not all there.

    Args:
        ledger: Of the cluster.
        incident: Whose samples they are.
        looks: In their order.
        first: Number of the first of them within the incident.
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
