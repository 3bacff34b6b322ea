"""A watcher between real workflows and agents that report what a test wants."""

from __future__ import annotations

import asyncio
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import structlog.testing
from temporalio.worker import Worker

from activities.ledger import machine_events
from activities.ledger.ledger import Ledger
from activities.ledger.machine_events import EventWriter
from activities.ledger.records import NumbersUsed
from activities.watching.watcher import Watcher
from agent.client import AgentClients
from agent.fake import NEVER
from agent.v1 import agent_pb2 as pb
from everstep.errors import AgentUnreachable, LedgerError
from everstep.model.incident import Symptom
from everstep.model.job import JobSpec
from everstep.model.job_state import JobState
from tests.activities.watching.conftest import Place, cancelled_at_the_end, worker_of
from tests.workflows.other_release import FAILING, UNREADABLE, OtherJob
from workflows.job import JobWorkflow

DONE = pb.Exit(kind=pb.Exit.CODE, value=0, time_ns=1)
KILLED = pb.Exit(kind=pb.Exit.SIGNAL, value=9, time_ns=2)


async def test_a_name_used_again_is_watched_as_what_it_is_now(place: Place) -> None:
    first = await place.start("again", 1)
    await place.until_watched(1)
    await first.signal(JobWorkflow.stop, {"operator": "test"})
    assert (await first.result()).outcome == "stopped"
    await place.until_watched(0)  # a job that is over is not watched

    place.cluster.used = NumbersUsed(generations=1, incidents=0)
    second = await place.start("again", 2)
    await place.until_watched(2)
    place.agents[0].exited("again", 2, 0, DONE, finished=True)
    await asyncio.sleep(0.5)
    assert (await second.query(JobWorkflow.current_state)).outcome == "", (
        "only one of two ranks has ended, so the job is not over"
    )
    place.agents[1].exited("again", 2, 1, KILLED, finished=False)
    while not (await second.query(JobWorkflow.current_state)).incidents:  # noqa: ASYNC110 - there is no event
        await asyncio.sleep(0.05)
    await second.signal(JobWorkflow.stop, {"operator": "test"})
    await second.result()


def stepping(rank: int, steps: int, **saved: int | list[int]) -> pb.RankProgress:
    nothing: dict[str, Any] = {"own_step": -1, "backup_step": -1, "disk_step": -1, "disk_wanted": -1, "remote_step": -1}
    return pb.RankProgress(
        rank=rank,
        generation=1,
        alive=True,
        attached=True,
        completed_steps=steps,
        milestones=pb.Milestones(first_step=1),
        saved=pb.SavedState(**(nothing | saved)),
    )


async def test_a_job_that_steps_and_does_not_save_gets_an_incident(place: Place) -> None:
    long_ago = time.time_ns() - 600 * 10**9
    for rank, agent in enumerate(place.agents):
        agent.shown["stale"] = [stepping(rank, 500, own_step=20, own_ns=long_ago)]
    job = await place.start("stale", 2)

    while not place.cluster.notes:  # noqa: ASYNC110 - there is no event
        await asyncio.sleep(0.05)

    assert place.cluster.notes[0].anomaly.symptom is Symptom.UNSAVED
    assert "480 steps" in place.cluster.notes[0].anomaly.headline
    await job.signal(JobWorkflow.stop, {"operator": "test"})
    await job.result()


async def test_a_machine_that_no_watcher_ever_saw_run_its_ranks_is_found_to_be_lost(place: Place) -> None:
    place.agents[0].shown["gone"] = [stepping(0, 20)]
    place.agents[1].shown["gone"] = []
    job = await place.start("gone", 2)

    while not place.cluster.notes:  # noqa: ASYNC110 - there is no event
        await asyncio.sleep(0.05)

    found = place.cluster.notes[0].anomaly
    assert (found.symptom, found.headline) == (Symptom.CRASH, "m1 came back empty and lost rank 1")
    await job.signal(JobWorkflow.stop, {"operator": "test"})
    await job.result()


async def test_every_machine_is_asked_for_a_step_on_disk_though_one_of_them_hangs(place: Place) -> None:
    place.agents[0].answer(persist=NEVER)
    job = await place.start("timed", 2, disk_every_min=0.001)
    steps = 0
    while not all(agent.asked_to_persist for agent in place.agents):
        steps += 1
        for rank, agent in enumerate(place.agents):
            agent.shown["timed"] = [stepping(rank, steps, own_step=steps, own_ns=time.time_ns())]
        await asyncio.sleep(0.1)

    [first], [second] = (agent.asked_to_persist for agent in place.agents)
    assert first == second > steps
    await job.signal(JobWorkflow.stop, {"operator": "test"})
    await job.result()


