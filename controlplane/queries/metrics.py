"""Training metrics of a job, from its ranks' reports: speed, utilization, and unusual values."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from pydantic import BaseModel, Field

from agent.reporting.metrics import changes_in
from agent.v1 import agent_pb2 as pb
from controlplane import text
from everstep.base.text import listed
from everstep.model.topology import Topology

NAMED = 4
"""At most this many ranks are named in a line; the rest are counted."""


class MetricsReport(BaseModel):
    """Metrics of a job's newest generation; a value of None is not known."""

    step_s: float | None
    """Mean time of the last steps on the slowest rank, seconds."""
    tokens_per_s: float | None
    """Tokens per second of the whole job over the last steps: ranks of one model replica share their tokens."""
    grad_norm: float | None
    """Gradient norm of the lowest rank that reports it."""
    mfu: float | None
    """Model FLOPs utilization, 0 to 1: the FLOPs per second for the tokens, divided by the peak of all devices."""
    mfu_from: str
    """The numbers from which the utilization was computed; empty: it is not known."""
    noted: list[str] = Field(default_factory=list)
    """Unusual values, with the ranks that report them."""


def metrics_report(ranks: Iterable[pb.RankProgress], topology: Topology) -> MetricsReport | None:
    """The metrics of a job; None: no rank reports metrics.

    Args:
        ranks: Ranks of any generations; only the newest counts.
        topology: Topology of the job.
    """
    reporting = [rank for rank in ranks if rank.HasField("metrics") and rank.rank < topology.world_size]
    newest = max((rank.generation for rank in reporting), default=0)
    by_number = {rank.rank: rank for rank in sorted(reporting, key=lambda rank: rank.rank) if rank.generation == newest}
    if not by_number:
        return None
    metrics = [rank.metrics for rank in by_number.values()]
    replicas = _replicas(by_number, topology)
    tokens = sum(max(each.tokens_per_s for each in replica) for replica in replicas)
    mfu, mfu_from = _mfu(replicas, topology) if len(by_number) == topology.world_size else (None, "")
    return MetricsReport(
        step_s=max(each.step_s for each in metrics) or None,
        tokens_per_s=tokens or None,
        grad_norm=next((rank.grad_norm for rank in by_number.values() if math.isfinite(rank.grad_norm)), None),
        mfu=mfu,
        mfu_from=mfu_from,
        noted=_noted(by_number),
    )


def metrics_lines(report: MetricsReport) -> list[tuple[str, str]]:
    """The metrics as text: pairs of a title and a line."""
    parts = [text.per_second(report.tokens_per_s, "tokens")] if report.tokens_per_s else []
    parts += [f"{report.step_s:.3g} s a step"] if report.step_s else []
    parts += [f"gradient norm {report.grad_norm:.4g}"] if report.grad_norm is not None else []
    parts += [f"MFU {text.ratio(report.mfu)} ({report.mfu_from})"] if report.mfu is not None else []
    lines = [("metrics", ", ".join(parts))] if parts else []
    return lines + [("noted", line) for line in report.noted]


def _replicas(ranks: Mapping[int, pb.RankProgress], topology: Topology) -> list[list[pb.Metrics]]:
    replicas: dict[int, list[pb.Metrics]] = defaultdict(list)
    for number, rank in ranks.items():
        replicas[topology.coordinate(number).dp].append(rank.metrics)
    return list(replicas.values())


def _mfu(replicas: Sequence[Sequence[pb.Metrics]], topology: Topology) -> tuple[float | None, str]:
    """The utilization, and the numbers from which it was computed; None: one of them is not known."""
    ranks = [each for replica in replicas for each in replica]
    if not all(each.peak_flops and each.flops_per_token for each in ranks):
        return None, ""
    done = 0.0
    for replica in replicas:
        # Derived FLOPs are for each rank's share of the model; FLOPs from the script are for the entire model.
        shares = [each.flops_per_token for each in replica]
        per_token = sum(shares) if replica[0].flops_derived else max(shares)
        done += per_token * max(each.tokens_per_s for each in replica)
    if not done:
        return None, ""
    peak = sum(each.peak_flops for each in ranks)
    cost = "6 FLOPs for each parameter and token" if ranks[0].flops_derived else "FLOPs for a token from the script"
    return done / peak, f"{cost}, peak {peak / topology.world_size / 1e12:.4g} TFLOP/s for each device"


def _noted(ranks: Mapping[int, pb.RankProgress]) -> list[str]:
    ranks_of: dict[str, list[int]] = defaultdict(list)
    for number, rank in ranks.items():
        for name, series in (("loss", rank.metrics.loss), ("gradient norm", rank.metrics.grad_norm)):
            if series.streak:
                ranks_of[f"the {name} has been NaN or infinite since step {series.since}"].append(number)
            elif series.not_finite:
                line = f"the {name} was NaN or infinite {series.not_finite} times, and is finite again"
                ranks_of[line].append(number)
        for _, _, line in changes_in(rank.metrics):
            ranks_of[line].append(number)
    return [
        f"{line} ({'all ranks' if len(numbers) == len(ranks) else f'rank {listed(numbers, NAMED)}'})"
        for line, numbers in ranks_of.items()
    ]
