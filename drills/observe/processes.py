"""Observes a cluster's processes from outside: finds two processes of one rank, and processes that a job left."""

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
"""Time between two samples, seconds. A rank that lives shorter than this still logs a line at its start."""
_RANK = re.compile(r"everstep r(\d+)")
_STORE = re.compile(r"everstep s\d+")
_OUTPUT = re.compile(r"/machines/([^/]+)/jobs/([^/]+)/")
"""Matches the machine and the job in the path of the output file of a local cluster's rank."""


def rank_of(process: ProcessInfo) -> int | None:
    """Return the number of the rank that a process is; None: it is no rank. A child of a rank is no rank."""
    match = _RANK.fullmatch(process.name)
    return int(match[1]) if match and process.pid == process.session else None


class RankLocation(NamedTuple):
    """The job and the machine of a rank's process; empty: not known."""

    job: str = ""
    machine: str = ""


def location_of(pid: int) -> RankLocation:
    """Return the job and the machine of a rank's process, from the path of its output file."""
    files = open_files(pid)
    for descriptor in (1, 2):
        if match := _OUTPUT.search(files.get(descriptor, "")):
            return RankLocation(match[2], match[1])
    return RankLocation()


class RankCopies(NamedTuple):
    """Two processes of one rank that lived at the same time."""

    job: str
    rank: int
    pids: tuple[int, int]
    machines: tuple[str, str]


@dataclass(frozen=True, slots=True)
class Tree:
    """All processes below a cluster's supervisor. The supervisor adopts orphans, so no process leaves the tree."""

    root: int
    """Pid of the supervisor; 0: not known."""

    def processes(self) -> list[ProcessInfo]:
        """Return the live processes of the tree, without zombies.

        Raises:
            TreeUnknown: there is no supervisor.
        """
        by_pid = {process.pid: process for process in living()}
        if self.root not in by_pid:
            raise TreeUnknown("the cluster's supervisor does not run, so the cluster's processes are not known")
        below: dict[int, bool] = {self.root: True, 0: False, 1: False}

        def inside(pid: int) -> bool:
            trail = []
            while pid not in below:
                trail.append(pid)
                pid = by_pid[pid].parent if pid in by_pid else 0
            below.update(dict.fromkeys(trail, below[pid]))
            return below[pid]

        return [process for process in by_pid.values() if inside(process.pid)]

    def pids(self) -> list[int]:
        """Return the pids of the live processes."""
        return [process.pid for process in self.processes()]

    def left_of_jobs(self) -> list[str]:
        """Return the processes that no ended job may leave: ranks, rendezvous stores, and a second fork server of a
        machine."""
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
    """A thread that finds two live processes of one rank, and machines with ranks of two jobs."""

    def __init__(self, tree: Tree) -> None:
        super().__init__(name="copy watch", daemon=True)
        self._tree = tree
        self._ended = threading.Event()
        self.copies: set[RankCopies] = set()
        self.shared: set[tuple[str, tuple[str, ...]]] = set()
        """Machine, and the jobs that had ranks on it at the same time."""
        self._locations: dict[tuple[int, int], RankLocation] = {}
        """Pid and start of a rank's process → its location."""
        self.samples = 0
        self._sampled = time.monotonic()
        self._longest_s = 0.0

    @property
    def blind_s(self) -> float:
        """Longest time without a successful sample, seconds; it also counts the time after the thread failed."""
        return max(self._longest_s, 0.0 if self._ended.is_set() else time.monotonic() - self._sampled)

    def run(self) -> None:
        """Take samples until stopped."""
        self._sampled = time.monotonic()
        while not self._ended.wait(SAMPLE_S):
            if self._sample():
                self.samples += 1
                self._longest_s, self._sampled = self.blind_s, time.monotonic()

    def _sample(self) -> bool:
        """Take one sample; returns False if no process could be seen, which then shows in ``blind_s``."""
        try:
            processes = self._tree.processes()
        except (TreeUnknown, OSError, ValueError):
            return False
        by_rank: dict[tuple[str, int], list[ProcessInfo]] = {}
        by_machine: dict[str, list[ProcessInfo]] = {}
        self._locations = {(p.pid, p.start): self._location(p) for p in processes if rank_of(p) is not None}
        for process in processes:
            if (rank := rank_of(process)) is not None:
                location = self._locations[process.pid, process.start]
                by_rank.setdefault((location.job, rank), []).append(process)
                by_machine.setdefault(location.machine, []).append(process)
        for (job, rank), copies in by_rank.items():
            if len(alive := self._still_alive(copies)) > 1:
                first, second = alive[:2]
                machines = self._location(first).machine, self._location(second).machine
                self.copies.add(RankCopies(job, rank, (first.pid, second.pid), machines))
        for machine, ranks in by_machine.items():
            if machine and len(self._jobs(ranks)) > 1 and len(jobs := self._jobs(self._still_alive(ranks))) > 1:
                self.shared.add((machine, tuple(sorted(jobs))))
        return True

    def _location(self, process: ProcessInfo) -> RankLocation:
        """Return the location of a rank's process; it is not known right after the fork, before it has an output
        file."""
        before = self._locations.get((process.pid, process.start), RankLocation())
        return before if before.job else location_of(process.pid)

    def _jobs(self, processes: list[ProcessInfo]) -> set[str]:
        return {self._location(process).job for process in processes}

    @staticmethod
    def _still_alive(processes: list[ProcessInfo]) -> list[ProcessInfo]:
        """Return the processes that are still alive after the sample, which takes milliseconds; one alone is not
        checked."""
        return [p for p in processes if is_alive(p.pid, p.start)] if len(processes) > 1 else processes

    def stop(self) -> None:
        """Stop the thread."""
        self._longest_s = self.blind_s
        self._ended.set()
        self.join()


def await_rank_of(fork_server: int, children_before: set[int], limit_s: float) -> int | None:
    """Busy-wait until a fork server has forked a new rank; returns its pid, or None after the time limit."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        for pid in (children(fork_server) or set()) - children_before:
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
