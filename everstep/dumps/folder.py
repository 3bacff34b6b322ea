"""Reads a folder of dumps of a job that hangs: stacks, flight records, and a report of NCCL's RAS.

The kind of a file is recognized by its content. Its rank is in its name or in that of its folder: ``rank-5.json``,
``rank_5/loader.txt``, ``nccl_trace_rank_5``. Or its process is listed in a file ``processes.json``, in its folder or in
a folder around it. This file is a list of ``{"pid": 123, "rank": 5, "role": "trainer", "state": "T", "blocked_in":
"sleep"}``; only pid and rank are required.

Folders ``snapshot-1``, ``snapshot-2`` … are samples of the same job. The last sample is judged; ranks that differ
between the first and the last sample have progressed.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import re
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from everstep.base.text import listed
from everstep.decisions.blame.hang.rank_samples import (
    NOTHING,
    CommunicationRecord,
    JobSamples,
    Position,
    RankSample,
    compared,
)
from everstep.decisions.blame.hang.stacks import ProcessRole
from everstep.dumps.flight_records import PICKLE, flight_record, parse_record
from everstep.dumps.nccl_ras import parse_ras, ras_evidence
from everstep.dumps.py_spy import ProcessDump, StackReader, role_of_process
from everstep.dumps.unreadable import UNREADABLE, rank_number
from everstep.errors import ConfigError, DumpError

PROCESSES = "processes.json"
STOPPED = ("T",)
"""States of a stopped process, as in ``/proc/PID/stat``. State t does not count, since a debugger stopped the
process."""
SLEEPS = "S"
"""State of a process that waits."""
_RANK = re.compile(r"rank[-_. ]?(\d+)", re.IGNORECASE)
_LAST_NUMBER = re.compile(r"(\d+)(?:\.\w+)*$")
_SNAPSHOT = re.compile(r"snapshot[-_. ]?(\d+)")
_GZIP = b"\x1f\x8b"
SHOWN = 3
"""Number of unread files that an error names."""


@dataclass(frozen=True, slots=True)
class KnownProcess:
    """The entry of a process in ``processes.json``."""

    rank: int
    role: ProcessRole | None
    state: str
    blocked_in: str


class FolderReader:
    """Reads one sample of a job.

    Args:
        stacks: Reads dumps of py-spy. Several readers may share it, since their stacks are mostly equal.
        pickles: Whether flight records may be pickles.
    """

    def __init__(self, stacks: StackReader, *, pickles: bool = False) -> None:
        self._stacks = stacks
        self._pickles = pickles
        self._known: dict[str, dict[int, KnownProcess]] = {}
        """Folder → process id → its entry in the folder's ``processes.json``."""
        self._trainers: dict[int, tuple[tuple[bool, int, str], ProcessDump, KnownProcess | None]] = {}
        self._helpers: dict[int, list[tuple[ProcessDump, ProcessRole]]] = defaultdict(list)
        self._records: dict[int, CommunicationRecord] = {}
        self._record_names: dict[int, str] = {}
        self._positions: dict[int, tuple[int, int]] = {}
        self._groups: dict[str, tuple[int, ...]] = {}
        self._labels: dict[str, str] = {}
        self._ras: dict[int, RankSample] = {}
        self._stopped: set[int] = set()
        self._ranks: set[int] = set()
        self.unread: list[str] = []
        """For each file that could not be read: which, why, and what to do."""

    def read(self, files: Iterable[tuple[str, bytes]]) -> None:
        """Read files, by name; ``processes.json`` has to be the first.

        A file that cannot be read is listed in ``unread``. Nothing is known of its rank then, unless another file shows
        it.

        Raises:
            ConfigError: two files are flight records of one rank.
        """
        for name, data in files:
            try:
                self._read(*_unpacked(name, data))
            except DumpError as error:
                self.unread.append(str(error))
                with contextlib.suppress(DumpError):
                    self._ranks |= {rank for rank in (_rank_in(name),) if rank is not None}

    def samples(self) -> JobSamples:
        """What the files show of all ranks that have a file."""
        ranks = {rank: self._sample(rank) for rank in sorted(self._ranks | self._ras.keys())}
        ras_ranks = len(self._ras) if self._ras.keys() - self._records.keys() else 0
        return JobSamples(ranks, self._groups, self._labels, ras_ranks=ras_ranks, unread=tuple(self.unread))

    def _sample(self, rank: int) -> RankSample:
        _, dump, known = self._trainers.get(rank, (None, None, None))
        helpers = (dump.signature(role) for dump, role in self._helpers.get(rank, []))
        of_ras = self._ras.get(rank, NOTHING)
        launched = of_ras.record.last if of_ras.record else None
        return RankSample(
            dump.signature(ProcessRole.TRAINER) if dump else None,
            tuple(filter(None, helpers)),
            self._records.get(rank) or of_ras.record,
            is_stopped=rank in self._stopped,
            blocked_in=known.blocked_in if known else "",
            is_unresponsive=of_ras.is_unresponsive,
            sleeps=known is not None and known.state[:1] == SLEEPS,
            position=Position(dump.position() if dump else (), self._positions.get(rank), launched),
        )

    def _read(self, name: str, data: bytes) -> None:
        if name.endswith(PROCESSES):
            known = self._known[name.rpartition("/")[0]] = _known_processes(name, data)
            for process in known.values():
                self._ranks.add(process.rank)
                if process.state[:1] in STOPPED and process.role in (None, ProcessRole.TRAINER):
                    self._stopped.add(process.rank)
            return
        if data[:1] == PICKLE or data[:64].lstrip()[:1] == b"{":
            self._read_object(name, data)
        else:
            for dump in self._stacks.read(name, data):
                self._add(name, dump)

    def _read_object(self, name: str, data: bytes) -> None:
        if data[:1] != PICKLE and b'"communicators"' in data[:4096]:
            ranks, groups = ras_evidence(parse_ras(name, data), name)
            self._ras |= ranks
            self._groups |= groups
            return
        fields = parse_record(name, data, pickles=self._pickles)
        rank = _rank_in(name, _LAST_NUMBER) if _rank_in(name) is None else _rank_in(name)
        if rank is None:
            raise DumpError(_without_rank(name))
        flight = flight_record(fields, name)
        if other := self._record_names.get(rank):
            raise ConfigError(
                f"{other} and {name} are both flight records of rank {rank}: remove the records of other hangs"
            )
        self._record_names[rank] = name
        self._ranks.add(rank)
        self._records[rank], self._positions[rank] = flight.record, flight.position
        self._groups |= flight.groups
        self._labels |= flight.labels

    def _add(self, name: str, dump: ProcessDump) -> None:
        known = self._of(name, dump.pid) if dump.pid is not None else None
        rank = known.rank if known else _rank_in(name)
        if rank is None:
            raise DumpError(_without_rank(name))
        self._ranks.add(rank)
        role = (known.role if known else None) or role_of_process(dump)
        if role is not ProcessRole.TRAINER:
            self._helpers[rank].append((dump, role))
            return
        # If several processes may be the trainer, a listed role decides, then the shortest name of a file.
        order = (not (known and known.role), len(name), name)
        if rank not in self._trainers or order < self._trainers[rank][0]:
            self._trainers[rank] = (order, dump, known)

    def _of(self, name: str, pid: int) -> KnownProcess | None:
        """The entry of a process in the nearest folder, since processes of several machines may have the same id."""
        folder = name
        while folder:
            folder = folder.rpartition("/")[0]
            if entry := self._known.get(folder, {}).get(pid):
                return entry
        return None


