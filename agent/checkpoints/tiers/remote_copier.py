"""This module copies the steps that are complete on this machine's disk to remote storage, with the lowest priority.

The data is copied first and the manifest last, so that a listed copy is complete. Each machine copies the files of its
own ranks; the machine that runs rank 0 deletes old steps. A copy that failed is tried again, after waits that grow;
training is not affected.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import structlog

from agent.checkpoints.options import Place
from agent.checkpoints.tiers.background import Gate, yield_the_disk
from agent.checkpoints.tiers.listing import ABANDONED, steps_in
from agent.checkpoints.tiers.opened_generation import OpenedGeneration
from agent.checkpoints.tiers.remote_folder import RemoteFolder
from everstep.decisions.keep.next_copy import roundness
from everstep.errors import CheckpointError, CopyInterrupted
from everstep.model.topology import Topology
from everstep.shards.folders import held_on_disk, step_folder, step_name
from everstep.shards.manifest import data_name, manifest_name, parse_summary
from everstep.system.bulk_threads import yield_the_core

FIRST_RETRY_S = 2.0
LAST_RETRY_S = 300.0
"""The first and the longest wait after failures, seconds: 2 s, 4 s, … 5 minutes."""
CLOSE_PATIENCE_S = 2.0
REMOTE = "remote storage"
"""The messages about failed copies begin with this."""

logger = structlog.get_logger()


def retry_after(failures: int) -> float:
    """Return the seconds to wait after ``failures`` failures in a row, at least 1."""
    return float(min(FIRST_RETRY_S * 2 ** min(failures - 1, 20), LAST_RETRY_S))


@dataclass(frozen=True)
class _Task:
    """The source and the destination of a generation's copies."""

    opened: OpenedGeneration
    root: Path
    gate: Gate


class RemoteCopier:
    """The remote tier of one job on this machine. All methods except ``close`` return at once.

    Args:
        place: Locations of the job's copies.
        report: Called with the reason if copying fails, and with an empty text if it does not.
    """

    def __init__(self, place: Place, report: Callable[[str], None]) -> None:
        self._place = place
        self._report = report
        self._changed = threading.Condition()
        self._task: _Task | None = None
        self._news = self._closing = False
        self._copying: int | None = None
        self._thread: threading.Thread | None = None

    @property
    def copying(self) -> int | None:
        """The step that is being copied, which must not be deleted from disk now."""
        return self._copying

    def open(self, opened: OpenedGeneration, root: Path) -> None:
        """Start to copy a generation's steps from ``root``, the folder of all jobs on disk."""
        with self._changed:
            if self._task:
                self._task.gate.end(0)  # the current step may be abandoned now
            self._task = _Task(opened, root, Gate()) if opened.launch.options.remote_url else None
            if self._task and self._thread is None:
                self._thread = threading.Thread(target=self._run, name=f"remote {self._place.job}", daemon=True)
                self._thread.start()
        self.notify()

    def notify(self) -> None:
        """Wake the thread: another step is complete on disk."""
        with self._changed:
            self._news = True
            self._changed.notify_all()

    def close(self) -> None:
        """End the thread; the current file is given up."""
        with self._changed:
            self._closing = True
            if self._task:
                self._task.gate.end(0)
            self._changed.notify_all()
            thread, self._thread = self._thread, None
        if thread:
            thread.join(CLOSE_PATIENCE_S)

    def _run(self) -> None:
        yield_the_core()
        yield_the_disk()
        failures = 0
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or self._news, retry_after(failures) if failures else None)
                if self._closing:
                    return
                self._news, task = False, self._task
            if task is None:
                continue
            try:
                _RemoteRound(task, self._place, self._set_copying).run()
            except CopyInterrupted:
                continue
            except Exception as error:  # a driver may raise anything
                failures += 1
                url = task.opened.launch.options.remote_url
                logger.warning("a copy to remote storage failed", job=self._place.job, url=url, reason=str(error))
                again = f"it is tried again in {retry_after(failures):.0f} s"
                self._report(f"{REMOTE} {url} fails: {error or type(error).__name__}; {again}")
            else:
                failures = 0
                self._report("")

    def _set_copying(self, step: int | None) -> None:
        self._copying = step


