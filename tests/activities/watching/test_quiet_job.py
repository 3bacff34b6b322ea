"""When a job that makes no steps is judged, and since when it counts as making no steps."""

from __future__ import annotations

from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

from activities.watching.job_view import JobView
from activities.watching.watcher import Watcher
from agent.client import AgentClients
from everstep.model.job_state import job_workflow_id
from tests.activities.watching.test_job_view import S, anomalies, progress, show, watched


def test_what_time_decides_is_judged_when_it_is_due() -> None:
    """Some rules depend only on time. The job is judged again at the moment when such a rule may decide."""
    job = watched()
    for second in range(4):
        show(job, (100 + second) * S, 20 + second)
        anomalies(job, (100 + second) * S)
    assert job.rest_s(0.5, 103 * S) == 0.5, "the ranks step, so the job is looked at in the usual interval"

    for second in range(1, 31):
        now_ns = (103 + second) * S - S // 5
        assert anomalies(job, now_ns) == []
        if second < 30:
            assert job.rest_s(0.5, now_ns) == 0.5
    assert 0.2 < job.rest_s(0.5, now_ns) < 0.21
    assert anomalies(job, now_ns + round(job.rest_s(0.5, now_ns) * S)) != []
    assert job.rest_s(0.5, now_ns + S) == 0.5, "the moment is over, so the usual interval is used again"


def test_a_rank_that_is_stopped_is_judged_at_once() -> None:
    job = watched()
    show(job, 100 * S, 20)
    assert not job.woken.is_set()

    stopped = progress(1, 101 * S, 20)
    stopped.ranks[0].stopped = True
    job.showed("m1", stopped, 101 * S)
    assert job.woken.is_set()


def test_a_job_that_is_paused_and_continued_is_left_alone() -> None:
    job = watched()
    told = [(100.0, 0, False), (100.0, 1, False), (101.0, 0, True), (101.3, 1, True), (101.6, 0, True)]
    told += [(120.0, 0, False), (120.5, 1, False)]
    for second, rank, is_stopped in told:
        now_ns = round(second * S)
        reply = progress(rank, now_ns, 20)
        reply.ranks[0].stopped = is_stopped
        job.showed(f"m{rank}", reply, now_ns)
        for later_s in range(5):  # time passes, until the next report comes
            assert anomalies(job, now_ns + later_s * S // 20) == []


def test_a_job_is_quiet_since_its_last_step_and_not_since_that_was_told() -> None:
    """Reports may arrive late. The quiet time counts from the time of the step, and not from the report's arrival."""
    job = watched()
    for tick in range(4):
        for rank in (0, 1):
            told = progress(rank, (100 + tick) * S, 20 + tick)
            told.ranks[0].stepped_ns = (100 + tick) * S - S // 4 * (1 + rank)
            job.showed(f"m{rank}", told, (100 + tick) * S)
        facts = job.facts(1, (100 + tick) * S)

    assert (facts.quiet_s, facts.typical_step_s) == (0.25, 1.0)


def steps_of(job: JobView, *seconds: float) -> None:
    """Let both ranks complete and show a step at each of these times."""
    for step, second in enumerate(seconds):
        now_ns = round(second * S)
        for rank in (0, 1):
            told = progress(rank, now_ns, 20 + step)
            told.ranks[0].stepped_ns = now_ns
            job.showed(f"m{rank}", told, now_ns)
        job.facts(1, now_ns)


class Listed:
    """A client of Temporal that lists the newest run of one job's workflow."""

    def __init__(self, job: JobView) -> None:
        self.job, self.run = job, "first"

    async def list_workflows(self, _query: str) -> AsyncIterator[SimpleNamespace]:
        yield SimpleNamespace(id=job_workflow_id(self.job.spec.name), run_id=self.run)


async def test_a_job_that_is_watched_anew_keeps_what_was_learnt_of_its_pauses() -> None:
    job = watched()
    client: Any = Listed(job)
    watcher, workflow_id = Watcher(client, AgentClients(), "queue"), job_workflow_id(job.spec.name)
    watcher.ensure(job.spec, job.machines)
    await watcher._list()
    steps_of(watcher.watched[workflow_id], 100, 101, 102, 106, 107)

    client.run = "continued"
    await watcher._list()
    assert workflow_id not in watcher.watched
    watcher.ensure(job.spec, job.machines)
    anew = watcher.watched[workflow_id]
    watcher._leave(workflow_id)

    show(anew, 108 * S, 25, ranks=(0,))
    facts = anew.facts(1, 108 * S)
    assert (facts.quiet_s, facts.typical_step_s, facts.longest_step_s) == (0.0, 1.0, 4.0)


def test_of_a_new_generation_the_pauses_of_those_before_are_known() -> None:
    job = watched()
    steps_of(job, 100, 101, 102, 106, 107)
    for rank in (0, 1):
        job.showed(f"m{rank}", progress(rank, 120 * S, 23, generation=2), 120 * S)
    facts = job.facts(2, 120 * S)
    assert (facts.quiet_s, facts.typical_step_s, facts.longest_step_s) == (0.0, 1.0, 4.0)
    assert job.facts(1, 120 * S).newest is False
