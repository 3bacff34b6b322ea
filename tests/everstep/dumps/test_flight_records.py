"""Flight records of torch, from gloo and from NCCL, in JSON files and in pickles."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from everstep.decisions.blame.hang.rank_samples import PendingOperation
from everstep.dumps.flight_records import flight_record, parse_record
from everstep.errors import DumpError


def entry(group: str, number: int, *, retired: bool, name: str = "gloo:all_reduce", **more: Any) -> dict[str, Any]:
    return {
        "process_group": [group, "undefined"],
        "collective_seq_id": number,
        "profiling_name": name,
        "input_sizes": [[8]],
        "retired": retired,
        "state": "scheduled",
    } | more


GLOO = {"version": "2.10", "pg_config": {"": {"name": "", "desc": "", "ranks": "[]"}}, "pg_status": {}}


def test_gloo() -> None:
    """Only the field ``retired`` shows that an operation of gloo has ended."""
    found = flight_record(GLOO | {"entries": [entry("0", 5, retired=True), entry("3", 2, retired=False)]})

    assert found.record.last == {"0": 5, "3": 2}
    assert found.record.pending == (PendingOperation("3", 2, "all_reduce", "[[8]]"),)
    calls = [(found.record.called[index], number, is_p2p) for index, number, is_p2p in found.record.order]
    assert calls == [("0", 5, False), ("3", 2, False)]
    assert (found.groups, found.labels) == ({}, {})


def test_the_oldest_of_a_group_holds_a_rank_up() -> None:
    """On a GPU, a rank may have entered several collectives. The oldest pending one counts."""
    entries = [entry("0", number, retired=False, name="nccl:all_reduce") for number in (7, 8, 9)]
    found = flight_record(GLOO | {"entries": entries})
    assert found.record.last == {"0": 7}
    assert [one.number for one in found.record.pending] == [7]


def test_nccl_says_ranks_and_p2p() -> None:
    config = {"4": {"name": "4", "desc": "mesh_pp", "ranks": "[2, 6]"}}
    entries = [
        entry("4", 0, retired=False, name="nccl:recv 0<-1", is_p2p=True, p2p_seq_id=3),
        entry("4", 1, retired=False, name="nccl:broadcast", state="completed"),
        entry("4", 2, retired=False, name="nccl:send 0->1", is_p2p=True, p2p_seq_id=4),
    ]
    entries[0]["process_group"][1] = "mesh_pp"
    entries[1]["process_group"][1] = "mesh_pp"
    entries[2]["process_group"][1] = "mesh_pp"

    found = flight_record({"pg_config": config, "entries": entries})

    assert found.groups == {"4": (2, 6)}
    assert found.labels == {"4": "mesh_pp"}
    assert [(one.operation, one.peer) for one in found.record.pending] == [("recv", 6)]


def test_pickles_need_the_flag() -> None:
    data = pickle.dumps(GLOO | {"entries": [entry("0", 5, retired=True)]}, protocol=2)
    with pytest.raises(DumpError, match="add --pickles"):
        parse_record("a_rank_1", data)
    assert parse_record("a_rank_1", data, pickles=True)["version"] == "2.10"


def test_a_pickle_runs_nothing(tmp_path: Path) -> None:
    class Touch:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (tmp_path / "touched",)

    data = pickle.dumps({"entries": [], "pg_config": Touch()}, protocol=2)
    with pytest.raises(DumpError, match="not plain data"):
        parse_record("a_rank_1", data, pickles=True)
    assert not (tmp_path / "touched").exists()


@pytest.mark.parametrize("data", [b"{}", b'{"entries": 3}', b"[]", b"{", b"\x80\x02K", b"\x80\x02]."])
def test_what_is_no_record_is_told(data: bytes) -> None:
    with pytest.raises(DumpError, match=r"^rank-1 is not a flight record"):
        parse_record("rank-1", data, pickles=True)


@pytest.mark.parametrize(
    "text",
    [
        '{"entries": [{"process_group": ["0", ""]}]}',
        '{"entries": [{"process_group": ["0", ""], "profiling_name": "nccl:send", "collective_seq_id": 1e999}]}',
        '{"entries": [], "pg_config": [1, 2]}',
    ],
)
def test_an_entry_that_lacks_something_is_told(text: str) -> None:
    with pytest.raises(DumpError, match="an entry of the flight record cannot be read"):
        flight_record(json.loads(text))
