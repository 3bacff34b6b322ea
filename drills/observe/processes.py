"""Looking at a cluster's processes from outside: two copies of a rank, and what is left at the end."""

from __future__ import annotations

import os
import re
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from everstep.errors import TreeUnknown
from everstep.processes import ProcessInfo, is_alive, living

SAMPLE_S = 0.1
"""Between two looks at /proc (ours); what comes and goes in between is seen by what ranks write at their start."""
_RANK = re.compile(r"everstep r(\d+)")
_STORE = re.compile(r"everstep s\d+")


def rank_of(process: ProcessInfo) -> int | None:
    """The rank that a process is (not what a rank has started)."""
    found = _RANK.fullmatch(process.name)
    return int(found[1]) if found and process.pid == process.session else None


@dataclass(frozen=True, slots=True)
class Tree:
    """All processes below a cluster's supervisor; it adopts their orphans, so nothing leaves the tree."""

    root: int
    """Its pid; 0: not known."""

    def processes(self) -> list[ProcessInfo]:
        """The living ones, zombies left out.

        Raises:
            TreeUnknown: there is no supervisor.
        """
        found = {process.pid: process for process in living()}
        if self.root not in found:
            raise TreeUnknown("the cluster's supervisor is not there: which processes are the cluster's is not known")
        below: dict[int, bool] = {self.root: True, 0: False, 1: False}

        def inside(pid: int) -> bool:
            trail = []
            while pid not in below:
                trail.append(pid)
                pid = found[pid].parent if pid in found else 0
            below.update(dict.fromkeys(trail, below[pid]))
            return below[pid]

        return [process for process in found.values() if inside(process.pid)]

    def pids(self) -> list[int]:
        """Their ids."""
        return [process.pid for process in self.processes()]

    def left_of_jobs(self) -> list[str]:
        """What no job may leave: ranks, what they started, stores, and more than one fork server a machine."""
        left, fork_servers = [], dict[str, list[int]]()
        for process in self.processes():
            if _RANK.fullmatch(process.name) or _STORE.fullmatch(process.name):
                left.append(f"process {process.pid} ({process.name})")
            elif folder := _fork_server_folder(process.pid):
                fork_servers.setdefault(folder, []).append(process.pid)
        for pids in fork_servers.values():
            left += [f"process {pid} (a fork server too many)" for pid in sorted(pids)[:-1]]
        return left


class CopyWatch(threading.Thread):
    """Looks for two living copies of a rank, again and again, until stopped."""

    def __init__(self, tree: Tree) -> None:
        super().__init__(name="copy watch", daemon=True)
        self._tree = tree
        self._ended = threading.Event()
        self.copies: set[tuple[int, int, int]] = set()
        """(rank, pid, pid) of copies that lived at the same time."""
        self.looks = 0
        self._looked = time.monotonic()
        self._longest_s = 0.0

    @property
    def blind_s(self) -> float:
        """Longest time in which nobody looked, or nothing was seen, seconds; also when the thread is gone."""
        return max(self._longest_s, 0.0 if self._ended.is_set() else time.monotonic() - self._looked)

    def run(self) -> None:
        """Look until stopped."""
        self._looked = time.monotonic()
        while not self._ended.wait(SAMPLE_S):
            if self._look():
                self.looks += 1
                self._longest_s, self._looked = self.blind_s, time.monotonic()

    def _look(self) -> bool:
        """Look once; False: nothing could be seen, which whoever judges is told by ``blind_s``."""
        try:
            processes = self._tree.processes()
        except (TreeUnknown, OSError, ValueError):
            return False
        by_rank: dict[int, list[ProcessInfo]] = {}
        for process in processes:
            if (rank := rank_of(process)) is not None:
                by_rank.setdefault(rank, []).append(process)
        for rank, copies in by_rank.items():
            # One look takes milliseconds: count only those that still live after it.
            still = [process.pid for process in copies if is_alive(process.pid, process.start)]
            if len(copies) > 1 and len(still) > 1:
                self.copies.add((rank, still[0], still[1]))
        return True

    def stop(self) -> None:
        """End it."""
        self._longest_s = self.blind_s
        self._ended.set()
        self.join()


def children(pid: int) -> list[int]:
    """Children of a process with one thread."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def await_rank_of(fork_server: int, known: set[int], limit_s: float) -> int | None:
    """Wait, busily, until a fork server has forked a rank that was not known; its pid."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        for pid in children(fork_server):
            if pid not in known:
                with suppress(OSError):
                    if _RANK.fullmatch(os.fsdecode(Path(f"/proc/{pid}/comm").read_bytes()).strip()):
                        return pid
        time.sleep(0.0005)
    return None


def _fork_server_folder(pid: int) -> str | None:
    try:
        argv = psutil.Process(pid).cmdline()
    except psutil.Error:
        return None
    if "--socket-path" not in argv:
        return None
    return str(Path(argv[argv.index("--socket-path") + 1]).parent)
