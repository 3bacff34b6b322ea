"""Reads tables of the operations of ranks and their durations: CSV, or Parquet where pyarrow is installed.

A table has a row for each operation of a rank in a step. It needs these columns, each under one of its names in
``COLUMNS``, in upper or lower case: step; rank, or dp_rank and stage; operation; start; duration or end. A column with
the amount of work is optional. Other columns are ignored.
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
"""Quantity → possible names of its column."""
UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
"""Unit of time → seconds."""
_PARQUET, _GZIP = b"PAR1", b"\x1f\x8b"


class TimingTable:
    """The rows of a table of timings.

    Args:
        name: Name of the file, for messages.
        rows: The rows, as values by name of column.
        unit: Unit of the times, one of ``UNITS``.

    Raises:
        DumpError: a required column is missing, or the table has no rows.
    """

    def __init__(self, name: str, rows: Sequence[Mapping[str, Any]], unit: str = "s") -> None:
        if not rows:
            raise DumpError(f"{name} has no rows: it needs a row for each operation of a rank in a step")
        self._name, self._rows, self._seconds = name, rows, UNITS[unit]
        named = {column.strip().lower(): column for column in rows[0] if column}
        self.columns = {
            quantity: named[name] for quantity, names in COLUMNS.items() if (name := next(filter(named.get, names), ""))
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
        """Number of ranks, according to the rows.

        Raises:
            DumpError: a number cannot be read.
        """
        numbers = self._numbers()
        return numbers.get("rank") or numbers.get("stage", 1) * numbers.get("tp", 1) * numbers.get("dp", 1)

    def topology(self) -> Topology:
        """The topology that fits the rows, with one rank on each machine.

        If no order of the axes fits, ``times`` raises an error for the first row that does not fit.

        Raises:
            DumpError: a number cannot be read.
        """
        numbers, world = self._numbers(), self.ranks
        pp, tp = numbers.get("stage", 1), numbers.get("tp", 1)
        pp, tp = (pp, tp) if world % (pp * tp) == 0 else (1, 1)
        orders = [
            Topology.of(world, 1, tp=tp, pp=pp, order=order) for order in (SHORT_ORDER, *permutations(SHORT_ORDER))
        ]
        for axes in (("stage", "dp", "tp"), ("stage",)):
            for topology in orders:
                if all(self._fits(rank, topology, axes) for rank in self._coordinates):
                    return topology
        return orders[0]

    def _fits(self, rank: int, topology: Topology, axes: Sequence[str]) -> bool:
        """Whether a topology has the coordinates of a rank that the table has, along some axes."""
        coordinate, in_table = topology.coordinate(rank), self._coordinates[rank]
        indexes = {"stage": coordinate.pp, "dp": coordinate.dp, "tp": coordinate.tp}
        return all(len(in_table[axis]) != 1 or in_table[axis] == {indexes[axis]} for axis in axes)

    def times(self, topology: Topology) -> Iterator[PhaseTime]:
        """The rows, as times of phases.

        Raises:
            DumpError: a value cannot be read, or a rank does not fit the topology.
        """
        ranks = _ranks_by_coordinate(topology) if "rank" not in self.columns else {}
        checked: set[int] = set()
        for number, row in enumerate(self._rows, start=2):
            try:
                rank = self._rank(row, ranks)
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
                amount = row[self.columns["work"]] if "work" in self.columns else None
                work = float(amount) if amount not in {None, ""} else None
                if work is not None and not 0 <= work < inf:
                    raise ValueError(f"its amount of work is {work}")
                step, operation = _integer(self._of(row, "step")), str(self._of(row, "operation"))
                yield PhaseTime(step, rank, operation, start, duration, work)
            except UNREADABLE as error:
                raise DumpError(f"{self._name}, row {number}: {error}: {dict(row)}") from error

    def _check_stage(self, rank: int, topology: Topology) -> None:
        """Refuse a rank whose stage in the table differs from the topology's: ranks are compared within a stage."""
        if rank in self._coordinates and not self._fits(rank, topology, ("stage",)):
            (stage,) = self._coordinates[rank]["stage"]
            raise ValueError(
                f"rank {rank} has stage {stage} in the table, but stage {topology.coordinate(rank).pp} by the sizes "
                f"({topology.text}): give the axes in the order in which ranks are numbered, with --mesh"
            )

    def _rank(self, row: Mapping[str, Any], ranks: Mapping[tuple[int, ...], int]) -> int:
        if "rank" in self.columns:
            return rank_number(_integer(self._of(row, "rank")))
        at = tuple(_integer(self._of(row, axis)) if axis in self.columns else 0 for axis in ("stage", "dp", "tp"))
        if at not in ranks:
            raise ValueError(f"there is no rank of stage {at[0]}, dp {at[1]}, tp {at[2]}")
        return ranks[at]

    def _of(self, row: Mapping[str, Any], quantity: str) -> Any:
        if None in row:
            raise ValueError("it has more values than there are columns")
        if (value := row[self.columns[quantity]]) is None:
            raise ValueError(f"it has no {self.columns[quantity]}")
        return value

    def _numbers(self) -> dict[str, int]:
        """The size of each axis and the number of ranks, from the largest number in each column."""
        sizes: dict[str, int] = {
            axis: self._largest(axis) + 1 for axis in ("rank", "dp", "stage", "tp") if axis in self.columns
        }
        if prod(count for axis, count in sizes.items() if axis != "rank") > MOST_RANKS:
            raise DumpError(f"{self._name}: stage, dp and tp make more than {MOST_RANKS} ranks")
        return sizes

    @cached_property
    def _coordinates(self) -> Mapping[int, Mapping[str, set[int]]]:
        """Rank → axis → indexes in the table, if it has both columns. A rank with virtual stages has several stages."""
        indexes: dict[int, dict[str, set[int]]] = defaultdict(lambda: {"stage": set(), "dp": set(), "tp": set()})
        axes = [axis for axis in ("stage", "dp", "tp") if axis in self.columns]
        if "rank" in self.columns and axes:
            pairs = {tuple(self._of(row, column) for column in ("rank", *axes)) for row in self._rows}
            for rank, *values in pairs:
                for axis, value in zip(axes, values, strict=True):
                    indexes[_integer(rank)][axis].add(_integer(value))
        return indexes

    def _largest(self, axis: str) -> int:
        try:
            return rank_number(max(_integer(self._of(row, axis)) for row in self._rows))
        except UNREADABLE as error:
            raise DumpError(f"{self._name}: the column {self.columns[axis]} cannot be read: {error}") from error


def _integer(value: Any) -> int:
    """A whole number, also in the form 7.0, as some tools write columns in which numbers are missing."""
    try:
        return int(value)
    except ValueError:
        number = float(value)
        if not number.is_integer():
            raise
        return int(number)


def read_timings(path: Path, unit: str = "s") -> TimingTable:
    """Read a table from a file.

    Args:
        path: CSV (also .gz) or Parquet.
        unit: Unit of the times: s, ms, us or ns.

    Raises:
        ConfigError: the file cannot be read, or pyarrow is needed and missing.
        DumpError: the file has no such table.
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
        raise DumpError(f"{path} cannot be read as Parquet: {error}") from error
    return rows


def _ranks_by_coordinate(topology: Topology) -> dict[tuple[int, ...], int]:
    """Indexes along pp, dp and tp → rank; the first rank where several have the same indexes."""
    ranks: dict[tuple[int, ...], int] = {}
    for rank in range(topology.world_size):
        at = topology.coordinate(rank)
        ranks.setdefault((at.pp, at.dp, at.tp), rank)
    return ranks
