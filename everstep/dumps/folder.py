"""A folder of dumps of one job that hangs: stacks, flight records, a report of NCCL's RAS; told apart by their content.

Whose a file is stands in its name or its folder's: ``rank-5.json``, ``rank_5/loader.txt``, ``nccl_trace_rank_5``; or in
``processes.json`` of its folder, or of one around it: a list of ``{"pid": 123, "rank": 5, "role": "trainer", "state":
"T"}``, of which only pid and rank must be there. Folders ``snapshot-1``, ``snapshot-2`` … are several looks at the same
job: the last is judged, and whoever changed since the first came on.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from everstep.decisions.blame.hang.rank_samples import NOTHING, CommunicationRecord, JobSamples, RankSample
from everstep.decisions.blame.hang.stacks import ProcessRole
from everstep.dumps.flight_records import PICKLE, flight_record, parse_record
from everstep.dumps.nccl_ras import parse_ras, ras_evidence
from everstep.dumps.py_spy import ProcessDump, StackReader, role_of_process
from everstep.dumps.unreadable import UNREADABLE, rank_number
from everstep.errors import ConfigError, DumpError

PROCESSES = "processes.json"
STOPPED = ("T",)
"""States of a process that is stopped, as ``/proc/PID/stat`` has them. One in state t is not: a debugger holds it, on
purpose."""
_RANK = re.compile(r"rank[-_. ]?(\d+)", re.IGNORECASE)
_LAST_NUMBER = re.compile(r"(\d+)(?:\.\w+)*$")
_SNAPSHOT = re.compile(r"snapshot[-_. ]?(\d+)")
_GZIP = b"\x1f\x8b"


@dataclass(frozen=True, slots=True)
class KnownProcess:
    """What ``processes.json`` says of one process."""

    rank: int
    role: ProcessRole | None
    state: str


class FolderReader:
    """Reads one look at a job. Many of them may share what their stacks have in common.

    Args:
        stacks: Reads dumps of py-spy.
        pickles: Whether flight records may be pickles.
    """

    def __init__(self, stacks: StackReader, *, pickles: bool = False) -> None:
        self._stacks = stacks
        self._pickles = pickles
        self._known: dict[str, dict[int, KnownProcess]] = {}
        """Folder → process → what is said of it there."""
        self._trainers: dict[int, tuple[tuple[bool, int, str], ProcessDump]] = {}
        self._helpers: dict[int, list[tuple[ProcessDump, ProcessRole]]] = defaultdict(list)
        self._records: dict[int, CommunicationRecord] = {}
        self._record_names: dict[int, str] = {}
        self._positions: dict[int, int] = {}
        self._groups: dict[str, tuple[int, ...]] = {}
        self._labels: dict[str, str] = {}
        self._ras: dict[int, RankSample] = {}
        self._stopped: set[int] = set()
        self._ranks: set[int] = set()

    def read(self, files: Mapping[str, bytes] | Iterable[tuple[str, bytes]]) -> None:
        """Take files, by name; ``processes.json`` has to be the first.

        Raises:
            DumpError: one is not what it is taken for, or it is not said whose it is.
        """
        for name, data in files.items() if isinstance(files, Mapping) else files:
            self._read(name, data)

    def place(self, rank: int) -> tuple[Any, ...]:
        """Where a rank is, line by line: of another look the same unless it came on."""
        trainer = self._trainers.get(rank)
        frames = trainer[1].place() if trainer else ()
        launched = record.last if (record := self._ras.get(rank, NOTHING).record) else None
        return frames, self._positions.get(rank), launched

    def evidence(self, before: FolderReader | None = None) -> JobSamples:
        """What was read, of all ranks of which there was a file.

        Args:
            before: An earlier look, with the flight records of those ranks whose newer ones could not be read.
        """
        earlier = before or self
        ranks = {}
        for rank in sorted(self._ranks | self._ras.keys()):
            trainer = self._trainers.get(rank)
            helpers = (dump.signature(role) for dump, role in self._helpers.get(rank, []))
            of_ras = self._ras.get(rank, NOTHING)
            ranks[rank] = RankSample(
                trainer[1].signature(ProcessRole.TRAINER) if trainer else None,
                tuple(one for one in helpers if one),
                self._records.get(rank) or of_ras.record or earlier._records.get(rank),
                is_stopped=rank in self._stopped,
                is_unresponsive=of_ras.is_unresponsive,
            )
        ras_ranks = len(self._ras) if self._ras.keys() - self._records.keys() else 0
        groups, labels = earlier._groups | self._groups, earlier._labels | self._labels
        return JobSamples(ranks, groups, labels, ras_ranks=ras_ranks)

    def _read(self, name: str, data: bytes) -> None:
        if name.endswith(PROCESSES):
            known = self._known[name.rpartition("/")[0]] = _known_processes(name, data)
            for one in known.values():
                self._ranks.add(one.rank)
                if one.state[:1] in STOPPED and one.role in (None, ProcessRole.TRAINER):
                    self._stopped.add(one.rank)
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
        found = parse_record(name, data, pickles=self._pickles)
        rank = _rank_in(name, _LAST_NUMBER) if _rank_in(name) is None else _rank_in(name)
        if rank is None:
            raise DumpError(_whose(name))
        one = flight_record(found, name)
        if other := self._record_names.get(rank):
            raise DumpError(
                f"{other} and {name} are both the flight record of rank {rank}: take the one away that is not of this "
                "hang"
            )
        self._record_names[rank] = name
        self._ranks.add(rank)
        self._records[rank], self._positions[rank] = one.record, one.position
        self._groups |= one.groups
        self._labels |= one.labels

    def _add(self, name: str, dump: ProcessDump) -> None:
        known = self._of(name, dump.pid) if dump.pid is not None else None
        rank = known.rank if known else _rank_in(name)
        if rank is None:
            raise DumpError(_whose(name))
        self._ranks.add(rank)
        role = (known.role if known else None) or role_of_process(dump)
        if role is not ProcessRole.TRAINER:
            self._helpers[rank].append((dump, role))
            return
        # Of several that might be the rank the one that is said to be, then the one whose file has the shortest name.
        order = (not (known and known.role), len(name), name)
        if rank not in self._trainers or order < self._trainers[rank][0]:
            self._trainers[rank] = (order, dump)

    def _of(self, name: str, pid: int) -> KnownProcess | None:
        """What is said of a process: machines number theirs alike, so the nearest folder counts."""
        folder = name
        while folder:
            folder = folder.rpartition("/")[0]
            if found := self._known.get(folder, {}).get(pid):
                return found
        return None


def evidence_of(looks: Sequence[FolderReader]) -> JobSamples:
    """What looks at one job say together, the first of them first: the last one counts, and whoever came on since."""
    first, last = looks[0], looks[-1]
    evidence = last.evidence(first)
    if first is last:
        return evidence
    moved = (rank for rank in evidence.ranks if _differ(first.place(rank), last.place(rank)))
    return replace(evidence, moved=frozenset(moved))


def read_folder(folder: Path, *, pickles: bool = False) -> JobSamples:
    """What lies in a folder, and in the folders below it.

    Args:
        folder: With the files, or with folders ``snapshot-1``, ``snapshot-2`` …
        pickles: Whether flight records may be pickles.

    Raises:
        ConfigError: it is no folder, or has no files.
        DumpError: a file is not what it is taken for.
    """
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {folder}: name one with dumps of py-spy or flight records")
    numbered = ((_SNAPSHOT.fullmatch(one.name), one) for one in folder.iterdir() if one.is_dir())
    looks = [one for _, one in sorted((int(found[1]), one) for found, one in numbered if found)] or [folder]
    stacks = StackReader()
    readers = []
    for look in (looks[0], looks[-1]) if len(looks) > 1 else looks:
        reader = FolderReader(stacks, pickles=pickles)
        reader.read(_files(look))
        readers.append(reader)
    evidence = evidence_of(readers)
    if not evidence.ranks:
        raise ConfigError(f"the folder {folder} has no dumps: put those of py-spy and flight records there")
    return evidence


def _differ(before: tuple[Any, ...], after: tuple[Any, ...]) -> bool:
    """Whether two looks at a rank saw it at different places; one that saw nothing is no sign."""
    return any(one and other and one != other for one, other in zip(before, after, strict=True))


def _files(folder: Path) -> Iterator[tuple[str, bytes]]:
    """Names below the folder and contents, unpacked; ``processes.json`` first."""
    paths = sorted(one for one in folder.rglob("*") if one.is_file() and not one.name.startswith("."))
    for path in sorted(paths, key=lambda one: not one.name.startswith(PROCESSES)):
        name = str(path.relative_to(folder))
        try:
            data = path.read_bytes()
            if data[:2] == _GZIP:
                name, data = name.removesuffix(".gz"), gzip.decompress(data)
        except (OSError, EOFError, zlib.error) as error:
            raise DumpError(f"{path} cannot be read: {error}") from error
        if not data.strip():
            raise DumpError(f"{path} is empty: its dump failed; dump that rank again, or take the file away")
        yield name, data


def _rank_in(name: str, pattern: re.Pattern[str] = _RANK) -> int | None:
    """The rank that a file's name says, or a folder's around it."""
    for part in reversed(name.split("/")):
        if found := pattern.search(part):
            try:
                return rank_number(found[1])
            except ValueError as error:
                raise DumpError(f"{_whose(name)} ({error})") from error
    return None


def _whose(name: str) -> str:
    return f"{name} does not say whose it is: call it or its folder rank-5, or name its process in {PROCESSES}"


def _known_processes(name: str, data: bytes) -> dict[int, KnownProcess]:
    try:
        return {
            int(one["pid"]): KnownProcess(
                rank_number(one["rank"]),
                ProcessRole(one["role"]) if one.get("role") else None,
                str(one.get("state", "")),
            )
            for one in json.loads(data)
        }
    except UNREADABLE as error:
        roles = ", ".join(f'"{role.value}"' for role in ProcessRole)
        raise DumpError(
            f'{name} must be a list of {{"pid": 123, "rank": 5, "role": ROLE, "state": "S"}}, where ROLE is one of '
            f"{roles}, or is left out ({error!r})"
        ) from error
