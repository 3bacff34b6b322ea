"""What the reports of a job's ranks on this machine say of the training, from their mapped files.

No disk is in the way: the last records lie in shared memory, and an agent that is
started again takes them from there.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from agent.v1 import agent_pb2 as pb
from everstep.decisions.detect.metric_watch import MetricWatch, Series
from everstep.errors import EverstepError
from everstep.step_reports import ReportFile


@dataclass(slots=True)
class _Read:
    """How far the reports of a rank were read."""

    generation: int = 0
    next: int = 0
    """Sequence to read next."""
    watch: MetricWatch = field(default_factory=MetricWatch)


class JobMetrics:
    """The metrics of one job on this machine, by rank; asked in one thread only."""

    def __init__(self) -> None:
        self._ranks: dict[int, _Read] = {}

    def of(self, report: ReportFile) -> MetricWatch:
        """All that a rank has reported until now, that of earlier generations included."""
        read = self._ranks.get(report.rank)
        if read is None:
            read = self._ranks[report.rank] = _Read()
            _take_up(read, report)
        if report.generation > read.generation:
            read.generation, read.next = report.generation, 0
            read.watch.begin()
        if report.generation == read.generation:
            read.next, records = report.records(read.next)
            for record in records:
                read.watch.observe(record)
        return read.watch


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


def metrics_message(watch: MetricWatch) -> pb.Metrics:
    """The metrics of one rank as the schema says them."""
    pace = watch.pace
    return pb.Metrics(
        step=watch.step,
        loss=_series(watch.loss),
        grad_norm=_series(watch.grad_norm),
        tokens_per_s=pace.tokens_per_s,
        step_s=pace.step_s,
        typical_step_s=pace.typical_step_s,
        slow_since=pace.slow_since,
    )


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