def read_folder(folder: Path, *, pickles: bool = False) -> JobSamples:
    """Read a folder, and the folders below it.

    Args:
        folder: The folder of the files, or of folders ``snapshot-1``, ``snapshot-2`` …
        pickles: Whether flight records may be pickles.

    Raises:
        ConfigError: there is no such folder, it has no files, or two of them are flight records of one rank.
        DumpError: no file can be read.
    """
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {folder}: name one with dumps of py-spy or flight records")
    numbered = ((_SNAPSHOT.fullmatch(path.name), path) for path in folder.iterdir() if path.is_dir())
    snapshots = [path for _, path in sorted((int(match[1]), path) for match, path in numbered if match)] or [folder]
    stacks = StackReader()
    found = []
    for snapshot in (snapshots[0], snapshots[-1]) if len(snapshots) > 1 else snapshots:
        reader = FolderReader(stacks, pickles=pickles)
        reader.read(_files(snapshot))
        found.append(reader.samples())
    samples = compared(*found) if len(found) > 1 else found[0]
    if samples.unread and not any(sample.is_known for sample in samples.ranks.values()):
        raise DumpError(listed(samples.unread, SHOWN, noun="files", separator="; "))
    if not samples.ranks:
        raise ConfigError(f"the folder {folder} has no dumps: put dumps of py-spy or flight records there")
    return samples


def _files(folder: Path) -> Iterator[tuple[str, bytes]]:
    """The name in the folder and the contents of each file; files ``processes.json`` come first."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("."))
    for path in sorted(paths, key=lambda path: not path.name.startswith(PROCESSES)):
        try:
            data = path.read_bytes()
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error}") from error
        yield str(path.relative_to(folder)), data


def _unpacked(name: str, data: bytes) -> tuple[str, bytes]:
    """The name and the contents of a file that may be compressed.

    Raises:
        DumpError: the file cannot be unpacked, or is empty.
    """
    if data[:2] == _GZIP:
        try:
            name, data = name.removesuffix(".gz"), gzip.decompress(data)
        except (OSError, EOFError, zlib.error) as error:
            raise DumpError(f"{name} cannot be read: {error}") from error
    if not data.strip():
        raise DumpError(f"{name} is empty: its dump failed; dump that rank again, or remove the file")
    return name, data


def _rank_in(name: str, pattern: re.Pattern[str] = _RANK) -> int | None:
    """The rank in a file's name, or in that of a folder around it; None: no name has a rank."""
    for part in reversed(name.split("/")):
        if match := pattern.search(part):
            try:
                return rank_number(match[1])
            except ValueError as error:
                raise DumpError(f"{_without_rank(name)} ({error})") from error
    return None


def _without_rank(name: str) -> str:
    return (
        f"the rank of {name} is not known: name the file or its folder like rank-5, or list its process in {PROCESSES}"
    )


def _known_processes(name: str, data: bytes) -> dict[int, KnownProcess]:
    try:
        return {
            int(entry["pid"]): KnownProcess(
                rank_number(entry["rank"]),
                ProcessRole(entry["role"]) if entry.get("role") else None,
                str(entry.get("state", "")),
                str(entry.get("blocked_in", "")),
            )
            for entry in json.loads(data)
        }
    except UNREADABLE as error:
        roles = ", ".join(f'"{role.value}"' for role in ProcessRole)
        raise DumpError(
            f'{name} must be a list of {{"pid": 123, "rank": 5, "role": ROLE, "state": "S"}}, where ROLE is one of '
            f"{roles}, or is left out ({error!r})"
        ) from error
