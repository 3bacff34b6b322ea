"""The state of inspections for the next agent, written to shared memory at once and to disk when it accepts it."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import structlog

from agent.state.disk import StateDisk
from everstep.base.log_once import LoggedErrors
from everstep.errors import ConfigError
from everstep.system import private_files as private
from everstep.system.procfs import boot_id

FILE = "monitor.json"

logger = structlog.get_logger()


class KeptStates:
    """One file for all inspections of an agent.

    Args:
        folder: In shared memory.
        copies: Folder on disk, for the time after a reboot; None: there is none.
        disk: Writes the copy.
        boot: Id of this start of the kernel; by default it is asked.
    """

    def __init__(
        self, folder: Path, copies: Path | None = None, disk: StateDisk | None = None, boot: str | None = None
    ) -> None:
        self._path = folder / FILE
        self._copy = copies / FILE if copies else None
        self._disk = disk
        self._boot = boot_id() if boot is None else boot
        self._lock = threading.Lock()
        self._failures = LoggedErrors()
        self.same_boot = False
        """The machine was not started anew since what is here was kept."""
        self._states: dict[str, dict[str, Any]] = {}
        self._written = b""
        self._load()

    def of(self, inspection: str) -> dict[str, Any]:
        """Return the state that an inspection of an earlier agent kept; empty: there is none."""
        return dict(self._states.get(inspection, {}))

    def keep(self, inspection: str, state: dict[str, Any]) -> None:
        """Keep what an inspection needs, where it changed. Called in the threads of inspections."""
        with self._lock:
            try:
                json.dumps(state)
            except (TypeError, ValueError) as error:  # of a site's own; the others' states are kept all the same
                if self._failures.is_new(inspection, error):
                    logger.error("what an inspection keeps is no JSON", inspection=inspection, reason=str(error))
                return
            self._states[inspection] = state
            text = json.dumps({"boot": self._boot, "states": self._states}).encode()
            if text == self._written:
                return
            self._written = text
            try:
                private.replace(self._path, text)
                self._failures.recovered(FILE)
            except (OSError, ConfigError) as error:
                if self._failures.is_new(FILE, error):
                    logger.error("what inspections keep has no room in shared memory", reason=str(error))
            if self._disk and self._copy:
                self._disk.put(self._copy, text)

    def _load(self) -> None:
        for path in (self._path, self._copy):
            if path is None or not path.exists():
                continue
            try:
                kept = json.loads(path.read_bytes())
                states, boot = kept["states"], kept["boot"]
                self._states = {name: dict(state) for name, state in states.items()}
            except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                logger.warning("what inspections kept is damaged and ignored", path=str(path), reason=str(error))
                continue
            self.same_boot = boot == self._boot
            return
