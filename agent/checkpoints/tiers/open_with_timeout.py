"""This module opens and shuts the lower tiers, disk and remote storage, without waiting for a disk that hangs."""

from __future__ import annotations

import threading

import structlog

from agent.checkpoints.options import LaunchOptions
from agent.checkpoints.saved_state import SavedStates
from agent.checkpoints.tiers.job_tiers import JobTiers
from everstep.errors import EverstepError
from everstep.slots.format import SlotHeader

OPEN_S = 5.0
"""A launch waits this long for the disk, seconds; then its ranks are started without the lower tiers."""
AGAIN_S = 5.0
"""The time from a failed attempt to open the tiers, e.g. on a full disk, to the next attempt, seconds."""
SILENT = "the disk does not answer"

logger = structlog.get_logger()


class TiersWithTimeout:
    """Opens and shuts the lower tiers of a job in a thread; one call of ``open`` or ``shut`` at a time."""

    def __init__(self, tiers: JobTiers, saved: SavedStates) -> None:
        self._tiers = tiers
        self._saved = saved
        self._lock = threading.Condition()
        self._wanted: LaunchOptions | None = None
        self._opened: LaunchOptions | None = None
        self._working = self._trying = False
        self._reported = ""

    def open(self, launch: LaunchOptions) -> None:
        """Open the tiers; a failure is reported as the ranks' ``disk_problem``."""
        with self._lock:
            self._wanted = launch
            waits = self._working and self._trying  # the thread still waits for a disk that hangs
            if not self._working:
                threading.Thread(target=self._work, name="open tiers", daemon=True).start()
            self._working = self._trying = True
            self._lock.notify_all()
            silent = waits or not self._lock.wait_for(lambda: not self._trying, OPEN_S)
        if silent:
            self._problem(launch, SILENT)

    def on_saved(self, rank: int, header: SlotHeader) -> None:
        """Handle a committed slot."""
        if self._opened:
            self._tiers.on_saved(rank, header)

    def shut(self) -> None:
        """Stop writing. When this returns, nothing is written any more."""
        with self._lock:
            self._wanted = None
            self._lock.notify_all()
            opened, self._opened = self._opened, None
        if opened:
            self._tiers.shut()

    def _work(self) -> None:
        """Open the wanted generation, which may change while the disk hangs; a failed attempt is repeated."""
        while launch := self._next():
            try:
                self._tiers.open(launch)
            except (EverstepError, OSError) as error:
                self._problem(launch, str(error))
                self._wait(launch)
            else:
                if not self._accept(launch):
                    self._tiers.shut()
                    continue
                for rank in launch.ranks:
                    if self._saved.of(rank).disk_problem in {SILENT, self._reported}:
                        self._saved.update(rank, disk_problem="")

    def _next(self) -> LaunchOptions | None:
        with self._lock:
            found = self._wanted
            self._working = self._trying = found is not None
            self._lock.notify_all()
            return found

    def _wait(self, launch: LaunchOptions) -> None:
        """Wait until the next try, or until another generation is wanted."""
        with self._lock:
            self._trying = False
            self._lock.notify_all()
            self._lock.wait_for(lambda: self._wanted is not launch, AGAIN_S)

    def _accept(self, launch: LaunchOptions) -> bool:
        """Record that a generation was opened; returns whether it is still wanted."""
        with self._lock:
            current = self._wanted is launch
            if current:
                self._wanted, self._opened = None, launch
            return current

    def _problem(self, launch: LaunchOptions, text: str) -> None:
        if text != self._reported or text == SILENT:
            logger.error("nothing is written to disk", reason=text)
        self._reported = text
        for rank in launch.ranks:
            self._saved.update(rank, disk_problem=text)
