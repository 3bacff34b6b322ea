"""Tables in Parquet. ``make integrations`` runs this test in an environment that has pyarrow."""

from __future__ import annotations

from pathlib import Path

import pytest

from everstep.dumps.timings import read_timings
from everstep.errors import DumpError

pyarrow = pytest.importorskip("pyarrow", reason="make integrations runs it")
parquet = pytest.importorskip("pyarrow.parquet", reason="make integrations runs it")


def test_a_table(tmp_path: Path) -> None:
    columns = {"step": [1, 1], "rank": [0, 1], "op": ["forward"] * 2, "ts": [0.0, 1.0], "dur": [2.0, 3.0]}
    parquet.write_table(pyarrow.table(columns), tmp_path / "t.parquet")

    found = read_timings(tmp_path / "t.parquet", "ms")

    assert [(one.rank, one.duration) for one in found.times(found.topology())] == [(0, 0.002), (1, 0.003)]


def test_a_broken_one(tmp_path: Path) -> None:
    (tmp_path / "t.parquet").write_bytes(b"PAR1" + bytes(64))
    with pytest.raises(DumpError, match="cannot be read as Parquet"):
        read_timings(tmp_path / "t.parquet")
