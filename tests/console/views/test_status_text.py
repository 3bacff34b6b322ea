"""The status of a job for a person shows nothing that belongs to another run or is no longer true."""

from __future__ import annotations

from datetime import datetime, timezone
from types import SimpleNamespace
from typing import Any

import pytest

from agent.fake import FakeAgent
from agent.v1 import agent_pb2 as pb
from console.views.status_text import job_facts, machine_rows
from controlplane.queries.status import JobReport, MachineStatus, RankStatus, remaining_checkpoint
from controlplane.queries.time_lost import TimeLost
from everstep.errors import AgentUnreachable
from everstep.model.checkpoint_policy import CheckpointPolicy
from everstep.model.job import JobSpec
from everstep.model.job_state import JobState
from everstep.model.machine import Machine
from everstep.model.stage import NOT_CONFIRMED
from tests.activities.spoken import reached

DISK = pb.HeldCheckpoint.DISK
NOW = datetime(2026, 1, 1, tzinfo=timezone.utc)  # noqa: UP017 - as the client gives it
MACHINES = [Machine(name=f"m{index}", address=f"a{index}") for index in range(2)]


def report(**changes: Any) -> JobReport:
    given: dict[str, Any] = {
        "name": "gpt",
        "status": "finished",
        "outcome": "",
        "unconfirmed": "",
        "launched": True,
        "started": NOW,
        "ended": NOW,
        "script": "gpt.py",
        "args": [],
        "world_size": 2,
        "tp": 1,
        "pp": 1,
        "dp": 2,
        "generation": 1,
        "step": 20,
        "loss": 2.5,
        "ettr": 0.8,
        "ettr_last_hour": None,
        "machines": [],
        "silent": [],
        "backups": "",
        "saved": None,
        "kept": "",
        "incident_count": 0,
        "open_incident": None,
        "incidents": [],
        "rejected": [],
        "link": "",
    }
    return JobReport(**(given | changes))


@pytest.mark.parametrize(
    ("ratio", "unknown", "said"),
    [
        (0.8, [], "80.0 %"),
        (0.8, ["how many steps were done again"], "at most 80.0 % (not known: how many steps were done again)"),
        (None, ["no step of the job was seen"], "unknown (not known: no step of the job was seen)"),
    ],
)
def test_an_ettr_that_may_be_lower_is_marked(ratio: float | None, unknown: list[str], said: str) -> None:
    assert dict(job_facts(report(ettr=ratio, ettr_unknown=unknown)))["ETTR"] == said


def test_causes_of_lost_time_are_in_the_order_of_an_incident() -> None:
    lost = TimeLost(since_start={"restart": 8.1, "detect": 0.4, "start": 62.0, "parked": 0.001, "unknown": 5.0})
    known = dict(job_facts(report(time_lost=lost)))
    assert known["lost"] == "start 1 min 2 s, detect 0.40 s, restart 8.10 s, unknown 5.00 s"
    hour = lost.model_copy(update={"last_hour": {"restart": 0.0}})
    assert dict(job_facts(report(time_lost=hour)))["lost"].endswith("unknown 5.00 s; in the last hour: nothing")
    assert "lost" not in dict(job_facts(report()))


def test_a_job_that_was_not_seen_to_step_is_shown_as_not_confirmed() -> None:
    known = dict(job_facts(report(status=NOT_CONFIRMED, unconfirmed="all 2 ranks live for 10 s; no step was shown")))

    assert known["status"] == "running, not confirmed: all 2 ranks live for 10 s; no step was shown"


def test_a_job_that_was_never_launched_has_no_steps() -> None:
    known = dict(
        job_facts(report(launched=False, step=None, ettr=None, status="failed", outcome="was not started: no"))
    )
    assert known["status"] == "failed: was not started: no"
    assert {"step", "ETTR", "kept", "backups"}.isdisjoint(known)


def test_the_remaining_checkpoint_of_an_ended_job_is_shown() -> None:
    assert dict(job_facts(report(kept="step 20 on disk")))["kept"] == "step 20 on disk"


def test_machines_of_an_ended_job_are_shown_only_if_ranks_remain() -> None:
    left = RankStatus(rank=0, pid=7, alive=True, finished=False, completed_steps=3, loss=None)
    machines = [
        MachineStatus(name="m0", address="a0", answers=True, ranks=[left]),
        MachineStatus(name="m1", address="a1", answers=True, ranks=[]),
    ]
    assert [name for name, _ in machine_rows(machines, ended=True)] == ["m0"]
    assert [name for name, _ in machine_rows(machines)] == ["m0", "m1"]


def test_the_reason_why_a_machine_does_not_answer_is_shown() -> None:
    why = "the agent at 10.0.4.17:7070 did not answer: Its certificate has expired"
    machine = MachineStatus(name="m0", address="10.0.4.17:7070", answers=False, ranks=[], problem=why)
    assert machine_rows([machine]) == [("m0", why)]


def test_generations_of_earlier_runs_do_not_count_as_launched() -> None:
    state = JobState(
        spec=JobSpec(name="gpt", script="/gpt.py"), machines=[], generation=3
    )  # all generations are of earlier runs
    assert not state.launched
    assert state.model_copy(update={"lineage": [(4, -1)]}).launched


@pytest.mark.parametrize(
    ("steps", "url", "said"),
    [
        ([[10, 20], [10]], "", "step 10 on disk; its memory was freed (everstep checkpoints gpt)"),
        ([[10], [10]], "s3://b", "step 10 on disk, and any copies at s3://b; its memory"),
        ([[10], []], "", "no common step on disk; its memory"),
        ([[10], None], "", "no common step on disk, but not every disk could be listed; its memory"),
    ],
)
async def test_the_remaining_checkpoint_is_looked_up(steps: list[list[int] | None], url: str, said: str) -> None:
    def on_disk(rank: int, steps: list[int] | None) -> Exception | pb.CheckpointsReply:
        copies = [
            pb.HeldCheckpoint(rank=rank, completed_steps=step, valid=True, place=f"/{step}/{rank}", tier=DISK)
            for step in steps or []
        ]
        return AgentUnreachable("away") if steps is None else pb.CheckpointsReply(checkpoints=copies)

    agents = [FakeAgent(checkpoints=on_disk(rank, known)) for rank, known in enumerate(steps)]
    spec = JobSpec(name="gpt", script="/gpt.py", machines=2, checkpoint=CheckpointPolicy(remote_url=url))
    async with reached(agents) as (pool, machines):
        control: Any = SimpleNamespace(agents=pool, option="")
        assert (await remaining_checkpoint(control, JobState(spec=spec, machines=machines))).startswith(said)
    for [asked] in (agent.asked("checkpoints") for agent in agents):
        assert not asked.remote_url, "remote storage is not listed, since that takes too long"
