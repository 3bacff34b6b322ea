"""Folders of dumps: whose each file is, what it is, and what changed between two looks."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from everstep.decisions.hang.stacks import ProcessRole
from everstep.errors import ConfigError, EvidenceError
from everstep.evidence.folder import read_folder
from tests.everstep.evidence.test_py_spy import DUMP, TEXT, compact, frame, thread

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
    """Also of one that could not be dumped."""
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


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("dump-20391.txt", TEXT, "does not say whose it is"),
        ("record.json", RECORD, "does not say whose it is"),
        ("rank-0.txt", b"\n", "is empty"),
        ("rank-0.gz", b"\x1f\x8bnothing", "cannot be read"),
        ("processes.json", b'[{"pid": 1}]', "must be a list of"),
        ("processes.json", b'[{"pid": 1, "rank": 2, "role": "cook"}]', '"data loader"'),
    ],
)
def test_what_is_wrong_is_told(name: str, data: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(EvidenceError, match=said):
        read_folder(tmp_path)


def test_no_folder_and_an_empty_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no dumps"):
        read_folder(tmp_path)
    with pytest.raises(ConfigError, match="there is no folder"):
        read_folder(tmp_path / "nowhere")
