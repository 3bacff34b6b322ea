"""What cannot be written is refused before a job starts, and what is merely not known is not."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from agent.v1 import agent_pb2 as pb
from controlplane.start_checks.storage import check_storage, refusal
from everstep.errors import AgentUnreachable, ConfigError
from everstep.model.checkpoint_policy import CheckpointPolicy
from everstep.model.job import JobSpec
from everstep.model.machine import Machine

MACHINES = [Machine(name=f"m{index}", address=f"a{index}") for index in range(3)]


@dataclass
class FakeControl:
    """Machines whose agents answer with given problems; None: an agent that does not answer."""

    problems: dict[str, list[str] | None] = field(default_factory=dict)
    asked: list[pb.CheckStorageRequest] = field(default_factory=list)

    @property
    def agents(self) -> Any:
        return SimpleNamespace(get=lambda address: SimpleNamespace(check_storage=self._answer(address)))

    def _answer(self, address: str) -> Any:
        async def check_storage(request: pb.CheckStorageRequest, *, timeout_s: float) -> pb.CheckStorageReply:
            self.asked.append(request)
            found = self.problems.get(address, [])
            if found is None:
                raise AgentUnreachable("away")
            return pb.CheckStorageReply(problems=found)

        return check_storage


def job(**policy: Any) -> JobSpec:
    return JobSpec(name="gpt", script="/gpt.py", machines=3, checkpoint=CheckpointPolicy(**policy))


async def test_a_job_is_refused_with_what_and_where() -> None:
    control = FakeControl({"a1": ["disk_path /mnt/x does not exist: make it, or mount it"], "a2": None})

    with pytest.raises(ConfigError, match=r"gpt is not started.*/mnt/x does not exist: make it.*\(seen from m1\)"):
        await check_storage(control, job(disk_path="/mnt/x"), MACHINES)  # type: ignore[arg-type]
    assert control.asked[0].disk_path == "/mnt/x"


async def test_a_machine_that_does_not_answer_is_not_known_to_lack_anything() -> None:
    await check_storage(FakeControl({"a0": None}), job(remote_url="s3://b"), MACHINES)  # type: ignore[arg-type]


@pytest.mark.parametrize("policy", [{}, {"disk": False}])
async def test_nobody_is_asked_where_nothing_is_set(policy: dict[str, Any]) -> None:
    control = FakeControl()
    await check_storage(control, job(**policy), MACHINES)  # type: ignore[arg-type]
    assert not control.asked


def test_what_all_machines_say_is_said_once() -> None:
    said = refusal("gpt", {f"m{index}": ["no driver"] for index in range(1000)} | {"m7": ["no driver", "full"]})
    assert said.count("no driver") == 1
    assert "no driver (seen from all 1000 machines); full (seen from m7)" in said
