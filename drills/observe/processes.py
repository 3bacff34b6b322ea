"""Observes a cluster's processes from outside: two copies of a rank, and processes that are left at the end."""

from __future__ import annotations

import re
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import psutil

from everstep.errors import TreeUnknown
from everstep.system.procfs import ProcessInfo, children, is_alive, living, open_files, process_of

SAMPLE_S = 0.1
"""Time between two samples, seconds; shorter lives show in the lines that ranks log at their start."""
_RANK = re.compile(r"everstep r(\d+)")
_STORE = re.compile(r"everstep s\d+")
_OUTPUT = re.compile(r"/machines/([^/]+)/jobs/([^/]+)/")
"""Matches machine and job in the name of the output file of a local cluster's rank."""


def rank_of(process: ProcessInfo) -> int | None:
    """The rank of a process; None: it is not a rank (children of ranks are not)."""
    found = _RANK.fullmatch(process.name)
    return int(found[1]) if found and process.pid == process.session else None


class RankPlace(NamedTuple):
    """The job and the machine of a rank; empty: not known."""

    job: str = ""
    machine: str = ""


def place_of(pid: int) -> RankPlace:
    """The job and machine of a rank's process, from the name of its output file."""
    files = open_files(pid)
    for descriptor in (1, 2):
        if found := _OUTPUT.search(files.get(descriptor, "")):
            return RankPlace(found[2], found[1])
    return RankPlace()


class RankCopies(NamedTuple):
    """Two processes of one rank that lived at the same time."""

    job: str
    rank: int
    pids: tuple[int, int]
    machines: tuple[str, str]


@dataclass(frozen=True, slots=True)
class Tree:
    """All processes below a cluster's supervisor; it adopts their orphans, so no process leaves the tree."""

    root: int
    """Pid of the supervisor; 0: not known."""

    def processes(self) -> list[ProcessInfo]:
        """The live processes, without zombies.

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
        """The pids of the live processes."""
        return [process.pid for process in self.processes()]

    def left_of_jobs(self) -> list[str]:
        """Processes that no job may leave: ranks, their children, stores, and more than one fork server a machine."""
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
    """A thread that checks for two live copies of a rank, and for machines with ranks of two jobs, until stopped."""

    def __init__(self, tree: Tree) -> None:
        super().__init__(name="copy watch", daemon=True)
        self._tree = tree
        self._ended = threading.Event()
        self.copies: set[RankCopies] = set()
        self.shared: set[tuple[str, tuple[str, ...]]] = set()
        """Machine, and jobs of which it had ranks at the same time."""
        self._places: dict[tuple[int, int], RankPlace] = {}
        """Pid and start of a rank → its place."""
        self.looks = 0
        self._looked = time.monotonic()
        self._longest_s = 0.0

    @property
    def blind_s(self) -> float:
        """Longest time without a sample that saw processes, seconds; also after the thread has ended."""
        return max(self._longest_s, 0.0 if self._ended.is_set() else time.monotonic() - self._looked)

    def run(self) -> None:
        """Take samples until stopped."""
        self._looked = time.monotonic()
        while not self._ended.wait(SAMPLE_S):
            if self._look():
                self.looks += 1
                self._longest_s, self._looked = self.blind_s, time.monotonic()

    def _look(self) -> bool:
        """Take one sample; False: no process could be seen, which ``blind_s`` shows to the judge."""
        try:
            processes = self._tree.processes()
        except (TreeUnknown, OSError, ValueError):
            return False
        by_rank: dict[tuple[str, int], list[ProcessInfo]] = {}
        by_machine: dict[str, list[ProcessInfo]] = {}
        self._places = {(one.pid, one.start): self._place(one) for one in processes if rank_of(one) is not None}
        for process in processes:
            if (rank := rank_of(process)) is not None:
                place = self._places[process.pid, process.start]
                by_rank.setdefault((place.job, rank), []).append(process)
                by_machine.setdefault(place.machine, []).append(process)
        for (job, rank), copies in by_rank.items():
            if len(still := self._still(copies)) > 1:
                one, other = still[0], still[1]
                machines = self._place(one).machine, self._place(other).machine
                self.copies.add(RankCopies(job, rank, (one.pid, other.pid), machines))
        for machine, ranks in by_machine.items():
            jobs = {self._place(one).job for one in ranks}
            if machine and len(jobs) > 1 and len(jobs := {self._place(one).job for one in self._still(ranks)}) > 1:
                self.shared.add((machine, tuple(sorted(jobs))))
        return True

    def _place(self, process: ProcessInfo) -> RankPlace:
        """The place of a rank, kept once it is known; a rank that was just forked has no output file yet."""
        known = self._places.get((process.pid, process.start), RankPlace())
        return known if known.job else place_of(process.pid)

    @staticmethod
    def _still(processes: list[ProcessInfo]) -> list[ProcessInfo]:
        """Those copies that are still alive after the sample, which takes milliseconds."""
        return [one for one in processes if is_alive(one.pid, one.start)] if len(processes) > 1 else processes

    def stop(self) -> None:
        """Stop the thread."""
        self._longest_s = self.blind_s
        self._ended.set()
        self.join()


def await_rank_of(fork_server: int, known: set[int], limit_s: float) -> int | None:
    """Busy-wait until a fork server has forked a new rank; returns its pid."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        for pid in (children(fork_server) or set()) - known:
            if (process := process_of(pid)) and _RANK.fullmatch(process.name):
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
