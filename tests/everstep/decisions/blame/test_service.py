"""Failures of a service that all machines share, for example of storage."""

from __future__ import annotations

import pytest

from everstep.decisions.blame.service import failed_service, is_everywhere
from everstep.model.evidence import Classification, Evidence, RankExit
from tests.rank_ends import exited

STALE = "OSError: [Errno 116] Stale file handle: '/mnt/nfs/data.bin'"
NCCL = "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:1970, internal error"


def ends(*raised: str) -> list[RankExit]:
    return [exited(rank=rank, machine=f"m{rank}", code=1, exception=text) for rank, text in enumerate(raised)]


def classified(raised: str) -> Classification:
    [end] = ends(raised)
    assert end.classification is not None
    return end.classification


@pytest.mark.parametrize(
    ("raised", "on_one", "on_all"),
    [
        (STALE, True, True),
        ("OSError: HDFS connection failed: namenode in safe mode", True, True),
        (NCCL, False, True),
        ("torch.AcceleratorError: CUDA error: an illegal memory access was encountered", False, False),
        ("ValueError: expected 4 heads", False, False),
    ],
)
def test_what_all_ranks_report_is_not_a_fault_of_one_machine(raised: str, on_one: bool, on_all: bool) -> None:
    assert bool(failed_service(classified(raised), everywhere=False)) is on_one
    assert bool(failed_service(classified(raised), everywhere=True)) is on_all


def test_nothing_is_known_without_an_end() -> None:
    assert failed_service(None, everywhere=True) == ""


def test_what_connects_the_ranks_failed_if_all_of_them_only_lost_each_other() -> None:
    """The connection between the ranks is at fault. If another rank had ended first, its fault would be the cause."""
    lost = classified(NCCL).model_copy(update={"consequence": True})
    assert failed_service(lost, everywhere=False) == ""
    assert failed_service(lost, everywhere=True) == lost.fault


def test_everywhere_means_the_same_reason_on_every_rank() -> None:
    assert is_everywhere(Evidence(generation=1, exits=ends(STALE, STALE)), 2)
    assert not is_everywhere(Evidence(generation=1, exits=ends(STALE)), 2)
    assert not is_everywhere(Evidence(generation=1, exits=ends(STALE, NCCL)), 2)
    stopped = RankExit(rank=1, machine="m1", signal=9, stopped_by_us=True)
    assert not is_everywhere(Evidence(generation=1, exits=[*ends(STALE), stopped]), 2)
    assert not is_everywhere(Evidence(generation=1), 2)
