"""NCCL's RAS report shows ranks that launched fewer collectives, and ranks that do not answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from everstep.decisions.blame.hang.analysis import judge_hang
from everstep.decisions.blame.hang.rank_samples import CommunicationRecord, JobSamples, RankSample
from everstep.dumps.nccl_ras import parse_ras, ras_evidence
from everstep.errors import DumpError
from everstep.model.hang import HangConclusion
from everstep.model.topology import Topology

RECORDED = Path(__file__).parent / "recorded"


def process(rank: int, of: int, count: int | None = None) -> dict[str, Any]:
    """Return a communicator's rank, which is rank ``of`` of the job. Without a count, the rank does not answer."""
    found: dict[str, Any] = {
        "rank": rank,
        "host": f"10.0.0.{of // 4}",
        "pid": 1000 + of,
        "cuda_dev": of % 4,
        "nvml_dev": of % 4,
    }
    if count is None:
        return found | {"status": {"unresponsive": True, "considered_dead": False}}
    return found | {"status": {"abort_flag": False}, "collective_counts": {"Broadcast": 3, "AllReduce": count}}


def communicator(name: str, ranks: list[dict[str, Any]], missing: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    missing = missing or []
    head = {"hash": name, "secondary_hash": "0x1:0x2", "size": len(ranks) + len(missing)}
    return head | {"ranks_count": len(ranks), "ranks": ranks, "missing_ranks": missing}


def report(*communicators: dict[str, Any]) -> bytes:
    return json.dumps({"nccl_version": "2.29", "communicators": list(communicators)}).encode()


def judge(data: bytes) -> Any:
    ranks, groups = ras_evidence(parse_ras("ras.json", data))
    return judge_hang(JobSamples(ranks, groups), Topology.of(8, 1, tp=2))


def test_whoever_launched_fewer_is_named() -> None:
    """Ranks 4 and 5 are late in the communicator of all ranks. Rank 5 is also late in that of only these two."""
    world = [process(rank, rank, 9 if rank not in (4, 5) else 8) for rank in range(8)]
    pair = [process(0, 4, 31), process(1, 5, 30)]

    verdict = judge(report(communicator("0xb", pair), communicator("0xa", world)))

    assert (verdict.conclusion, verdict.ranks) == (HangConclusion.NAMES, (5,))


def test_a_silent_process_is_named() -> None:
    world = [process(rank, rank, 9) for rank in range(8) if rank != 2]
    verdict = judge(report(communicator("0xa", world, [process(2, 2)])))
    assert verdict.ranks == (2,)
    assert "does not answer NCCL's RAS" in verdict.reason


def test_what_nccl_wrote_on_a_gpu_is_read() -> None:
    """The report is of NCCL 2.28.9 on an H200. A communicator of one rank counts no collectives."""
    ranks, groups = ras_evidence(parse_ras("ras.json", (RECORDED / "nccl-ras-2.28.9.json").read_bytes()))

    group = "0x30a6db1285ad92f8 0xd0a24eabdfa7be8c:0x6498e6e5608549b7"
    assert groups == {group: (0,)}
    assert ranks == {0: RankSample(record=CommunicationRecord({group: 0}, ()))}


def test_equal_counts_name_nobody() -> None:
    verdict = judge(report(communicator("0xa", [process(rank, rank, 9) for rank in range(8)])))
    assert verdict.conclusion is HangConclusion.UNKNOWN


@pytest.mark.parametrize("data", [b"{}", b"[]", b'{"communicators": 1}', b"{"])
def test_what_is_no_report_is_told(data: bytes) -> None:
    with pytest.raises(DumpError, match="not a report of NCCL's RAS"):
        parse_ras("ras.json", data)


@pytest.mark.parametrize("communicators", [[], [{"size": 3}], [{"size": 1, "ranks": [{"rank": 0}], "hash": "0x1"}]])
def test_a_report_that_lacks_something_is_told(communicators: list[Any]) -> None:
    with pytest.raises(DumpError, match=r"^ras\.json"):
        ras_evidence({"communicators": communicators}, "ras.json")


def test_without_a_communicator_of_all_ranks_nobody_can_be_named() -> None:
    """Rank 1 of the first pair is rank 5 of the job, but no communicator shows that."""
    pairs = [communicator(f"0x{of}", [process(0, of, 31), process(1, of + 1, 31 - (of == 4))]) for of in (4, 0, 2)]
    with pytest.raises(DumpError, match="6 ranks but no communicator of all of them"):
        ras_evidence(parse_ras("ras.json", report(*pairs)))


def test_numbers_that_are_none_of_a_rank_are_told() -> None:
    for wrong in ("-1", "1e999"):
        data = report(communicator("0xa", [process(0, 0, 9)])).replace(b'"rank": 0', f'"rank": {wrong}'.encode())
        with pytest.raises(DumpError, match="cannot be read"):
            ras_evidence(parse_ras("ras.json", data))
