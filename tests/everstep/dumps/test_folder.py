"""Folders of dumps: the rank and the kind of each file, and which ranks progressed between two samples."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest

from everstep.decisions.blame.hang.analysis import judge_hang
from everstep.decisions.blame.hang.stacks import ProcessRole
from everstep.dumps.folder import read_folder
from everstep.errors import ConfigError, DumpError
from everstep.model.hang import HangConclusion
from everstep.model.topology import Topology
from tests.everstep.dumps.test_nccl_ras import communicator, process, report
from tests.everstep.dumps.test_py_spy import DUMP, TEXT, compact, frame, thread

LOADER = compact(
    [
        thread(
            5,
            "MainThread",
            frame("read", "data.py", 3),
            frame("_worker_loop", "torch/utils/data/_utils/worker.py", 1),
            frame("train_step", "train.py", 26),
        )
    ]
)
RECORD = json.dumps({"entries": [], "pg_config": {}}).encode()


def ras(launched: int, late: int) -> bytes:
    """Return a RAS report of a job of eight ranks. One rank is one collective behind the others."""
    ranks = [process(rank, rank, launched - (rank == late)) for rank in range(8)]
    return report(communicator("0xa", ranks))


def test_names_say_whose_a_file_is(tmp_path: Path) -> None:
    (tmp_path / "rank-0.json").write_bytes(compact(DUMP))
    (tmp_path / "rank_1").mkdir()
    (tmp_path / "rank_1" / "main.txt.gz").write_bytes(gzip.compress(TEXT))
    (tmp_path / "rank_1" / "loader.json").write_bytes(LOADER)
    (tmp_path / "nccl_trace_rank_2").write_bytes(RECORD)
    (tmp_path / "trace7").write_bytes(RECORD)
    (tmp_path / ".hidden").write_bytes(b"nothing")

    evidence = read_folder(tmp_path)

    assert sorted(evidence.ranks) == [0, 1, 2, 7]
    assert evidence.of(0).trainer == evidence.of(1).trainer
    assert [one.role for one in evidence.of(1).helpers] == [ProcessRole.DATA_LOADER]
    assert evidence.of(2).record is not None
    assert evidence.moved is None


def test_processes_say_whose_a_process_is(tmp_path: Path) -> None:
    """A stopped process is known even if it could not be dumped."""
    (tmp_path / "dumps.txt").write_bytes(TEXT + TEXT.replace(b"20391", b"20392"))
    processes = [
        {"pid": 20391, "rank": 3},
        {"pid": 20392, "rank": 4, "role": "trainer", "state": "T (stopped)"},
        {"pid": 20393, "rank": 5},
        {"pid": 20394, "rank": 6, "state": "t (tracing stop)"},
    ]
    (tmp_path / "processes.json").write_text(json.dumps(processes))

    evidence = read_folder(tmp_path)

    assert sorted(evidence.ranks) == [3, 4, 5, 6]
    assert [evidence.of(rank).is_stopped for rank in (3, 4, 5, 6)] == [False, True, False, False]
    assert not evidence.of(5).is_known


def test_two_looks_say_who_moved(tmp_path: Path) -> None:
    moved = TEXT.replace(b"train.py:26", b"train.py:27")
    for look, dumps in (("snapshot-1", (TEXT, TEXT)), ("snapshot-10", (TEXT, moved)), ("snapshot-9", (moved, moved))):
        (tmp_path / look).mkdir()
        for rank, dump in enumerate(dumps):
            (tmp_path / look / f"rank-{rank}.txt").write_bytes(dump)

    assert read_folder(tmp_path).moved == frozenset({1})


def test_of_a_rank_whose_newest_flight_record_was_not_read_the_one_before_counts(tmp_path: Path) -> None:
    for look, names in (("snapshot-1", ("rank-0", "rank-1")), ("snapshot-2", ("rank-0",))):
        (tmp_path / look / "records").mkdir(parents=True)
        for name in names:
            (tmp_path / look / "records" / f"{name}.json").write_bytes(RECORD)
        for rank in range(3):
            (tmp_path / look / f"rank-{rank}.txt").write_bytes(TEXT)

    evidence = read_folder(tmp_path)
    assert [evidence.of(rank).record is not None for rank in range(3)] == [True, True, False]


def test_a_thread_in_the_background_that_goes_on_does_not_move_its_rank(tmp_path: Path) -> None:
    looks = {
        0: [{"MainThread": 1, "gpu-sampler": 3}, {"MainThread": 1, "gpu-sampler": 4}],
        1: [{"MainThread": 1, "pt_autograd_0": 3}, {"MainThread": 1, "pt_autograd_0": 4}],
        2: [{"gpu-sampler": 3, "MainThread": 1}, {"gpu-sampler": 3, "MainThread": 2}],
    }
    for number in (1, 2):
        (tmp_path / f"snapshot-{number}").mkdir()
        for rank, both in looks.items():
            dump = [thread(7, name, frame("run", "train.py", line)) for name, line in both[number - 1].items()]
            (tmp_path / f"snapshot-{number}" / f"rank-{rank}.json").write_bytes(compact(dump))

    assert read_folder(tmp_path).moved == frozenset({1, 2})


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("dump-20391.txt", TEXT, "is not known"),
        ("record.json", RECORD, "is not known"),
        ("rank-0.txt", b"\n", "is empty"),
        ("rank-0.gz", b"\x1f\x8bnothing", "cannot be read"),
        ("nccl_trace_20251126", RECORD, "20251126 is not a rank"),
        ("rank-0.json", b"[" * 100_000, "is not what"),
        ("rank-0.json", b'{"entries":' + b"[" * 100_000, "is not a flight record"),
        ("rank-0.json", compact(DUMP).replace(b'"line":26', b'"line":1e999'), "is not what"),
        ("processes.json", b'[{"pid": 1}]', "must be a list of"),
        ("processes.json", b'[{"pid": 1, "rank": -3}]', "-3 is not a rank"),
        ("processes.json", b'[{"pid": 1e999, "rank": 3}]', "must be a list of"),
        ("processes.json", b'[{"pid": 1, "rank": 2, "role": "cook"}]', '"data loader"'),
    ],
)
def test_what_is_wrong_is_told(name: str, data: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(DumpError, match=said):
        read_folder(tmp_path)


def test_no_folder_and_an_empty_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no dumps"):
        read_folder(tmp_path)
    with pytest.raises(ConfigError, match="there is no folder"):
        read_folder(tmp_path / "nowhere")


@pytest.mark.parametrize("data", [b"", RECORD[:-5], b"\x80\x02nothing", b"hello", b"\x1f\x8bnothing"])
def test_a_file_that_cannot_be_read_costs_only_that_file(data: bytes, tmp_path: Path) -> None:
    """Nothing is known of the file's rank, so the rank counts as missing."""
    (tmp_path / "rank-0.json").write_bytes(RECORD)
    (tmp_path / "rank-1.json").write_bytes(data)
    samples = read_folder(tmp_path)
    assert [samples.of(rank).is_known for rank in range(2)] == [True, False]
    assert samples.ranks.keys() == {0, 1}
    [unread] = samples.unread
    assert unread.startswith("rank-1")