async def test_machines_are_aligned_when_one_is_behind_with_its_backups(place: Place) -> None:
    job = await place.start("behind", 2)
    steps = 0
    while not all(agent.asked("align_backups") for agent in place.agents):
        steps += 1
        for rank, agent in enumerate(place.agents):
            agent.shown["behind"] = [stepping(rank, steps, own_step=steps, backup_step=0 if rank else steps)]
        await asyncio.sleep(0.1)

    [first, second] = (agent.asked("align_backups")[0] for agent in place.agents)
    assert first == second
    assert (first.job, first.generation, first.whole, first.settled) == ("behind", 1, 0, 0)
    assert first.named > steps
    await job.signal(JobWorkflow.stop, {"operator": "test"})
    await job.result()


async def test_every_machine_is_told_which_step_is_whole_on_all_disks(place: Place) -> None:
    job = await place.start("whole", 2)
    for rank, agent in enumerate(place.agents):
        agent.shown["whole"] = [stepping(rank, 70, own_step=70, own_ns=time.time_ns(), disk_step=64, disk_steps=[64])]
    while not all(agent.told_whole for agent in place.agents):  # noqa: ASYNC110 - there is no event
        await asyncio.sleep(0.05)

    assert [agent.told_whole for agent in place.agents] == [[64], [64]]
    await job.signal(JobWorkflow.stop, {"operator": "test"})
    await job.result()


async def test_a_job_that_cannot_be_read_harms_no_other_one_and_is_said_once(place: Place) -> None:
    """The same is true for a job whose workflow tasks fail, so that it never answers."""
    await place.worker.shutdown()
    sound = JobState(spec=JobSpec(name="sound", script="/job.py"), machines=place.machines[:1], generation=1)
    with structlog.testing.capture_logs() as logs:
        async with Worker(place.client, task_queue=place.queue, workflows=[OtherJob]):
            for name, state in (("unread", UNREADABLE), ("mute", FAILING)):
                await place.begin(name, state)
            while not any(line["event"].startswith("a job does not answer") for line in logs):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            await place.begin("sound", sound)
            await place.until_watched(1)
            await asyncio.sleep(2.5)  # the watcher lists jobs twice more
    said = [line for line in logs if line["event"].startswith("a job does not answer") and line["job"] == "job/unread"]

    assert len(said) == 1
    assert "order" in said[0]["error"]


async def test_jobs_of_another_cluster_in_the_same_namespace_are_not_watched(place: Place) -> None:
    """These jobs have their own machines and workers, with another token."""
    theirs, ours = (
        JobState(spec=JobSpec(name=name, script="/job.py"), machines=[machine], generation=1)
        for name, machine in zip(("theirs", "ours"), place.machines, strict=True)
    )
    await place.worker.shutdown()
    async with (
        Worker(place.client, task_queue=place.queue, workflows=[OtherJob]),
        Worker(place.client, task_queue=place.queue + "-other", workflows=[OtherJob]),
    ):
        await place.begin("theirs", theirs, other="-other")
        await asyncio.sleep(2.5)  # the watcher lists jobs twice
        await place.begin("ours", ours)
        await place.until_watched(1)

    assert [agent.open("observe") for agent in place.agents] == [0, 1]


async def test_nothing_is_acknowledged_before_the_workflow_took_it(place: Place) -> None:
    """If the watcher dies before that, the agent sends the observation to the next watcher."""
    job = await place.start("untaken", 1)
    await place.until_watched(1)
    await place.worker.shutdown()
    place.agents[0].exited("untaken", 1, 0, KILLED, finished=False)
    await asyncio.sleep(1.5)  # the watcher reports it now, but no worker runs that could accept it
    assert place.agents[0].acknowledged == 0

    async with worker_of(place.client, place.queue, place.cluster):
        while not place.agents[0].acknowledged:  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(0.02)
        # The workflow handles an accepted report once its first launch is over.
        while not (await job.query(JobWorkflow.current_state)).incident_count:  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(0.1)
        await job.signal(JobWorkflow.stop, {"operator": "test"})
        await job.result()


