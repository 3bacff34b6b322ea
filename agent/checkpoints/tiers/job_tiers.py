"""This module has the tiers below memory of one job on this machine: disk and remote storage."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import structlog

from agent.checkpoints.options import FetchRange, LaunchOptions, Place
from agent.checkpoints.saved_state import SavedStates
from agent.checkpoints.tiers.disk_writer import DiskWriter
from agent.checkpoints.tiers.listing import (
    check_listable,
    on_disk,
    on_remote,
    root_of,
    roots_of,
    unlisted,
    unlisted_disk,
)
from agent.checkpoints.tiers.opened_generation import OpenedGeneration
from agent.checkpoints.tiers.remote_copier import RemoteCopier
from agent.checkpoints.tiers.remote_folder import RemoteFolder
from agent.checkpoints.tiers.restore import restore_shard
from agent.checkpoints.tiers.retention import DiskRetention
from agent.checkpoints.tiers.storage_queries import QUERIES
from agent.v1 import agent_pb2 as pb
from everstep.errors import CheckpointError
from everstep.model.topology import Topology
from everstep.shards.folders import ShardOnDisk, complete_steps, held_on_disk, prune, set_aside, step_folders
from everstep.slots.format import SlotHeader

MACHINES = "machines"
"""Name of a folder beside a job's checkpoints. Each machine that writes checkpoints there has a file in this folder,
with its generation. If two files have the same generation, these machines share the folder of checkpoints."""
LISTING_S = 45.0
"""The time limit for listing disks and remote storage, unless the request has another limit, seconds."""
VERIFYING_S = 600.0
"""The time limit if every byte is read, seconds."""

logger = structlog.get_logger()


class JobTiers:
    """Disk and remote storage of one job.

    Every method except ``on_saved`` and ``persist`` may take long: it is called in a thread, one call at a time.

    Args:
        place: Locations of the job's copies.
        fetch: Fetches tensors from another agent.
    """

    def __init__(self, place: Place, fetch: FetchRange) -> None:
        self._place = place
        self._fetch = fetch
        self._opened: OpenedGeneration | None = None
        self._is_saved = True
        """Whether ``_opened`` is on disk, so that a later agent will know it; False: the disk was full."""
        self._is_loaded = False
        """Whether ``_opened`` was read from disk, which may take long."""
        self._closed = False
        self._problems = _Problems(place.saved)
        self._retention = DiskRetention(place)
        self._disk = DiskWriter(place, lambda text: self._problems.set("disk", text), self._clean_up, self._retention)
        self._remote = RemoteCopier(place, lambda text: self._problems.set("remote", text))

    def open(self, launch: LaunchOptions) -> None:
        """Start a generation, or resume it after a restart of the agent: set abandoned steps aside, start to write.

        Generations count from 1 in each run of a job, so an earlier run may have left a higher generation on disk.
        """
        root = root_of(self._place, launch.options.disk_path)
        if not launch.options.disk_path:
            root.mkdir(parents=True, exist_ok=True, mode=0o700)
        before = self._remembered()
        again = before is not None and before.launch.generation == launch.generation
        opened = OpenedGeneration(launch)
        self._opened = opened
        self._problems.open(launch.ranks)
        if not again or not self._is_saved:
            self._is_saved = False
            self._set_aside(opened, root)
            opened.save(self._place)
            self._is_saved = True
        mine = [shard for shard in held_on_disk(root, self._place.job, ranks=launch.ranks) if shard.valid]
        if self._closed:
            return  # the job ended while the disk hung: nothing may be written into its shared memory
        there = self._there(mine, opened)
        done = max([*there, self._retention.open(launch, there) or -1])
        if launch.options.disk:
            self._mark(root, launch.generation)
            self._disk.open(launch, root, done)
            self._remote.open(opened, root)

    def on_saved(self, rank: int, header: SlotHeader) -> None:
        """Handle a committed slot of an own file; called in the thread that watches saves, returns at once."""
        self._disk.on_saved(rank)

    def persist(self, request: pb.PersistRequest) -> None:
        """Write a future step too, and keep the step that all ranks of the job have."""
        opened = self._opened
        if opened is None or request.generation != opened.launch.generation:
            return  # the request is late: its generation was stopped
        self._retention.agree(request)
        if request.step > 0:
            self._disk.persist(request.step)

    def shut(self) -> None:
        """Stop writing to disk. When this returns, no file is being written; copying to remote storage continues."""
        self._disk.shut()

    def held(self, request: pb.CheckpointsRequest) -> list[pb.HeldCheckpoint]:
        """List the copies on disk, and on remote storage if the request names it.

        A configured folder or remote storage that cannot be listed, or does not answer in time, is listed as one
        invalid copy with the reason.
        """
        opened = self._remembered()
        opened_path = opened.launch.options.disk_path if opened else ""
        queries: dict[str, Callable[[], list[pb.HeldCheckpoint]]] = {}
        roots = {f"{root}/{self._place.job}": root for root in roots_of(self._place, request.disk_path, opened_path)}
        configured = {Path(path) for path in (request.disk_path, opened_path) if path}
        for at, root in roots.items():
            queries[at] = partial(self._on_disk, root, opened, must_exist=root in configured, verify=request.verify)
        remote = f"{request.remote_url} of {self._place.job}"
        if request.remote_url:
            queries[remote] = partial(self._on_remote, request.remote_url, opened, verify=request.verify)
        copies: list[pb.HeldCheckpoint] = []
        patience_s = request.patience_s or (VERIFYING_S if request.verify else LISTING_S)
        for at, answer in QUERIES.ask(queries, patience_s).items():
            if not isinstance(answer, Exception):
                copies += answer
                continue
            logger.warning("storage cannot be listed", job=self._place.job, place=at, reason=str(answer))
            copies.append(
                unlisted_disk(self._place, roots[at], answer) if at in roots else unlisted(request.remote_url, answer)
            )
        return copies

    def _on_disk(
        self, root: Path, opened: OpenedGeneration | None, *, must_exist: bool, verify: bool
    ) -> list[pb.HeldCheckpoint]:
        check_listable(root, self._place.job, must_exist=must_exist)
        return on_disk([root], self._place.job, opened, verify=verify)

    def _on_remote(self, url: str, opened: OpenedGeneration | None, *, verify: bool) -> list[pb.HeldCheckpoint]:
        return on_remote(RemoteFolder(url, self._place.job), opened, verify=verify)

    def restore(self, shard: pb.ShardSource, options: pb.CheckpointOptions, fenced: int) -> int:
        """Fill the own slot file of ``shard.rank`` from disk or remote storage; returns the number of bytes copied.

        The slot gets the generation of the copy, but at most ``fenced`` (the newest stopped generation), because a
        generation of another run means nothing in this run.

        Raises:
            CorruptCheckpoint: the copy is damaged or missing.
            AgentUnreachable, CheckpointError, OSError: the copy cannot be read now, or there is no room.
        """
        return restore_shard(self._place, shard, options, fenced, self._fetch)

    def close(self) -> None:
        """End the threads, because the job or the agent ends; files on disk stay."""
        self._closed = True
        self._disk.close()
        self._remote.close()
        self._retention.close()

    def _remembered(self) -> OpenedGeneration | None:
        """Return the generation that this agent or an earlier agent opened last."""
        if not self._is_loaded:
            loaded = OpenedGeneration.load(self._place)
            if not self._is_loaded:
                self._opened, self._is_loaded = loaded, True
        return self._opened

    def _set_aside(self, opened: OpenedGeneration, root: Path) -> None:
        launch = opened.launch
        try:
            steps = set_aside(
                root,
                self._place.job,
                launch.resume_step if launch.resume_step > 0 else -1,
                launch.generation,
                keep=max(launch.options.disk_keep, 1),
                abandoned=opened.may_set_aside,
            )
        except (CheckpointError, OSError) as error:  # harmless: abandoned copies are never listed
            self._problems.set("disk", str(error))
            return
        if steps:
            logger.info("later steps on disk were set aside", job=self._place.job, steps=steps, folder=str(root))

    def _there(self, mine: list[ShardOnDisk], opened: OpenedGeneration) -> set[int]:
        """Record the steps of this machine's ranks that are on disk; returns the steps that all these ranks have."""
        steps: dict[int, set[int]] = {rank: set() for rank in opened.launch.ranks}
        now_ns = time.time_ns()
        for shard in sorted(mine, key=lambda shard: shard.completed_steps):
            if not opened.disowns(shard):
                steps[shard.rank].add(shard.completed_steps)
                age_s = (now_ns - shard.saved_ns) / 1e9
                self._place.saved.on_disk(shard.rank, shard.completed_steps, age_s)
        return set.intersection(*steps.values()) if steps else set()

    def _mark(self, root: Path, generation: int) -> None:
        """Write this machine's name into the folder, so that other machines know that they share it."""
        if not root.is_dir():
            return  # this is reported when the first step is due
        try:
            machines = root / self._place.job / MACHINES
            machines.mkdir(parents=True, exist_ok=True)
            (machines / self._place.machine).write_text(str(generation))
        except OSError as error:
            self._problems.set("disk", f"{root} cannot be written: {error.strerror or error}")

    def _clean_up(self, step: int) -> None:
        """Start copying and delete old steps, after a step is complete on disk. Runs in the writer's thread."""
        self._remote.notify()
        opened = self._opened
        if opened is None:
            return
        launch = opened.launch
        root = root_of(self._place, launch.options.disk_path)
        all_ranks = range(Topology.parse(launch.topology).world_size) if launch.topology else range(0)
        mine = complete_steps(root, self._place.job, launch.ranks, run=launch.run)
        common: Sequence[int] = ()
        if self._shared(root, launch.generation) or set(all_ranks) == set(launch.ranks):
            # In a shared folder only the machine of rank 0 deletes, because it sees the steps of all ranks of the job.
            if 0 not in launch.ranks:
                self._retention.found(launch, mine)
                return
            common = complete_steps(root, self._place.job, all_ranks, run=launch.run)
        old = self._retention.old(launch, mine, common=common, partly=step_folders(root, self._place.job).keys())
        copying = self._remote.copying
        prune(root, self._place.job, old - {copying}, run=launch.run)

    def _shared(self, root: Path, generation: int) -> bool:
        """Return whether another machine writes into the folder too."""
        with contextlib.suppress(OSError):
            for path in (root / self._place.job / MACHINES).iterdir():
                if path.name != self._place.machine and path.read_text() == str(generation):
                    return True
        return False


class _Problems:
    """The current reasons why writing to disk or remote storage fails, in one text for all ranks of the machine."""

    def __init__(self, saved: SavedStates) -> None:
        self._saved = saved
        self._lock = threading.Lock()
        self._texts: dict[str, str] = defaultdict(str)
        self._ranks: tuple[int, ...] = ()

    def open(self, ranks: tuple[int, ...]) -> None:
        """Forget all reasons when a generation starts."""
        with self._lock:
            self._texts.clear()
            self._ranks = ranks

    def set(self, tier: str, text: str) -> None:
        """Set the reason of one tier, empty: writing to it works."""
        with self._lock:
            self._texts[tier] = text
            problems = "; ".join(filter(None, self._texts.values()))
            for rank in self._ranks:
                self._saved.update(rank, disk_problem=problems)
