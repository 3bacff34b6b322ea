"""What looks at ranks showed, in the ledger, in full."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from temporalio import activity

from activities.agents.looks import RankLook
from activities.ledger import Ledger
from everstep.errors import LedgerError

KEEP_S = 0.2
"""The ledger is waited for so long; it goes on taking what was seen after that."""


class KeptLooks:
    """Writes looks for activities, which do not wait for a ledger that is slow."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._writing: set[asyncio.Future[None]] = set()

    async def keep(self, incident: str, looks: Sequence[RankLook], first: int = 1) -> str:
        """Write what was seen; returns why it is not all there.

        Args:
            incident: Whose looks they are.
            looks: In their order.
            first: Number of the first of them within the incident.
        """
        rows = [
            (number, machine, reply.time_ns, reply.SerializeToString())
            for number, one in enumerate(looks, first)
            for machine, reply in one.replies.items()
        ]
        writing = asyncio.ensure_future(self._ledger.call(Ledger.looks_taken, incident, rows))
        self._writing.add(writing)
        writing.add_done_callback(self._written)
        await asyncio.wait([writing], timeout=KEEP_S)
        if not writing.done():
            return "the ledger did not take the stacks in time"
        return str(writing.exception() or "")

    def _written(self, writing: asyncio.Future[None]) -> None:
        self._writing.discard(writing)
        if not writing.cancelled() and isinstance(error := writing.exception(), LedgerError):
            activity.logger.warning("the ledger did not take the stacks", extra={"error": str(error)})
