"""This module decides which steps this machine keeps on disk, even if the agent is restarted, and reports them.

A promise to keep a step is written to shared memory before it is reported. Shared memory never waits for a disk.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Collection, Sequence
from dataclasses import replace

import structlog

from agent.checkpoints.options import LaunchOptions, Place
from agent.v1 import agent_pb2 as pb
from everstep.decisions.keep.kept_disk_steps import (
    Kept,
    agreed,
    steps_to_keep,
    went_back,
)
from everstep.errors import ConfigError
from everstep.system import private_files as private

NAME = "disk"
"""Name of the file in a job's shared memory."""

NOTED = ("settled", "promised", "named", "passed")

logger = structlog.get_logger()


class DiskRetention:
    """Decides which steps of one job this machine keeps on disk; thread-safe, and its methods return at once.

    Args:
        place: Locations of the job's copies.
    """

    def __init__(self, place: Place) -> None:
        self._place = place
        self._lock = threading.Lock()
        self._launch: LaunchOptions | None = None
        self._kept = Kept()
        self._there: set[int] = set()
        self._closed = False

    def close(self) -> None:
        """Write nothing any more, because the job is over on this machine or the agent ends."""
        with self._lock:
            self._closed = True

    def open(self, launch: LaunchOptions, there: Collection[int]) -> int:
        """Start a generation, or resume it after a restart of the agent.

        Args:
            launch: Checkpoint options of the generation.
            there: The steps that all ranks of this machine have on disk.

        Returns:
            The newest step that was finished before the restart; 0: none.
        """
        with self._lock:
            self._closed = False
            generation, kept = (self._launch.generation, self._kept) if self._launch else self._load()
            again = generation == launch.generation
            self._kept = kept if again else went_back(kept, launch.resume_step)
            self._launch, self._there = launch, set(there)
            self._save(self._kept)
            self._report()
            return self._kept.passed

    def wrote(self, step: int) -> None:
        """Record that all ranks of this machine have a step on disk."""
        with self._lock:
            self._there.add(step)
            self._pass(step)

    def passed(self, step: int) -> None:
        """Record that no step up to this step will be written any more."""
        with self._lock:
            self._pass(step)

    def named(self, step: int) -> None:
        """Record that all machines were asked to write a step."""
        with self._lock:
            self._kept = replace(self._kept, named=max(self._kept.named, step))

    def agree(self, request: pb.PersistRequest) -> None:
        """Apply a watcher's report on the steps that all ranks have."""
        with self._lock:
            now = agreed(self._kept, self._there, keep=request.whole, settled=request.settled, gone=request.gone)
            if now != self._kept and self._save(now):
                self._kept = now
                self._report()

    def found(self, launch: LaunchOptions, mine: Collection[int]) -> None:
        """Record the steps that all ranks of this machine still have on disk, after another machine deleted steps."""
        with self._lock:
            if launch is self._launch:
                self._there &= set(mine)
                self._report()

    def old(
        self, launch: LaunchOptions, mine: Sequence[int], *, common: Sequence[int] = (), partly: Collection[int] = ()
    ) -> set[int]:
        """Return the steps on disk that are to be deleted; they are no longer reported.

        Args:
            launch: The generation whose steps were listed; after the start of another generation nothing is deleted.
            mine: The steps that all ranks of this machine have on disk, ascending.
            common: The steps that all ranks of the job have, as far as this machine sees them itself, ascending.
            partly: Steps with at least one file.
        """
        newest = max(launch.options.disk_keep, 1)
        with self._lock:
            if launch is not self._launch:
                return set()
            if common and common[-1] > self._kept.settled:
                self._kept = replace(self._kept, settled=common[-1], promised=max(common[-1], self._kept.promised))
            self._there &= set(mine)
            keep = steps_to_keep(self._there, self._kept, newest=newest) | set(common[-newest:])
            complete = common or mine
            oldest = complete[-newest] if len(complete) >= newest else 0
            old = {step for step in mine if step not in keep}
            old |= {step for step in partly if step not in mine and step not in keep and step < oldest}
            self._there -= old
            self._report()
        return old

    # Under the lock.

    def _pass(self, step: int) -> None:
        if step > self._kept.passed:
            self._kept = replace(self._kept, passed=step)
            self._save(self._kept)
        self._report()

    def _report(self) -> None:
        for rank in self._launch.ranks if self._launch else ():
            self._place.saved.update(
                rank,
                disk_steps=sorted(self._there),
                disk_passed=self._kept.passed,
                disk_kept=self._kept.promised,
                disk_settled=self._kept.settled,
            )

    def _save(self, kept: Kept) -> bool:
        """Write the state to shared memory; returns whether this succeeded."""
        if self._launch is None or self._closed:
            return False
        fields = {"generation": self._launch.generation, **{name: getattr(kept, name) for name in NOTED}}
        try:
            private.replace(private.make_folder(self._place.shm) / NAME, json.dumps(fields))
        except (OSError, ConfigError) as error:
            logger.error("the list of steps on disk cannot be written", job=self._place.job, reason=str(error))
            return False
        return True

    def _load(self) -> tuple[int, Kept]:
        """Read the generation and its state; generation 0: there is none, or it cannot be read."""
        try:
            fields = json.loads((self._place.shm / NAME).read_bytes())
            settled, promised, named, passed = (int(fields[name]) for name in NOTED)
            return int(fields["generation"]), Kept(settled, promised, named, passed=passed)
        except (OSError, ValueError, KeyError, TypeError):
            return 0, Kept()