def test_two_flight_records_of_one_rank_are_told(tmp_path: Path) -> None:
    """One of the two records must be of another run. It would make a healthy rank look late."""
    (tmp_path / "old").mkdir()
    for name in ("rank-2.json", "old/nccl_trace_rank_2"):
        (tmp_path / name).write_bytes(RECORD)
    with pytest.raises(ConfigError, match=r"old/nccl_trace_rank_2 and rank-2\.json are both"):
        read_folder(tmp_path)


def test_a_running_job_that_ras_looked_at_is_not_hung(tmp_path: Path) -> None:
    """In a running job, some rank is always the last one that launches a collective."""
    for look, launched, late in (("snapshot-1", 9, 5), ("snapshot-2", 1009, 3)):
        (tmp_path / look).mkdir()
        (tmp_path / look / "ras.json").write_bytes(ras(launched, late))
    topology = Topology.of(8, 1)

    both = judge_hang(read_folder(tmp_path), topology)
    one = judge_hang(read_folder(tmp_path / "snapshot-1"), topology)
    hangs = judge_hang(replace(read_folder(tmp_path / "snapshot-1"), is_hung=True), topology)

    assert both.conclusion is HangConclusion.NOT_HUNG
    assert (one.conclusion, one.machines) == (HangConclusion.UNKNOWN, ())
    assert "one sample" in one.reason
    assert hangs.ranks == (5,)
