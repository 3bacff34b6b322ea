"""A job is refused at its start if a machine reports that storage cannot be written, but not if that is unknown."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from agent.fake import FakeAgent
from agent.v1 import agent_pb2 as pb
from controlplane.start_checks.storage import check_storage, refusal
from everstep.errors import AgentUnreachable, ConfigError
from everstep.model.checkpoint_policy import CheckpointPolicy
from everstep.model.job import JobSpec
from tests.activities.spoken import reached


def agents_with(*problems: list[str] | None) -> list[FakeAgent]:
    """Return agents that report these problems; None: the agent does not answer."""
    answers = [AgentUnreachable("away") if one is None else pb.CheckStorageReply(problems=one) for one in problems]
    return [FakeAgent(check_storage=answer) for answer in answers]


async def check(agents: list[FakeAgent], spec: JobSpec) -> None:
    async with reached(agents) as (pool, machines):
        await check_storage(SimpleNamespace(agents=pool), spec, machines)  # type: ignore[arg-type]


def job(**policy: Any) -> JobSpec:
    return JobSpec(name="gpt", script="/gpt.py", machines=3, checkpoint=CheckpointPolicy(**policy))


async def test_a_refusal_names_the_problem_and_the_machine() -> None:
    agents = agents_with([], ["disk_path /mnt/x does not exist: make it, or mount it"], None)

    with pytest.raises(ConfigError, match=r"gpt is not started.*/mnt/x does not exist: make it.*\(reported by m1\)"):
        await check(agents, job(disk_path="/mnt/x"))
    assert agents[0].asked("check_storage")[0].disk_path == "/mnt/x"


async def test_a_machine_that_does_not_answer_is_no_reason_to_refuse() -> None:
    await check(agents_with(None, [], []), job(remote_url="s3://b"))


@pytest.mark.parametrize("policy", [{}, {"disk": False}])
async def test_without_storage_settings_no_machine_is_asked(policy: dict[str, Any]) -> None:
    agents = agents_with([], [], [])
    await check(agents, job(**policy))
    assert not any(agent.calls for agent in agents)


def test_a_problem_of_all_machines_is_named_once() -> None:
    said = refusal("gpt", {f"m{index}": ["no driver"] for index in range(1000)} | {"m7": ["no driver", "full"]})
    assert said.count("no driver") == 1
    assert "no driver (reported by all 1000 machines); full (reported by m7)" in said
