"""An agent with and without the rights that its unit gives: what it can do, what it says, and what its ranks get."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agent.reporting.observations import finding_of
from agent.v1 import agent_pb2 as pb
from everstep.model.finding import Health
from everstep.system.capabilities import Capability, has
from everstep.system.procfs import PROC
from tests.agent.agents import Job, RunningAgent
from tests.capabilities import in_container, in_unit, needs_root
from tests.deploy.unit import AGENT, settings

pytestmark = [pytest.mark.asyncio, needs_root]

RIGHTS = """
from pathlib import Path
status = Path("/proc/self/status").read_text().splitlines()
print("effective", next(line.split()[1] for line in status if line.startswith("CapEff")), flush=True)
print("permitted", next(line.split()[1] for line in status if line.startswith("CapPrm")), flush=True)
print("oom", Path("/proc/self/oom_score_adj").read_text().strip(), flush=True)
"""


class AgentOfUnit(RunningAgent):
    """An agent with the rights that its unit gives."""

    def command(self) -> list[str]:
        rights = [name.removeprefix("CAP_").lower() for name in settings(AGENT)["AmbientCapabilities"]]
        return in_unit(super().command(), *rights)


class ProtectedAgent(RunningAgent):
    """An agent with the protection that its unit gives when memory is used up."""

    def command(self) -> list[str]:
        [adjustment] = settings(AGENT)["OOMScoreAdjust"]
        return ["choom", "-n", adjustment, "--", *super().command()]


class AgentOfContainer(RunningAgent):
    """An agent of a container's root, which has no capability."""

    def command(self) -> list[str]:
        return in_container(super().command())


async def checks_of(agent: RunningAgent, peer: str = "", address: str = "") -> dict[str, pb.SetupCheck]:
    reply = await agent.client.check_setup(pb.CheckSetupRequest(peer=peer, address=address))
    return {check.name: check for check in reply.checks}


async def output_of_rank(agent: RunningAgent) -> list[str]:
    job = Job(agent, RIGHTS, ranks=1)
    await job.prepare()
    await job.launch()
    await job.exits(1)
    return (await job.log(0)).decode().splitlines()


async def test_the_unit_gives_the_agent_its_rights_and_ranks_get_none_of_them(tmp_path: Path) -> None:
    agent = AgentOfUnit(tmp_path, alone=True)
    try:
        await agent.start()
        checks = await checks_of(agent)
        output = await output_of_rank(agent)
    finally:
        await agent.close()

    for name in ("kernel-log", "ptrace", "oom-group"):
        assert checks[name].verdict == Health.HEALTHY, checks[name]
    assert {"effective 0000000000000000", "permitted 0000000000000000"} <= set(output)


@pytest.mark.skipif(not has(Capability.SYS_RESOURCE), reason="root may not protect a process here (CAP_SYS_RESOURCE)")
async def test_the_agent_is_spared_when_memory_is_used_up_and_ranks_are_not(tmp_path: Path) -> None:
    agent = ProtectedAgent(tmp_path, alone=True)
    try:
        await agent.start()
        check = (await checks_of(agent))["oom-score"]
        output = await output_of_rank(agent)
    finally:
        await agent.close()

    assert (check.verdict, check.text) == (Health.HEALTHY, "oom_score_adj of the agent is -900")
    assert "oom 0" in output


@pytest.mark.skipif(
    (PROC / "sys/kernel/dmesg_restrict").read_text().strip() == "0", reason="everybody may read the kernel log here"
)
async def test_a_container_without_rights_is_unknown_and_says_once_what_to_add(tmp_path: Path) -> None:
    agent = AgentOfContainer(tmp_path, monitor="")
    try:
        await agent.start()
        checks = await checks_of(agent)
        inspected = await agent.client.inspect()
        while not all(state.looks for state in inspected.inspections):
            inspected = await agent.client.inspect()
    finally:
        await agent.close()

    lack = checks["kernel-log"]
    assert (lack.verdict, lack.text) == (Health.FAULTY, "/dev/kmsg cannot be read (Operation not permitted)")
    by_name = {state.name: state for state in inspected.inspections}
    [finding] = map(finding_of, by_name["kernel-log"].findings)
    assert (finding.verdict, finding.reason) == (Health.UNKNOWN, "cannot-inspect")
    assert finding.text == f"kernel-log: {lack.text}; {lack.remedy}"
    others = [
        finding_of(found) for state in inspected.inspections for found in state.findings if state.name != "kernel-log"
    ]
    assert not [found for found in others if found.reason == "cannot-inspect"], "no other inspection needs a right"


async def test_diagnostic_tests_of_a_container_without_rights_blame_nothing(tmp_path: Path) -> None:
    quick = {
        "memory": {"mb": 8},
        "disk": {"mb": 16},
        "loopback": {"seconds": 0.1},
        "gpu-copy": {},
        "dcgm": {},
        "eud": {},
    }
    asked = [pb.TestToRun(name=name, settings=json.dumps(given)) for name, given in quick.items()]
    agent = AgentOfContainer(tmp_path)
    try:
        await agent.start()
        replies = [reply async for reply in agent.client.diagnose(pb.DiagnoseRequest(tests=asked))]
    finally:
        await agent.close()

    results = [reply.result for reply in replies if reply.HasField("result")]
    assert [result.name for result in results] == list(quick)
    assert not [finding for result in results for finding in result.findings if finding.verdict == Health.FAULTY]
    assert not [finding for result in results[:3] for finding in result.findings], "these need no right"


async def test_an_agent_reaches_another_one_and_its_data_port(tmp_path: Path) -> None:
    one, other = (RunningAgent(tmp_path / name, machine=name) for name in ("m1", "m2"))
    try:
        await one.start()
        await other.start()
        reached = (await checks_of(one, "m2", other.address))["ports"]
        wrong = (await checks_of(one, "m3", other.address))["ports"]
        other.kill()
        gone = (await checks_of(one, "m2", other.address))["ports"]
    finally:
        await other.close()
        await one.close()

    assert reached.verdict == Health.HEALTHY
    assert (wrong.verdict, wrong.text) == (
        Health.UNKNOWN,
        f"it could not be checked: the agent at {other.address} has the name m2, not m3",
    )
    assert gone.verdict == Health.FAULTY
    assert gone.text.startswith("the agent at its address did not answer: ")
    assert gone.remedy == "on the machine: open all TCP ports from 1024 on between the machines of the cluster"
