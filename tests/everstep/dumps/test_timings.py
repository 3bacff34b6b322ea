"""Tables of timings: the names of columns, and errors in rows."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from everstep.dumps.timings import read_timings
from everstep.errors import ConfigError, DumpError
from everstep.model.topology import Topology


def table(folder: Path, text: str, name: str = "t.csv") -> Path:
    (folder / name).write_text(text)
    return folder / name


def test_a_table_by_rank(tmp_path: Path) -> None:
    path = table(tmp_path, "Step,rank,Operation,start,duration,host\n1,0,forward,10,0.5,a\n1,3,forward,10,0.5,b\n")
    found = read_timings(path)
    topology = found.topology()
    assert topology.world_size == 4
    assert [(one.rank, one.duration, one.work) for one in found.times(topology)] == [(0, 0.5, None), (3, 0.5, None)]


def test_a_table_by_stage_and_replica(tmp_path: Path) -> None:
    text = "step_id,dp_rank,pp_rank,op,start_ts,end_ts,tokens\n7,1,0,fwd,1000,1500,64\n7,0,1,fwd,1000,1250,32\n"
    found = read_timings(table(tmp_path, text), "ms")
    topology = found.topology()
    assert (topology.pp, topology.dp) == (2, 2)
    rows = list(found.times(topology))
    assert [(one.rank, one.duration, one.work) for one in rows] == [(1, 0.5, 64.0), (2, 0.25, 32.0)]
    wider = Topology.of(8, 1, tp=2, pp=2)
    assert [one.rank for one in found.times(wider)] == [2, 4]


def test_packed(tmp_path: Path) -> None:
    (tmp_path / "t.csv.gz").write_bytes(gzip.compress(b"step,rank,op,ts,dur\n1,0,f,0,1\n"))
    found = read_timings(tmp_path / "t.csv.gz")
    assert len(list(found.times(found.topology()))) == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "has no rows"),
        ("step,rank,op\n1,0,f\n", "missing are start: one of start, start_time"),
        ("step,op,start,duration\n1,f,0,1\n", "missing are rank"),
        ("step,rank,op,start,duration\n1,x,f,0,1\n", "the column rank cannot be read"),
        ("step,rank,op,start,duration\n1,-1,f,0,1\n", "-1 is not a rank"),
        ("step,rank,op,start,duration\n1,70000000000,f,0,1\n", "70000000000 is not a rank"),
        ("step,dp,stage,op,start,duration\n1,99999,99999,f,0,1\n", "make more than"),
        ("step,rank,op,start,duration\n1,0,f,0,1,9\n", "more values than there are columns"),
        ("step,rank,op,start,duration\n1,0,f,0\n", "row 2: it has no duration"),
        ("step,rank,op,start,duration\n1,0,f,nan,1\n", "row 2: it began at nan"),
        ("step,rank,op,start,duration\n1,0,f,inf,1\n", "row 2: it began at inf"),
        ("step,rank,op,start,duration,tokens\n1,0,f,0,1,nan\n", "row 2: its amount of work is nan"),
        ("step,rank,op,start,duration\n1,0,f,0,-1\n", "row 2: it lasted -1"),
        ("step,rank,op,start,duration\n1,0,f,0,nan\n", "row 2: it lasted nan"),
        ("step,rank,op,start,duration\n1,0,f,soon,1\n", "row 2: could not convert"),
    ],
)
def test_what_is_wrong_is_told(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(DumpError, match=said):
        found = read_timings(table(tmp_path, text))
        list(found.times(found.topology()))


def test_a_rank_that_the_sizes_have_not(tmp_path: Path) -> None:
    found = read_timings(table(tmp_path, "step,rank,op,start,duration\n1,9,f,0,1\n"))
    with pytest.raises(DumpError, match="rank 9 is not one of 4"):
        list(found.times(Topology.of(4, 1)))


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_timings(tmp_path / "t.csv")


def test_parquet_without_pyarrow_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "t.parquet").write_bytes(b"PAR1 and so on")
    with pytest.raises(ConfigError, match="pip install pyarrow"):
        read_timings(tmp_path / "t.parquet")


def staged(stages: list[int]) -> str:
    """Return a table with a row for each rank, with its stage."""
    rows = (f"1,{rank},{stage},f,0,1\n" for rank, stage in enumerate(stages))
    return "step,rank,stage,op,start,duration\n" + "".join(rows)


@pytest.mark.parametrize("stages", [[0, 0, 1, 1], [0, 1, 0, 1]])
def test_the_stages_of_a_table_tell_in_which_order_ranks_are_numbered(stages: list[int], tmp_path: Path) -> None:
    """With a wrong order, ranks of a heavy stage would be compared with ranks of a light stage, and would look slow."""
    found = read_timings(table(tmp_path, staged(stages)))
    topology = found.topology()
    assert [topology.coordinate(rank).pp for rank in range(4)] == stages
    assert len(list(found.times(topology))) == 4


@pytest.mark.parametrize(
    ("stages", "sizes"),
    [([0, 1, 1, 0], None), ([0, 1, 0, 1], Topology.of(4, 1, pp=2)), ([0, 0, 1, 1], Topology.of(4, 1))],
)
def test_stages_that_are_not_those_of_the_sizes_are_told(
    stages: list[int], sizes: Topology | None, tmp_path: Path
) -> None:
    found = read_timings(table(tmp_path, staged(stages)))
    with pytest.raises(DumpError, match=r"has stage 1 in the table, but stage 0 by the sizes"):
        list(found.times(sizes or found.topology()))


def test_virtual_stages_say_nothing_of_the_order(tmp_path: Path) -> None:
    """A rank may have several virtual stages, so they do not show the order of ranks."""
    text = staged([0, 1]) + "1,0,2,f,1,1\n1,1,3,f,1,1\n"
    assert len(list(read_timings(table(tmp_path, text)).times(Topology.of(2, 1, pp=2)))) == 4


def test_whole_numbers_with_a_point(tmp_path: Path) -> None:
    found = read_timings(table(tmp_path, "step,rank,op,start,duration\n1.0,3.0,f,0,1\n"))
    assert [(one.step, one.rank) for one in found.times(found.topology())] == [(1, 3)]


def test_what_is_no_archive_is_told(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_bytes(b"\x1f\x8b\x08\x00garbage" * 10)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_timings(tmp_path / "t.csv")
