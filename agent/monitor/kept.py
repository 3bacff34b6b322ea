"""This module keeps the state of inspections for the next agent: in shared memory at once, and on disk soon after."""

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
    """The kept state of all inspections of an agent, in one file.

    Args:
        folder: Folder of the file, in shared memory.
        copies: Folder on disk of a copy that outlives a reboot; None: there is no copy.
        disk: Writes the copy.
        boot: Boot id of the kernel; by default it is read.
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
        """Whether the machine has not been rebooted since the loaded state was kept."""
        self._states: dict[str, dict[str, Any]] = {}
        self._written = b""
        self._load()

    def of(self, inspection: str) -> dict[str, Any]:
        """Return the kept state of an inspection; empty: there is none."""
        return dict(self._states.get(inspection, {}))

    def keep(self, inspection: str, state: dict[str, Any]) -> None:
        """Keep the state of an inspection if it changed. Called in the threads of inspections."""
        with self._lock:
            try:
                json.dumps(state)
            except (TypeError, ValueError) as error:  # a site's own inspection may do this; other states are still kept
                if self._failures.is_new(inspection, error):
                    logger.error("the state of an inspection is not JSON", inspection=inspection, reason=str(error))
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
                    logger.error("the state of the inspections cannot be written to shared memory", reason=str(error))
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
                logger.warning(
                    "the kept state of the inspections is damaged and is ignored", path=str(path), reason=str(error)
                )
                continue
            self.same_boot = boot == self._boot
            return
