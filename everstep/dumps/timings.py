"""Tables of the times of ranks for the parts of their steps: CSV, or Parquet where pyarrow is installed.

A table has a row for each operation of a rank in a step. Its columns have any of their names, in upper or lower case:
step; rank, or dp_rank and stage; operation; start and duration, or start and end; and optionally the amount of work.
Other columns are ignored.
"""

from __future__ import annotations

import csv
import gzip
import importlib
import io
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import permutations
from math import inf, isfinite, prod
from pathlib import Path
from typing import Any

from everstep.decisions.blame.slow.timings import PhaseTime
from everstep.dumps.unreadable import MOST_RANKS, UNREADABLE, rank_number
from everstep.errors import ConfigError, DumpError
from everstep.model.topology import SHORT_ORDER, Topology

COLUMNS: Mapping[str, tuple[str, ...]] = {
    "step": ("step", "step_id", "iteration", "global_step"),
    "rank": ("rank", "global_rank", "rank_id"),
    "dp": ("dp_rank", "dp", "dp_rank_id"),
    "stage": ("stage", "pp_rank", "pp", "stage_id"),
    "tp": ("tp_rank", "tp"),
    "operation": ("operation", "op", "op_type", "name", "phase"),
    "start": ("start", "start_time", "start_ts", "begin", "ts"),
    "duration": ("duration", "dur", "elapsed", "time"),
    "end": ("end", "end_time", "end_ts"),
    "work": ("work", "tokens", "num_tokens", "seq_len", "sequence_length", "flops"),
}
"""Quantity → names of columns that may have it."""
UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
"""Units of times → seconds."""
_PARQUET, _GZIP = b"PAR1", b"\x1f\x8b"


class TimingTable:
    """The rows of a table of timings.

    Args:
        name: Name of the file, for messages.
        rows: The rows, each by names of columns.
        unit: Unit of times, one of ``UNITS``.

    Raises:
        DumpError: a required column is missing, or the table has no rows.
    """

    def __init__(self, name: str, rows: Sequence[Mapping[str, Any]], unit: str = "s") -> None:
        if not rows:
            raise DumpError(f"{name} has no rows: a row for each operation of a rank in a step is needed")
        self._name, self._rows, self._seconds = name, rows, UNITS[unit]
        named = {column.strip().lower(): column for column in rows[0] if column}
        self.columns = {
            what: named[given] for what, names in COLUMNS.items() if (given := next(filter(named.get, names), ""))
        }
        missing = [column for column in ("step", "operation", "start") if column not in self.columns]
        if "duration" not in self.columns and "end" not in self.columns:
            missing.append("duration")
        if "rank" not in self.columns and not {"dp", "stage"} & self.columns.keys():
            missing.append("rank")
        if missing:
            wanted = "; ".join(f"{column}: one of {', '.join(COLUMNS[column])}" for column in missing)
            raise DumpError(f"{name} has the columns {', '.join(map(str, rows[0]))}; missing are {wanted}")

    @property
    def ranks(self) -> int:
        """Number of ranks, by the rows.

        Raises:
            DumpError: a number cannot be read.
        """
        numbers = self._numbers()
        return numbers.get("rank") or numbers.get("stage", 1) * numbers.get("tp", 1) * numbers.get("dp", 1)

    def topology(self) -> Topology:
        """The topology by the rows themselves, with each rank as a machine.

        Raises:
            DumpError: a number cannot be read, or ranks and stages fit no order of axes.
        """
        numbers, world = self._numbers(), self.ranks
        pp, tp = numbers.get("stage", 1), numbers.get("tp", 1)
        pp, tp = (pp, tp) if world % (pp * tp) == 0 else (1, 1)
        orders = [
            Topology.of(world, 1, tp=tp, pp=pp, order=order) for order in (SHORT_ORDER, *permutations(SHORT_ORDER))
        ]
        for what in (("stage", "dp", "tp"), ("stage",)):
            for topology in orders:
                if all(self._misplaced(rank, place, topology, what) is None for rank, place in self._places.items()):
                    return topology
        return orders[0]  # the first row that does not fit is told by who reads it

    def _misplaced(
        self, rank: int, places: Mapping[str, set[int]], topology: Topology, what: Sequence[str] = ("stage",)
    ) -> str | None:
        """The coordinate in which a rank of the table differs from a topology; None: none is known to differ."""
        at = topology.coordinate(rank)
        of = {"stage": at.pp, "dp": at.dp, "tp": at.tp}
        return next((axis for axis in what if len(places[axis]) == 1 and places[axis] != {of[axis]}), None)

    def times(self, topology: Topology) -> Iterator[PhaseTime]:
        """The rows.

        Raises:
            DumpError: a value cannot be read, or a rank is not of the topology.
        """
        places = _all_places(topology) if "rank" not in self.columns else {}
        checked: set[int] = set()
        for number, row in enumerate(self._rows, start=2):
            try:
                rank = self._rank(row, places)
                if not 0 <= rank < topology.world_size:
                    raise ValueError(f"rank {rank} is not one of {topology.world_size}")
                if rank not in checked:
                    self._check_stage(rank, topology)
                    checked.add(rank)
                start = float(self._of(row, "start")) * self._seconds
                if "duration" in self.columns:
                    duration = float(self._of(row, "duration")) * self._seconds
                else:
                    duration = float(self._of(row, "end")) * self._seconds - start
                if not isfinite(start):
                    raise ValueError(f"it began at {start}")
                if not 0 <= duration < inf:
                    raise ValueError(f"it lasted {duration} s")
                told = row[self.columns["work"]] if "work" in self.columns else None
                work = float(told) if told not in {None, ""} else None
                if work is not None and not 0 <= work < inf:
                    raise ValueError(f"it had {work} to do")
                step, operation = _whole(self._of(row, "step")), str(self._of(row, "operation"))
                yield PhaseTime(step, rank, operation, start, duration, work)
            except UNREADABLE as error:
                raise DumpError(f"{self._name}, row {number}: {error}: {dict(row)}") from error

    def _check_stage(self, rank: int, topology: Topology) -> None:
        """A rank is compared with those of its stage: so the table's stage has to be that of the topology."""
        if rank in self._places and self._misplaced(rank, self._places[rank], topology):
            (stage,) = self._places[rank]["stage"]
            raise ValueError(
                f"rank {rank} is of stage {stage}, and by the sizes ({topology.text}) of stage "
                f"{topology.coordinate(rank).pp}: name the axes in the order in which ranks are numbered, as --mesh"
            )

    def _rank(self, row: Mapping[str, Any], places: Mapping[tuple[int, int, int], int]) -> int:
        if "rank" in self.columns:
            return rank_number(_whole(self._of(row, "rank")))
        at = tuple(_whole(self._of(row, axis)) if axis in self.columns else 0 for axis in ("stage", "dp", "tp"))
        found = places.get((at[0], at[1], at[2]))
        if found is None:
            raise ValueError(f"there is no rank of stage {at[0]}, dp {at[1]}, tp {at[2]}")
        return found

    def _of(self, row: Mapping[str, Any], what: str) -> Any:
        if None in row:
            raise ValueError("it has more values than there are columns")
        if (value := row[self.columns[what]]) is None:
            raise ValueError(f"it has no {self.columns[what]}")
        return value

    def _numbers(self) -> dict[str, int]:
        """The number of values of a column that are numbered from 0, by the largest one."""
        found: dict[str, int] = {
            axis: self._largest(axis) + 1 for axis in ("rank", "dp", "stage", "tp") if axis in self.columns
        }
        if prod(count for axis, count in found.items() if axis != "rank") > MOST_RANKS:
            raise DumpError(f"{self._name}: stage, dp and tp make more than {MOST_RANKS} ranks")
        return found

    @cached_property
    def _places(self) -> Mapping[int, Mapping[str, set[int]]]:
        """Rank → its coordinates in the table, if it has both. A rank with virtual stages has several."""
        found: dict[int, dict[str, set[int]]] = defaultdict(lambda: {"stage": set(), "dp": set(), "tp": set()})
        axes = [axis for axis in ("stage", "dp", "tp") if axis in self.columns]
        if "rank" in self.columns and axes:
            pairs = {tuple(self._of(row, column) for column in ("rank", *axes)) for row in self._rows}
            for rank, *values in pairs:
                for axis, value in zip(axes, values, strict=True):
                    found[_whole(rank)][axis].add(_whole(value))
        return found

    def _largest(self, what: str) -> int:
        try:
            return rank_number(max(_whole(self._of(row, what)) for row in self._rows))
        except UNREADABLE as error:
            raise DumpError(f"{self._name}: the column {self.columns[what]} cannot be read: {error}") from error


