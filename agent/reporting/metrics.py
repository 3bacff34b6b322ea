"""What the reports of a job's ranks on this machine say of the training, from their mapped files.

No disk is in the way: the last records lie in shared memory, and an agent that is started again takes them from there.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from agent.v1 import agent_pb2 as pb
from everstep.decisions.blame.slow.own_past import CpuPerStep
from everstep.decisions.detect.cpu_watch import CpuWatch
from everstep.decisions.detect.metric_watch import MetricWatch, Series
from everstep.errors import EverstepError
from everstep.rank.step_reports import Flops, ReportFile
from everstep.system.procfs import main_thread_s


@dataclass(slots=True)
class _Read:
    """How far the reports of a rank were read."""

    generation: int = 0
    next: int = 0
    """Sequence to read next."""
    watch: MetricWatch = field(default_factory=MetricWatch)
    cpu: CpuWatch = field(default_factory=CpuWatch)
    looks: int = 0
    """Of its pace, at which the CPU time was read as well."""


class JobMetrics:
    """The metrics of one job on this machine, by rank; asked in one thread only."""

    def __init__(self) -> None:
        self._ranks: dict[int, _Read] = {}
        self._told: dict[str, int] = {}
        """Kind of news → the step from which on it was told last."""

    def news(self, report: ReportFile) -> list[str]:
        """What a rank's reports show that no rank of this machine has shown yet, as texts.

        A loss that is a mean over ranks jumps on all of them: it is told once. What an
        agent finds when it looks first, e.g. after a restart, was told before it.
        """
        fresh = report.rank not in self._ranks
        found = shown_in(metrics_message(self.of(report), Flops()))
        new = [(kind, step, text) for kind, step, text in found if self._told.get(kind) != step]
        self._told |= {kind: step for kind, step, _ in new}
        return [] if fresh else [text for _, _, text in new]

    def of(self, report: ReportFile) -> MetricWatch:
        """All that a rank has reported until now, that of earlier generations included."""
        read = self._ranks.get(report.rank)
        if read is None:
            read = self._ranks[report.rank] = _Read()
            _take_up(read, report)
        if report.generation > read.generation:
            read.generation, read.next = report.generation, 0
            read.watch.begin()
            read.cpu.begin()
        if report.generation == read.generation:
            read.next, records = report.records(read.next)
            for record in records:
                read.watch.observe(record)
            _look_at_cpu(read, report)
        return read.watch

    def message(self, report: ReportFile, flops: Flops) -> pb.Metrics:
        """The metrics of one rank as the schema says them."""
        found = metrics_message(self.of(report), flops)
        cpu = self._ranks[report.rank].cpu
        for message, value in ((found.cpu, cpu.newest), (found.typical_cpu, cpu.typical)):
            if value is not None:
                message.CopyFrom(_cpu(value))
        return found


def _look_at_cpu(read: _Read, report: ReportFile) -> None:
    """Once for each look at its pace: what it takes to compute a step belongs to the same steps, but for one."""
    pace = read.watch.pace
    if pace.comparisons == read.looks:
        return
    read.looks = pace.comparisons
    if (used := main_thread_s(report.snapshot().pid)) is not None:
        read.cpu.observe(read.watch.step, *used, step_s=pace.step_s, slower=pace.slow_comparisons > 0)


def _cpu(value: CpuPerStep) -> pb.CpuPerStep:
    return pb.CpuPerStep(had_s=value.had_s, waited_s=value.waited_s, step_s=value.step_s)


def _take_up(read: _Read, report: ReportFile) -> None:
    """The past that a fresh agent knows nothing of: the generation before lies beside, if it ran here."""
    before = report.path.with_name(f"report-{report.rank}-{report.generation - 1}")
    if not before.exists():
        return
    try:
        file = ReportFile.open(before)
    except (OSError, EverstepError):
        return
    for record in file.records(0)[1]:
        read.watch.observe(record)
    file.close()


def metrics_message(watch: MetricWatch, flops: Flops) -> pb.Metrics:
    """What a rank's reports say, as the schema says it."""
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


def shown_in(metrics: pb.Metrics) -> list[tuple[str, int, str]]:
    """What is worth telling of one rank's metrics: its kind, the step where it began, and a text."""
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
