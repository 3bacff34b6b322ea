"""This module computes the metrics of a job's ranks on this machine from the step reports in their mapped files.

The reports are in shared memory, so no disk is needed, and an agent that was restarted reads them again.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from agent.v1 import agent_pb2 as pb
from everstep.decisions.detect.cpu_watch import CpuWatch
from everstep.decisions.detect.metric_watch import MetricWatch, Series
from everstep.errors import EverstepError
from everstep.rank.step_reports import Flops, ReportFile
from everstep.system.procfs import main_thread_s


@dataclass(slots=True)
class _RankMetrics:
    """The metrics of a rank, and the position up to which its reports were read."""

    generation: int = 0
    next: int = 0
    """Sequence number of the report that is read next."""
    watch: MetricWatch = field(default_factory=MetricWatch)
    cpu: CpuWatch = field(default_factory=CpuWatch)
    paces: int = 0
    """The number of paces that were measured when the CPU time was last read."""


class JobMetrics:
    """The metrics of one job on this machine, by rank; used by a single thread."""

    def __init__(self) -> None:
        self._ranks: dict[int, _RankMetrics] = {}
        self._reported: dict[str, int] = {}
        """Kind of change → the step at which the newest reported change of this kind began."""

    def new_changes(self, report: ReportFile) -> list[str]:
        """Return texts about the changes in a rank's metrics that no rank of this machine has shown before.

        If the loss is a mean over ranks, it jumps on all ranks, but the jump is reported once. Changes that exist at
        the first call for a rank, e.g. after a restart of the agent, count as reported.
        """
        is_first = report.rank not in self._ranks
        changes = changes_in(metrics_message(self.of(report), Flops()))
        new = [(kind, step, text) for kind, step, text in changes if self._reported.get(kind) != step]
        self._reported |= {kind: step for kind, step, _ in new}
        return [] if is_first else [text for _, _, text in new]

    def of(self, report: ReportFile) -> MetricWatch:
        """Return the metrics of a rank, after reading its new reports; they include its earlier generations."""
        rank = self._ranks.get(report.rank)
        if rank is None:
            rank = self._ranks[report.rank] = _RankMetrics()
            _read_earlier_generation(rank, report)
        if report.generation > rank.generation:
            rank.generation, rank.next = report.generation, 0
            rank.watch.begin()
            rank.cpu.begin()
        if report.generation == rank.generation:
            rank.next, records = report.records(rank.next)
            for record in records:
                rank.watch.observe(record)
            _read_cpu(rank, report)
        return rank.watch

    def message(self, report: ReportFile, flops: Flops) -> pb.Metrics:
        """Return the message with the metrics of a rank, after reading its new reports."""
        message = metrics_message(self.of(report), flops)
        cpu = self._ranks[report.rank].cpu
        for field_, value in ((message.cpu, cpu.newest), (message.typical_cpu, cpu.typical)):
            if value is not None:
                field_.CopyFrom(pb.CpuPerStep(had_s=value.had_s, waited_s=value.waited_s, step_s=value.step_s))
        return message


def _read_cpu(rank: _RankMetrics, report: ReportFile) -> None:
    """Read the rank's CPU time if a new pace was measured, so that the CPU time and the pace cover the same steps,
    except for one step."""
    pace = rank.watch.pace
    if pace.comparisons == rank.paces:
        return
    rank.paces = pace.comparisons
    if (used := main_thread_s(report.snapshot().pid)) is not None:
        rank.cpu.observe(rank.watch.step, *used, step_s=pace.step_s, slower=pace.slow_comparisons > 0)


def _read_earlier_generation(rank: _RankMetrics, report: ReportFile) -> None:
    """Read the reports of the previous generation if it ran here, because a restarted agent does not know them."""
    before = report.path.with_name(f"report-{report.rank}-{report.generation - 1}")
    if not before.exists():
        return
    try:
        file = ReportFile.open(before)
    except (OSError, EverstepError):
        return
    for record in file.records(0)[1]:
        rank.watch.observe(record)
    file.close()


def metrics_message(watch: MetricWatch, flops: Flops) -> pb.Metrics:
    """Convert a rank's metrics to a message."""
    pace = watch.pace
    return pb.Metrics(
        step=watch.step,
        loss=_series(watch.loss),
        grad_norm=_series(watch.grad_norm),
        tokens_per_s=pace.tokens_per_s,
        step_s=pace.step_s,
        typical_step_s=pace.typical_step_s,
        slow_since=pace.slow_since,
        flops_per_token=flops.per_token,
        peak_flops=flops.peak,
        flops_derived=flops.derived,
        slow_looks=pace.slow_comparisons,
        typical_tokens_per_s=pace.typical_tokens_per_s,
    )


def changes_in(metrics: pb.Metrics) -> list[tuple[str, int, str]]:
    """Return the jumps and declines in a rank's metrics: the kind of each, the step at which it began, and a text."""
    found = []
    for kind, series in (("loss", metrics.loss), ("gradient norm", metrics.grad_norm)):
        if series.jump_steps:
            text = f"the {kind} jumped at step {series.jump_step}: {series.jump_ratio:.1f} times its median"
            found.append((kind, series.jump_step, text))
    if metrics.slow_since >= 0 and metrics.typical_step_s:
        text = (
            f"steps take {metrics.step_s:.3g} s since step {metrics.slow_since}, {metrics.typical_step_s:.3g} s before"
        )
        found.append(("speed", metrics.slow_since, text))
    return found


def _series(series: Series) -> pb.Series:
    return pb.Series(
        not_finite=series.not_finite,
        streak=series.streak,
        since=series.since,
        typical=series.typical,
        jump_step=series.jump_step,
        jump_steps=series.jump_steps,
        jump_ratio=series.jump_ratio,
        known=series.known,
    )
