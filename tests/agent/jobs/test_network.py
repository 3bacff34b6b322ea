"""Ranks communicate through the network interface on which their agent listens."""

from __future__ import annotations

import socket

import psutil
import pytest

from agent.jobs.host import interface_of, socket_environment
from agent.monitor.network.used import uses_interface
from tests.agent.agents import Job, RunningAgent

PRINT = "import os; print(os.environ['GLOO_SOCKET_IFNAME'], os.environ['NCCL_SOCKET_IFNAME'])"


@pytest.mark.parametrize(
    ("host", "name"), [("127.0.0.21", "lo"), ("localhost", "lo"), ("::1", "lo"), ("192.0.2.1", "")]
)
def test_an_address_belongs_to_one_interface_or_to_none(host: str, name: str) -> None:
    assert interface_of(host) == name


def test_each_address_of_this_machine_is_found() -> None:
    found = {
        one.address.partition("%")[0]: name
        for name, addresses in psutil.net_if_addrs().items()
        for one in addresses
        if one.family in {socket.AF_INET, socket.AF_INET6}
    }
    assert {address: interface_of(address) for address in found} == found


def test_an_unknown_host_has_no_interface() -> None:
    assert socket_environment("no-such-host.invalid") == {}


def test_no_other_interface_whose_name_begins_alike_is_named() -> None:
    variables = socket_environment("127.0.0.21")

    assert variables == {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}, "gloo has no syntax with ="
    assert uses_interface("lo", [variables])
    assert not uses_interface("lo1", [variables])


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(("own", "shown"), [({}, b"lo =lo"), ({"GLOO_SOCKET_IFNAME": "ib0"}, b"ib0 =lo")])
async def test_ranks_get_the_interface_unless_their_job_sets_another_one(
    agent: RunningAgent, own: dict[str, str], shown: bytes
) -> None:
    job = Job(agent, PRINT, ranks=1)
    await job.prepare()
    request = job.launch_request()
    request.program.env.update(own)
    await agent.client.launch(request, timeout_s=60)
    await job.exits(1)

    assert shown in await job.log(0)