def _whole(value: Any) -> int:
    """A whole number; a column that lacked some was written with a point: 7.0."""
    try:
        return int(value)
    except ValueError:
        number = float(value)
        if not number.is_integer():
            raise
        return int(number)


def read_timings(path: Path, unit: str = "s") -> TimingTable:
    """A table from a file.

    Args:
        path: CSV (also .gz) or Parquet.
        unit: Of times: s, ms, us or ns.

    Raises:
        ConfigError: there is no such file, or pyarrow is needed and missing.
        DumpError: it is no such table.
    """
    try:
        data = path.read_bytes()
        if data[:2] == _GZIP:
            data = gzip.decompress(data)
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if data[:4] == _PARQUET:
        return TimingTable(path.name, _parquet_rows(path, data), unit)
    try:
        rows = list(csv.DictReader(io.StringIO(data.decode("utf-8-sig"))))
    except (UnicodeDecodeError, csv.Error) as error:
        raise DumpError(f"{path} is neither CSV nor Parquet: {error}") from error
    return TimingTable(path.name, rows, unit)


def _parquet_rows(path: Path, data: bytes) -> list[dict[str, Any]]:
    try:
        pyarrow, parquet = importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise ConfigError(f"{path} is Parquet, which needs pyarrow: pip install pyarrow, or export CSV") from error
    try:
        rows: list[dict[str, Any]] = parquet.read_table(pyarrow.BufferReader(data)).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise DumpError(f"{path} is no Parquet file that can be read: {error}") from error
    return rows


def _all_places(topology: Topology) -> dict[tuple[int, int, int], int]:
    """Stage, index among the data-parallel ranks, index along tp → rank; the first where there are several."""
    found: dict[tuple[int, int, int], int] = {}
    for rank in range(topology.world_size):
        place = topology.coordinate(rank)
        found.setdefault((place.pp, place.dp, place.tp), rank)
    return found
