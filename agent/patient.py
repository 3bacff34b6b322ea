"""The lower tiers, opened and shut without waiting for a disk that hangs."""

from __future__ import annotations

import threading

import structlog

from agent.saved import SavedStates
from agent.terms import LowerTiers, Terms
from everstep.errors import EverstepError
from everstep.slot_format import SlotHeader

OPEN_S = 5.0
"""A disk that does not answer within this time is left to itself: ranks are started without it (ours)."""
SILENT = "the disk does not answer"

logger = structlog.get_logger()


class PatientTiers:
    """Opens tiers in a thread of its own. ``open`` and ``shut`` are called by one thread at a time."""

    def __init__(self, tiers: LowerTiers, saved: SavedStates) -> None:
        self._tiers = tiers
        self._saved = saved
        self._lock = threading.Lock()
        self._wanted: Terms | None = None
        self._opened: Terms | None = None
        self._working = False

    def open(self, terms: Terms) -> None:
        """Open them; what keeps them from it is told as the ranks' ``disk_problem``."""
        with self._lock:
            self._wanted = terms
            start, self._working = not self._working, True
        if start:
            worker = threading.Thread(target=self._work, name="open tiers", daemon=True)
            worker.start()
            worker.join(OPEN_S)
        with self._lock:
            silent = self._working
        if silent:
            self._problem(terms, SILENT)

    def on_saved(self, rank: int, header: SlotHeader) -> None:
        """A slot is committed."""
        if self._opened:
            self._tiers.on_saved(rank, header)

    def shut(self) -> None:
        """Nothing is written any more when this returns."""
        with self._lock:
            self._wanted = None
            opened, self._opened = self._opened, None
        if opened:
            self._tiers.shut()

    def _work(self) -> None:
        """Open what is wanted, which may change while the disk hangs."""
        while terms := self._next():
            try:
                self._tiers.open(terms)
            except (EverstepError, OSError) as error:
                self._problem(terms, str(error))
                self._took(terms, None)
            else:
                if not self._took(terms, terms):
                    self._tiers.shut()
                    continue
                for rank in terms.ranks:
                    if self._saved.of(rank).disk_problem == SILENT:
                        self._saved.update(rank, disk_problem="")

    def _next(self) -> Terms | None:
        with self._lock:
            found = self._wanted
            self._working = found is not None
            return found

    def _took(self, terms: Terms, opened: Terms | None) -> bool:
        with self._lock:
            current = self._wanted is terms
            if current:
                self._wanted, self._opened = None, opened
            return current

    def _problem(self, terms: Terms, text: str) -> None:
        logger.error("nothing is written to disk", reason=text)
        for rank in terms.ranks:
            self._saved.update(rank, disk_problem=text)
