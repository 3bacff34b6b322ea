"""A job whose steps take longer than before: the watcher reports that to the job's workflow, and keeps watching."""

from __future__ import annotations

from activities.watching.job_view import JobView
from activities.watching.watcher import update_of
from agent.v1 import agent_pb2 as pb
from everstep.model.incident import Anomaly, Symptom
from tests.activities.watching.test_job_view import S, anomalies, progress, watched

SLOW = pb.Metrics(step=400, step_s=0.2, typical_step_s=0.1, slow_since=320, slow_looks=2)
WELL = pb.Metrics(step=400, step_s=0.1, typical_step_s=0.1, slow_since=-1)


def shown(job: JobView, seconds: float, metrics: pb.Metrics, *, generation: int = 1) -> list[Anomaly]:
    """Return the watcher's anomalies after both machines have shown a rank with these metrics."""
    for rank in (0, 1):
        reply = progress(rank, round(seconds * S), 100 + round(seconds), generation=generation, own_step=10**6)
        reply.ranks[0].metrics.CopyFrom(metrics)
        job.showed(f"m{rank}", reply, round(seconds * S))
    return anomalies(job, round(seconds * S))


def slow_for(job: JobView, begin: int, seconds: int) -> list[Anomaly]:
    return [found for at in range(begin, begin + seconds) for found in shown(job, at, SLOW)]


def test_a_slow_job_is_reported_after_two_minutes_and_stays_watched() -> None:
    job = watched()
    assert slow_for(job, 100, 120) == []
    [found] = shown(job, 220, SLOW)
    assert (found.symptom, found.rule, found.generation) == (Symptom.SLOW, "slow-steps", 1)
    assert update_of(found) == ("observe", found, f"observe-{found.id}")

    job.accepted(found, 220 * S)
    assert 1 not in job.reported
    assert slow_for(job, 221, 200) == [], "the job's workflow knows of it and investigates, so it is not reported again"


def test_the_time_of_a_decline_begins_anew_after_a_recovery_or_a_launch() -> None:
    job = watched()
    assert slow_for(job, 100, 100) == []
    assert shown(job, 200, WELL) == []
    assert slow_for(job, 201, 100) == []
    assert shown(job, 301, SLOW, generation=2) == []
    assert [found for at in range(302, 402) for found in shown(job, at, SLOW, generation=2)] == []


def test_an_agent_of_an_earlier_release_reports_no_decline() -> None:
    job = watched()
    of_before = pb.Metrics(step=400, step_s=0.2, typical_step_s=0.1, slow_since=320)
    assert [found for at in range(100, 400) for found in shown(job, at, of_before)] == []
