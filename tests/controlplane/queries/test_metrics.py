"""The reports of a job's ranks, summarized in one line about the job."""

from __future__ import annotations

from typing import Any

import pytest

from agent.v1 import agent_pb2 as pb
from controlplane.queries.metrics import metrics_lines, metrics_report
from everstep.model.topology import Topology

TOPOLOGY = Topology.of(2, 2, 2, 1)
"""A job with two replicas, each of two tensor-parallel ranks."""
FINE = pb.Series(since=-1, jump_step=-1)


def rank(number: int, *, generation: int = 1, norm: float = float("nan"), **metrics: Any) -> pb.RankProgress:
    given: dict[str, Any] = {"step": 9, "loss": FINE, "grad_norm": FINE, "slow_since": -1, "step_s": 0.5} | metrics
    return pb.RankProgress(rank=number, generation=generation, grad_norm=norm, metrics=pb.Metrics(**given))


def test_ranks_of_a_replica_count_once_and_the_slowest_sets_the_pace() -> None:
    ranks = [rank(0, tokens_per_s=100.0), rank(1), rank(2, tokens_per_s=80.0), rank(3, step_s=0.6, norm=2.0)]
    report = metrics_report(ranks, TOPOLOGY)

    assert report is not None
    assert (report.tokens_per_s, report.step_s, report.grad_norm, report.mfu) == (180.0, 0.6, 2.0, None)
    assert metrics_lines(report) == [("metrics", "180 tokens/s, 0.6 s a step, gradient norm 2")]


@pytest.mark.parametrize(("derived", "mfu"), [(True, 0.3), (False, 0.15)])
def test_utilization_is_the_work_for_tokens_divided_by_the_peak_of_all_devices(derived: bool, mfu: float) -> None:
    """Derived FLOPs of a token are a rank's share, and are added up over a replica.

    Given FLOPs are of the complete model.
    """
    work: dict[str, Any] = {"flops_per_token": 6.0, "peak_flops": 400.0, "flops_derived": derived}
    ranks = [rank(number, tokens_per_s=1000.0, **work) for number in range(4)]
    report = metrics_report(ranks, TOPOLOGY)

    assert report is not None and report.mfu == pytest.approx(mfu * 50)
    assert ("6 FLOPs for each parameter" in report.mfu_from) is derived
    unknown = metrics_report([*ranks[:3], rank(3, tokens_per_s=20.0, flops_per_token=6.0)], TOPOLOGY)
    assert unknown is not None and unknown.mfu is None, "the peak of one device is unknown"
    some = metrics_report(ranks[:3], TOPOLOGY)
    assert some is not None and some.mfu is None


def test_unusual_values_are_named_with_their_ranks() -> None:
    bad = pb.Series(known=True, not_finite=2, streak=2, since=8, jump_step=-1)
    over = pb.Series(known=True, not_finite=1, since=-1, jump_step=4, jump_steps=3, jump_ratio=7.25)
    slow: dict[str, Any] = {"slow_since": 5, "step_s": 0.5, "typical_step_s": 0.25}
    report = metrics_report([rank(0, loss=bad), rank(1), rank(2), rank(3, loss=over, **slow)], TOPOLOGY)

    assert report is not None and report.noted == [
        "the loss has been NaN or infinite since step 8 (rank 0)",
        "the loss was NaN or infinite 1 times, and is finite again (rank 3)",
        "the loss jumped at step 4: 7.2 times its median (rank 3)",
        "steps take 0.5 s since step 5, 0.25 s before (rank 3)",
    ]


def test_without_reports_or_with_older_agents_there_are_no_metrics() -> None:
    assert metrics_report([pb.RankProgress(rank=0, generation=1)], TOPOLOGY) is None
    report = metrics_report([rank(0, generation=1), rank(0, generation=2, step_s=0.0)], TOPOLOGY)
    assert report is not None and metrics_lines(report) == []