async def test_what_happened_to_a_machine_is_kept_there_until_the_ledger_has_it(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a worker dies while the ledger is away, no observation is lost."""
    monkeypatch.setattr(machine_events, "RETRY_S", (0.05, 0.05))
    job = await place.start("noted", 1)
    await place.until_watched(1)
    ledger, pool = Ledger.open(f"sqlite:///{tmp_path}/ledger.db"), AgentClients()
    call, away = ledger.call, True

    async def called(*args: Any) -> Any:
        if away:
            raise LedgerError("away")
        return await call(*args)

    monkeypatch.setattr(ledger, "call", called)
    events = EventWriter(ledger)
    watcher = Watcher(place.client, pool, place.queue, events.accept)
    async with cancelled_at_the_end(watcher.run(), events.run()):
        await place.until_watched(2)
        place.agents[0].publish(agent_started=pb.AgentStarted(pid=4711))
        place.agents[0].exited("noted", 1, 0, KILLED, finished=False)
        while place.agents[0].acknowledged < 2:  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(0.05)
        await asyncio.sleep(1)
        assert place.agents[0].machine_acknowledged == 0, (
            "only the job's observations are acknowledged, and not the machine's"
        )
        away = False
        while place.agents[0].machine_acknowledged < 1:  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(0.05)
        assert [one.text for one in ledger.machine_events()] == ["agent started (pid 4711), adopted 0 ranks"]
    await pool.close()
    ledger.close()
    await job.signal(JobWorkflow.stop, {"operator": "test"})
    await job.result()


async def test_a_machine_that_takes_no_acknowledgement_holds_up_no_report(place: Place) -> None:
    """The machine sends the same observations to the next watcher. They open no second incident."""
    place.agents[0].answer(acknowledge=NEVER)
    job = await place.start("deaf", 2)
    await place.until_watched(2)
    place.agents[0].exited("deaf", 1, 0, KILLED, finished=False)
    place.agents[1].exited("deaf", 1, 1, KILLED, finished=False)
    while not place.agents[0].open("acknowledge") or not place.agents[1].acknowledged:  # noqa: ASYNC110 - there is no event
        await asyncio.sleep(0.02)
    while (await job.query(JobWorkflow.current_state)).generation < 2:  # noqa: ASYNC110 - there is no event
        await asyncio.sleep(0.02)
    place.agents[1].exited("deaf", 2, 1, KILLED, finished=False)
    while (await job.query(JobWorkflow.current_state)).incident_count < 2:  # noqa: ASYNC110 - there is no event
        await asyncio.sleep(0.02)

    assert place.agents[0].open("acknowledge") == 1, (
        "only the first acknowledgement was sent, and it still waits for its answer"
    )
    assert place.agents[0].acknowledged == 0
    await job.signal("stop", {"operator": "test"})
    await job.result()


async def test_what_was_never_acknowledged_is_told_again_and_opens_nothing(place: Place) -> None:
    place.agents[0].answer(acknowledge=NEVER)
    job = await place.start("twice", 1)
    await place.until_watched(1)
    place.agents[0].exited("twice", 1, 0, KILLED, finished=False)
    while (await job.query(JobWorkflow.current_state)).generation < 2:  # noqa: ASYNC110 - there is no event
        await asyncio.sleep(0.05)
    pool = AgentClients()
    with structlog.testing.capture_logs() as logs:
        second = asyncio.create_task(Watcher(place.client, pool, place.queue).run())
        while not any(line["event"] == "reported" for line in logs):  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(0.05)
        second.cancel()
        await asyncio.gather(second, return_exceptions=True)
    await pool.close()

    state = await job.query(JobWorkflow.current_state)
    assert (state.incident_count, state.generation) == (1, 2)
    place.agents[0].answer(acknowledge=place.agents[0].acknowledge)
    while not place.agents[0].acknowledged:  # noqa: ASYNC110 - there is no event
        await asyncio.sleep(0.05)
    await job.signal(JobWorkflow.stop, {"operator": "test"})
    await job.result()


async def test_an_agent_that_refuses_is_asked_less_and_less_often_and_heard_when_it_is_back(place: Place) -> None:
    refused: list[float] = []

    def refuse(_: pb.ObserveRequest) -> AgentUnreachable:
        refused.append(time.monotonic())
        return AgentUnreachable("not now")

    place.agents[1].answer(observe=refuse)
    job = await place.start("refused", 2)
    while len(refused) < 7:  # noqa: ASYNC110 - there is no event
        await asyncio.sleep(0.05)

    waits = [after - before for before, after in pairwise(refused)]
    assert min(waits[4:]) > 3 * waits[0], f"the waits between tries were {waits}"
    place.agents[1].answer(observe=place.agents[1].observe)
    await place.until_watched(2)
    await job.signal(JobWorkflow.stop, {"operator": "test"})
    await job.result()
