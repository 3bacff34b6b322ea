"""Defines the function by which a script joins the job of its rank."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from everstep.errors import ConfigError
from everstep.model.topology import Axis
from everstep.rank import environment
from everstep.rank.drill_faults import RankFaults
from everstep.rank.step_reports import Flops, ReportFile
from everstep.training.launch_environment import JoinSizes, from_environment, topology_of_job
from everstep.training.run import Run
from everstep.training.trial import end_if_tried


def join(
    *,
    tp: int | None = None,
    pp: int | None = None,
    order: Sequence[Axis] | None = None,
    mesh: Mapping[str, int] | None = None,
    groups: Sequence[str] | None = None,
    flops_per_token: float | None = None,
    peak_flops: float | None = None,
) -> Run:
    """Join the job to which this rank belongs. Call it once, early in the script.

    Args:
        tp: Tensor-parallel size; None: the job's, or 1 outside everstep.
        pp: Pipeline-parallel size; None: the job's, or 1 outside everstep. The data-parallel size follows.
        order: Axes of the mesh, the last one varies fastest; None: the job's, or pp-dp-tp outside everstep.
        mesh: Replaces ``tp``, ``pp`` and ``order``: every axis in order, with its size, e.g. ``{"pp": 2,
            "dp_replicate": 2, "dp_shard": -1}``. One size may be -1, which means all remaining ranks.
        groups: Kinds of parallel groups that are not an axis, e.g. ``["ep=8:dp_shard+cp"]``: groups of eight ranks
            along ``dp_shard`` and ``cp``; None: the job's.
        flops_per_token: Floating point operations of the complete model, forward and backward, for one token; None: 6
            for each parameter of the models that are named in ``checkpoint``.
        peak_flops: Floating point operations that this rank's device can do in a second; None: the known peak of its
            GPU.

    Raises:
        TopologyError: the sizes do not multiply to the number of ranks, or are not those of the job.
        ConfigError: a number, or an environment variable of torchrun or everstep, makes no sense.
    """
    report_file = os.environ.get(environment.REPORT_FILE)
    axes, laid = tuple(order) if order is not None else None, tuple(groups) if groups is not None else None
    topology = topology_of_job(JoinSizes(tp, pp, axes, mesh, laid))
    for name, value in (("flops_per_token", flops_per_token), ("peak_flops", peak_flops)):
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"everstep.join({name}={value}): it must be above 0; leave it out if it is not known")
    end_if_tried()
    rank, flops = from_environment("RANK", 0), Flops(flops_per_token or 0.0, peak_flops or 0.0)
    if not report_file:
        return Run(topology, rank, None, flops)
    reports = ReportFile.open(Path(report_file))
    reports.attach()
    faults = RankFaults.from_environment(rank)
    if faults is None:
        return Run(topology, rank, reports, flops)
    from everstep.training.drilled_run import DrilledRun

    return DrilledRun(topology, rank, reports, flops, faults)