class _RemoteRound:
    """One round of the copier: it does all work that is due now."""

    def __init__(self, task: _Task, place: Place, set_copying: Callable[[int | None], None]) -> None:
        launch = task.opened.launch
        self._task, self._place, self._set_copying, self._launch = task, place, set_copying, launch
        self._folder = RemoteFolder(launch.options.remote_url, place.job)

    def run(self) -> None:
        """Set aside, copy and delete; raises the driver's errors."""
        self._set_aside()
        copied = {step for step, ranks in steps_in(self._folder.sizes()).items() if self._ours_in(ranks)}
        newest = max(copied, default=-1)
        while True:
            self._record(newest)
            complete = [step for step in self._complete_on_disk() if step > newest]
            if not complete:
                return
            # Machines that are behind copy the roundest step (see everstep/decisions/keep/next_copy.py), so that they
            # copy the same steps.
            step = max(complete, key=lambda step: (roundness(step), step))
            self._set_copying(step)
            try:
                self._copy(step)
            finally:
                self._set_copying(None)
            newest = step
            self._delete_old()

    def _ours_in(self, ranks: dict[int, set[str]]) -> bool:
        return all({"json", "safetensors"} <= ranks.get(rank, set()) for rank in self._launch.ranks)

    def _complete_on_disk(self) -> list[int]:
        found: dict[int, set[int]] = {}
        for shard in held_on_disk(self._task.root, self._place.job, ranks=self._launch.ranks):
            if shard.valid and not self._task.opened.disowns(shard):
                found.setdefault(shard.completed_steps, set()).add(shard.rank)
        return [step for step, ranks in found.items() if ranks == set(self._launch.ranks)]

    def _copy(self, step: int) -> None:
        source, gate = step_folder(self._task.root, self._place.job, step), self._task.gate
        gate(1)
        for rank in self._launch.ranks:
            manifest = f"{step_name(step)}/{manifest_name(rank)}"
            before = self._folder.read([manifest]).get(manifest)
            if before == (source / manifest_name(rank)).read_bytes():
                continue  # copied by an earlier agent, or before a failure
            if before is not None:
                self._folder.remove(manifest)
            self._folder.put(source / data_name(rank), f"{step_name(step)}/{data_name(rank)}", gate)
            self._folder.put(source / manifest_name(rank), manifest, gate)
        logger.info("a step is on remote storage", job=self._place.job, step=step)

    def _set_aside(self) -> None:
        """Rename the manifests of our ranks' states that this generation abandons."""
        after = self._launch.resume_step if self._launch.resume_step > 0 else -1
        names = [
            f"{step_name(step)}/{manifest_name(rank)}"
            for step, ranks in steps_in(self._folder.sizes()).items()
            for rank in self._launch.ranks
            if step > after and "json" in ranks.get(rank, set())
        ]
        for name, text in self._folder.read(names).items():
            try:
                disowned = self._task.opened.may_set_aside(parse_summary(text, name))
            except CheckpointError:
                disowned = True  # the manifest is damaged
            if disowned:
                self._folder.move(name, f"{name}{ABANDONED}{self._launch.generation}")

    def _delete_old(self) -> None:
        """Keep the newest steps that are complete for all ranks, and as many steps that were set aside."""
        if 0 not in self._launch.ranks or not self._launch.topology:
            return
        all_ranks = set(range(Topology.parse(self._launch.topology).world_size))
        steps, keep = steps_in(self._folder.sizes()), max(self._launch.options.remote_keep, 1)
        complete = [
            step
            for step, ranks in steps.items()
            if all_ranks <= {rank for rank, kinds in ranks.items() if {"json", "safetensors"} <= kinds}
        ]
        kinds_in = {step: set().union(*ranks.values()) for step, ranks in steps.items()}
        aside = [step for step, kinds in kinds_in.items() if "aside" in kinds and "json" not in kinds]
        old = [step for step in steps if len(complete) >= keep and step < complete[-keep]]
        for step in {*old, *aside[:-keep]}:
            self._folder.remove(step_name(step))

    def _record(self, step: int) -> None:
        for rank in self._launch.ranks:
            self._place.saved.update(rank, remote_step=step)
