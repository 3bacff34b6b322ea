"""A user is warned, before a job starts, of backups that there are not, and of backups without a limit."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import cast

import pytest

from agent.client import AgentClients
from agent.fake import FakeAgent
from agent.v1 import agent_pb2 as pb
from controlplane.client import Control
from controlplane.start_checks.backups import backup_warnings
from everstep.model.checkpoint_policy import CheckpointPolicy
from everstep.model.job import JobSpec
from everstep.model.machine import Machine

NO_CARD = "no card is named for backups"


async def warned(
    *replies: pb.DescribeReply, silent: int = 0, checkpoint: Mapping[str, object] | None = None
) -> list[str]:
    agents = [FakeAgent(f"m{number}", describe=reply) for number, reply in enumerate(replies)]
    pool = AgentClients()
    for agent in agents:
        await agent.start()
    try:
        machines = [Machine(name=agent.machine, address=agent.address) for agent in agents]
        machines += [Machine(name=f"s{number}", address="127.0.0.1:1") for number in range(silent)]
        policy = CheckpointPolicy.model_validate(checkpoint or {})
        spec = JobSpec(name="gpt", script="/job.py", machines=len(machines), checkpoint=policy)
        return await backup_warnings(cast(Control, SimpleNamespace(agents=pool)), spec, machines)
    finally:
        await pool.close()
        for agent in agents:
            await agent.stop()


async def test_machines_without_a_card_for_backups_are_named_once() -> None:
    off, fine = pb.DescribeReply(no_backups=NO_CARD), pb.DescribeReply()
    assert await warned(off, fine, off) == [f"there are no backups of the ranks of m0, m2: {NO_CARD}"]
    assert await warned(fine, fine) == []
    assert await warned(off, off, checkpoint={"backup": False}) == []
    assert await warned(off) == [], "a job on one machine has no backups"
    assert await warned(fine, silent=1) == [], "a silent machine is reported by the launch"


@pytest.mark.parametrize(
    ("setting", "count"), [({}, 1), ({"backup_rate_mb_s": 500.0}, 0), ({"backup_card_share": 0.0}, 0)]
)
async def test_an_unknown_speed_is_told_unless_another_limit_is_set(setting: dict[str, float], count: int) -> None:
    unknown = pb.DescribeReply(cards_without_speed=["eth0", "eth1"])
    found = await warned(unknown, unknown, checkpoint=setting)
    assert len(found) == count
    for text in found:
        assert "the speed of eth0, eth1 of m0, m1 is not known" in text
