"""Tables of what ranks took for the parts of their steps: CSV, or Parquet where pyarrow is installed.

One row for each operation of a rank in a step. Columns, by any of their names (upper or lower case): step; rank, or
dp_rank and stage; operation; start and duration, or start and end; and, if it is told, how much work it was. Others are
left alone.
"""

from __future__ import annotations

import csv
import gzip
import importlib
import io
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from everstep.decisions.slow.timings import PhaseTime
from everstep.errors import ConfigError, EvidenceError
from everstep.model.topology import Topology

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
"""What is needed → what columns with it are called."""
UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
"""Units of times → seconds."""
_PARQUET, _GZIP = b"PAR1", b"\x1f\x8b"


class TimingTable:
    """The rows of a table, by what they are needed for.

    Args:
        name: Of the file, for messages.
        rows: By the names of columns.
        unit: Of times.

    Raises:
        EvidenceError: a column that is needed is not there, or the table has no rows.
    """

    def __init__(self, name: str, rows: Sequence[Mapping[str, Any]], unit: str = "s") -> None:
        if not rows:
            raise EvidenceError(f"{name} has no rows: a row for each operation of a rank in a step is needed")
        self._name, self._rows, self._seconds = name, rows, UNITS[unit]
        named = {column.strip().lower(): column for column in rows[0]}
        self.columns = {
            what: named[given] for what, names in COLUMNS.items() if (given := next(filter(named.get, names), ""))
        }
        missing = [one for one in ("step", "operation", "start") if one not in self.columns]
        if "duration" not in self.columns and "end" not in self.columns:
            missing.append("duration")
        if "rank" not in self.columns and not {"dp", "stage"} & self.columns.keys():
            missing.append("rank")
        if missing:
            wanted = "; ".join(f"{one}: one of {', '.join(COLUMNS[one])}" for one in missing)
            raise EvidenceError(f"{name} has the columns {', '.join(map(str, rows[0]))}; missing are {wanted}")

    def topology(self) -> Topology:
        """The topology that the rows themselves tell: each rank counts as a machine.

        Raises:
            EvidenceError: a number cannot be read.
        """
        numbers = {one: self._largest(one) + 1 for one in ("rank", "dp", "stage", "tp") if one in self.columns}
        pp, tp = numbers.get("stage", 1), numbers.get("tp", 1)
        world = pp * tp * numbers.get("dp", 1)
        if "rank" in numbers and ("dp" not in numbers or world != numbers["rank"]):
            world = numbers["rank"]
            pp, tp = (pp, tp) if world % (pp * tp) == 0 else (1, 1)
        return Topology.of(world, 1, tp=tp, pp=pp)

    def times(self, topology: Topology) -> Iterator[PhaseTime]:
        """The rows.

        Raises:
            EvidenceError: a value cannot be read, or a rank is not of the topology.
        """
        places = _places(topology) if "rank" not in self.columns else {}
        for number, row in enumerate(self._rows, start=2):
            try:
                rank = self._rank(row, places)
                if not 0 <= rank < topology.world_size:
                    raise ValueError(f"rank {rank} is not one of {topology.world_size}")
                start = float(self._of(row, "start")) * self._seconds
                if "duration" in self.columns:
                    duration = float(self._of(row, "duration")) * self._seconds
                else:
                    duration = float(self._of(row, "end")) * self._seconds - start
                if not 0 <= duration < float("inf"):
                    raise ValueError(f"it lasted {duration} s")
                work = self._of(row, "work") if "work" in self.columns else None
                yield PhaseTime(
                    int(self._of(row, "step")),
                    rank,
                    str(self._of(row, "operation")),
                    start,
                    duration,
                    float(work) if work not in (None, "") else None,
                )
            except (ValueError, TypeError, KeyError) as error:
                raise EvidenceError(f"{self._name}, row {number}: {error}: {dict(row)}") from error

    def _rank(self, row: Mapping[str, Any], places: Mapping[tuple[int, int, int], int]) -> int:
        if "rank" in self.columns:
            return int(self._of(row, "rank"))
        at = tuple(int(self._of(row, one)) if one in self.columns else 0 for one in ("stage", "dp", "tp"))
        found = places.get((at[0], at[1], at[2]))
        if found is None:
            raise ValueError(f"there is no rank of stage {at[0]}, dp {at[1]}, tp {at[2]}")
        return found

    def _of(self, row: Mapping[str, Any], what: str) -> Any:
        return row[self.columns[what]]

    def _largest(self, what: str) -> int:
        try:
            return max(int(self._of(row, what)) for row in self._rows)
        except (ValueError, TypeError, KeyError) as error:
            raise EvidenceError(
                f"{self._name}: the column {self.columns[what]} has no whole numbers: {error}"
            ) from error


def read_timings(path: Path, unit: str = "s") -> TimingTable:
    """A table from a file.

    Args:
        path: CSV (also .gz) or Parquet.
        unit: Of times: s, ms, us or ns.

    Raises:
        ConfigError: there is no such file, or pyarrow is needed and missing.
        EvidenceError: it is no such table.
    """
    try:
        data = path.read_bytes()
        if data[:2] == _GZIP:
            data = gzip.decompress(data)
    except (OSError, EOFError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if data[:4] == _PARQUET:
        return TimingTable(path.name, _parquet_rows(path, data), unit)
    try:
        rows = list(csv.DictReader(io.StringIO(data.decode("utf-8-sig"))))
    except (UnicodeDecodeError, csv.Error) as error:
        raise EvidenceError(f"{path} is neither CSV nor Parquet: {error}") from error
    return TimingTable(path.name, rows, unit)


def _parquet_rows(path: Path, data: bytes) -> list[dict[str, Any]]:
    try:
        pyarrow, parquet = importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise ConfigError(f"{path} is Parquet, which needs pyarrow: pip install pyarrow, or export CSV") from error
    try:
        rows: list[dict[str, Any]] = parquet.read_table(pyarrow.BufferReader(data)).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise EvidenceError(f"{path} is no Parquet file that can be read: {error}") from error
    return rows


def _places(topology: Topology) -> dict[tuple[int, int, int], int]:
    """Stage, index among the data-parallel ranks, index along tp → rank; the first where there are several."""
    found: dict[tuple[int, int, int], int] = {}
    for rank in range(topology.world_size):
        place = topology.coordinate(rank)
        found.setdefault((place.pp, place.dp, place.tp), rank)
    return found
