"""The metrics that an agent computes from the reports that its ranks write into mapped files."""

from __future__ import annotations

import math
import os
import time
from pathlib import Path

from agent.reporting.metrics import JobMetrics, metrics_message
from agent.v1 import agent_pb2 as pb
from everstep.decisions.detect.cpu_watch import KNOWN
from everstep.decisions.detect.metric_watch import PACE_STEPS, WINDOW
from everstep.rank.step_reports import Flops, ReportFile


def reports(folder: Path, generation: int, *losses: float | None) -> ReportFile:
    file = ReportFile.create(folder / f"report-0-{generation}", rank=0, generation=generation)
    for step, loss in enumerate(losses, start=20):
        file.report(step, loss, None, 100)
    return file


def test_each_report_is_counted_once_in_any_number_of_queries(tmp_path: Path) -> None:
    metrics, file = JobMetrics(), reports(tmp_path, 1, 1.0, math.nan)
    metrics.of(file)
    file.report(22, math.nan, None, 100)
    metrics.of(file)
    told = metrics_message(metrics.of(file), Flops(6.0, 2.0, derived=True))

    assert (told.flops_per_token, told.peak_flops, told.flops_derived) == (6.0, 2.0, True)
    assert (told.step, told.loss.not_finite, told.loss.streak, told.loss.since) == (22, 2, 2, 21)
    assert (told.loss.known, told.grad_norm.known, told.grad_norm.streak) == (True, False, 0)


def test_counts_begin_again_in_the_next_generation(tmp_path: Path) -> None:
    metrics = JobMetrics()
    metrics.of(reports(tmp_path, 1, 1.0, math.nan))
    second = metrics.of(reports(tmp_path, 2, None, 3.0))

    assert (second.step, second.loss.not_finite, second.loss.streak) == (21, 0, 0)


def test_a_restarted_agent_knows_the_reports_of_the_generation_before(tmp_path: Path) -> None:
    """If a generation's losses are NaN from its first step on, the agent must know that the loss was finite before."""
    reports(tmp_path, 1, 1.0, 2.0)
    second = reports(tmp_path, 2, math.nan)

    assert JobMetrics().of(second).loss.streak == 1
    (tmp_path / "report-0-1").unlink()
    assert JobMetrics().of(second).loss.streak == 0, "no finite loss is known, so the script may have no loss at all"


def test_a_jump_is_reported_once_for_all_ranks_of_a_machine(tmp_path: Path) -> None:
    metrics = JobMetrics()
    files = [ReportFile.create(tmp_path / f"report-{rank}-1", rank=rank, generation=1) for rank in range(2)]
    assert [metrics.new_changes(file) for file in files] == [[], []]
    for step in range(WINDOW + 5):
        for file in files:
            file.report(step, 1.0 if step < WINDOW else 6.0, 1.0, 0)
    text = f"the loss jumped at step {WINDOW}: 6.0 times its median"
    assert [metrics.new_changes(file) for file in (*files, *files)] == [[text], [], [], []]
    assert JobMetrics().new_changes(files[0]) == [], "a restarted agent does not report the jump again"


def test_a_rank_reports_its_computing_time_beside_the_length_of_a_step(tmp_path: Path) -> None:
    """This process acts as the rank and computes for a millisecond in each step."""
    metrics, file = JobMetrics(), ReportFile.create(tmp_path / "report-0-1", rank=0, generation=1)
    file.set_pid(os.getpid())
    told = pb.Metrics()
    for step in range((KNOWN + 2) * PACE_STEPS + 2):
        until = time.thread_time() + 0.001
        while time.thread_time() < until:
            pass
        file.report(step, 1.0, None, 0)
        told = metrics.message(file, Flops())
    assert told.HasField("cpu") and told.HasField("typical_cpu")
    assert min(told.cpu.had_s, told.typical_cpu.had_s) >= 0.001, "the rank had a CPU for at least the time of its work"
    assert told.cpu.had_s + told.cpu.waited_s <= 2 * told.step_s + 0.1, "the CPU times fit into the steps"

    assert not metrics.message(ReportFile.create(tmp_path / "report-0-2", rank=0, generation=2), Flops()).HasField(
        "cpu"
    )
