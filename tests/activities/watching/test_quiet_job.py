"""When a job that stands still is judged, and since when it stands still."""

from __future__ import annotations

from tests.activities.watching.test_job_view import S, anomalies, progress, show, watched


def test_what_time_decides_is_judged_when_it_is_due() -> None:
    job = watched()
    for second in range(4):
        show(job, (100 + second) * S, 20 + second)
        anomalies(job, (100 + second) * S)
    assert job.rest_s(0.5, 103 * S) == 0.5, "they step"

    for second in range(1, 31):
        now_ns = (103 + second) * S - S // 5
        assert anomalies(job, now_ns) == []
        if second < 30:
            assert job.rest_s(0.5, now_ns) == 0.5
    assert 0.2 < job.rest_s(0.5, now_ns) < 0.21
    assert anomalies(job, now_ns + round(job.rest_s(0.5, now_ns) * S)) != []
    assert job.rest_s(0.5, now_ns + S) == 0.5, "it is over: nothing is looked at again at once"


def test_a_rank_that_is_stopped_is_judged_at_once() -> None:
    job = watched()
    show(job, 100 * S, 20)
    assert not job.woken.is_set()

    stopped = progress(1, 101 * S, 20)
    stopped.ranks[0].stopped = True
    job.showed("m1", stopped, 101 * S)
    assert job.woken.is_set()


def test_a_job_is_quiet_since_its_last_step_and_not_since_that_was_told() -> None:
    job = watched()
    for tick in range(4):
        for rank in (0, 1):
            told = progress(rank, (100 + tick) * S, 20 + tick)
            told.ranks[0].stepped_ns = (100 + tick) * S - S // 4 * (1 + rank)
            job.showed(f"m{rank}", told, (100 + tick) * S)
        facts = job.facts(1, (100 + tick) * S)

    assert (facts.quiet_s, facts.typical_step_s) == (0.25, 1.0)
