"""Agents on IPv6 addresses, and agents, data ports and stores on ports of a range."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from agent.checkpoints.peers.cards import Cards
from agent.checkpoints.peers.exchange import Exchange
from agent.security import ClientSecurity, Presented
from agent.server.endpoint import listening
from agent.v1 import agent_pb2 as pb
from everstep.base.addresses import Address, Ports, parse_address
from everstep.errors import AgentError, ConfigError
from everstep.system.listening import address_of, listen
from tests.agent.agents import HOST, RunningAgent, prepared, running_agent
from tests.agent.checkpoints.peers.machines import job_on, running_agents, state
from tests.agent.checkpoints.peers.test_machines import BACKUP, OWN, steps
from tests.hosts import IPV6

pytestmark = pytest.mark.asyncio(loop_scope="module")

TRAINS = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
print(os.environ["MASTER_ADDR"], int(total))
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def ipv6_agents(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[list[RunningAgent]]:
    async with running_agents(tmp_path_factory.mktemp("ipv6"), 2, "--prewarm", host="::1") as running:
        yield running


@IPV6
async def test_agents_on_ipv6_back_each_other_up_and_restore(ipv6_agents: list[RunningAgent], tmp_path: Path) -> None:
    assert all(agent.address.startswith("[::1]:") for agent in ipv6_agents)
    async with job_on(ipv6_agents, tmp_path) as job:
        await job.launch()
        for index in (0, 1):
            seen = await job.until(index, lambda rank: rank.saved.backup_step >= 3, "each machine backs up the other")
            assert seen.saved.backup_problem == ""
        await job.lose(1)
        first, _ = await job.stop(1)
        step = steps(first, BACKUP, 1)[-1]
        await job.prepare()
        source = pb.ShardSource(
            rank=1, completed_steps=step, tier=BACKUP, machine="m1", address=ipv6_agents[0].address, local_rank=3
        )
        reply = await ipv6_agents[1].client.restore(
            pb.RestoreRequest(request_id="restore", job=job.job, shards=[source]), timeout_s=30
        )
        assert [shard.ok for shard in reply.shards] == [True], reply.shards[0].reason
        assert job.payload(1, "checkpoint-1", step) == state(1, step)
        assert step in steps((await job.stop(1))[1], OWN, 1)


@IPV6
async def test_ranks_meet_at_a_store_on_ipv6(ipv6_agents: list[RunningAgent]) -> None:
    job = await prepared(ipv6_agents[0], TRAINS)
    store = await ipv6_agents[0].client.start_store(
        pb.StartStoreRequest(request_id="store", job=job.name, generation=1), timeout_s=30
    )
    assert store.host == "::1", "torch wants no brackets"
    launch = job.launch_request()
    launch.program.env.update(environment(store))
    await ipv6_agents[0].client.launch(launch, timeout_s=60)
    assert [one.rank_ended.exit.value for one in await job.exits(2)] == [0, 0], await job.log(0)
    assert await job.log(0, pb.ReadLogRequest.STDOUT) == b"::1 2\n"
    await job.release()


def environment(store: pb.StartStoreReply) -> dict[str, str]:
    """Return the variables with which two ranks meet at a store."""
    of_store = {"MASTER_ADDR": store.host, "MASTER_PORT": str(store.port)}
    return of_store | {"WORLD_SIZE": "2", "TORCHELASTIC_USE_AGENT_STORE": "True"}


def free_range(count: int) -> Ports:
    """Return a range of ports on which nothing listens."""
    first = 21_000
    while True:
        with contextlib.ExitStack() as opened, contextlib.suppress(OSError):
            for port in range(first, first + count):
                opened.enter_context(listen(HOST, Ports(port, port)))
            return Ports(first, first + count - 1)
        first += count


async def test_an_agent_and_its_data_port_take_free_ports_of_their_ranges(tmp_path: Path) -> None:
    ports = free_range(4)
    with listen(HOST, Ports(ports.first, ports.first)):
        agent = RunningAgent(tmp_path, "--data-port", str(ports))
        agent.address = f"{HOST}:{ports}"
        command = agent.command()
        assert command[command.index("--listen") + 1] == agent.address
        agent.address = f"{HOST}:{ports.first + 1}"
        agent.command = lambda: command  # type: ignore[method-assign]
        agent.client = type(agent.client)(agent.address, Presented(agent.security))
        try:
            await agent.start()
            assert agent.process
            open_ports = [
                one.laddr.port
                for one in psutil.Process(agent.process.pid).net_connections("tcp")
                if one.status == psutil.CONN_LISTEN
            ]
            assert sorted(open_ports) == [ports.first + 1, ports.first + 2]
        finally:
            await agent.close()


@contextlib.contextmanager
def taken(ports: Ports) -> Iterator[None]:
    with contextlib.ExitStack() as opened:
        for port in ports:
            opened.enter_context(socket.create_server((HOST, port)))
        yield


async def test_a_range_without_a_free_port_is_named_by_each_part(agent: RunningAgent) -> None:
    ports = free_range(2)
    told = f"all ports {ports} of {HOST} are taken"
    job = await prepared(agent, TRAINS)
    with taken(ports):
        with pytest.raises(ConfigError, match=f"the agent cannot listen on {HOST}:{ports}: {told}"):
            listening(f"{HOST}:{ports}")
        with pytest.raises(OSError, match=told):
            Exchange("m1", HOST, Cards(), ports, ClientSecurity())
        request = pb.StartStoreRequest(job=job.name, generation=1, first_port=ports.first, last_port=ports.last)
        with pytest.raises(AgentError, match=f"the rendezvous store cannot listen: {told}"):
            await agent.client.start_store(request, timeout_s=30)
    assert (await agent.client.start_store(request, timeout_s=30)).port == ports.first
    await job.release()


async def test_the_next_generation_gets_the_only_port_of_stores_again(agent: RunningAgent) -> None:
    ports = free_range(1)
    job = await prepared(agent, TRAINS)
    for generation in (1, 2, 3):
        store = await agent.client.start_store(
            pb.StartStoreRequest(job=job.name, generation=generation, first_port=ports.first, last_port=ports.last),
            timeout_s=30,
        )
        assert store.port == ports.first
        launch = job.launch_request(generation)
        launch.program.env.update(environment(store))
        await agent.client.launch(launch, timeout_s=60)
        ends = await job.exits(2 * generation)
        assert {one.rank_ended.exit.value for one in ends} == {0}, await job.log(0)
        await job.stop(generation)
    await job.release()


async def test_named_cards_are_published_in_their_order(tmp_path: Path) -> None:
    cards = ("127.0.0.91", "127.0.0.92")
    async with running_agent(tmp_path, "--data-cards", ", ".join(cards)) as agent:
        described = await agent.client.describe()
        assert (described.no_backups, list(described.cards_without_speed)) == ("", [])
        job = await prepared(agent, TRAINS)
        opened = await agent.client.open_exchange(pb.OpenExchangeRequest(job=job.name, machine="m2"))
        assert [address.host for address in opened.addresses] == list(cards)
        for address in opened.addresses:
            socket.create_connection((address.host, address.port), timeout=10).close()
        await job.release()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--data-cards", "ib7"), "'ib7' is no interface and no address of this machine"),
        (("--data-port", "7010-7000"), "'7010-7000' is not a range of ports"),
    ],
)
async def test_a_wrong_option_ends_the_agent_with_a_reason(tmp_path: Path, options: tuple[str, str], told: str) -> None:
    with pytest.raises(RuntimeError) as failure:
        async with running_agent(tmp_path, *options):
            pass
    assert told in " ".join(str(failure.value).replace("│", " ").split())


async def test_grpc_has_addresses_of_both_kinds() -> None:
    for text in (f"{HOST}:0", *(["[::1]:0"] if not IPV6.args[0] else [])):
        server, address = listening(text)
        await server.start()
        assert parse_address(str(address)) == Address(parse_address(text).host, address.port)
        socket.create_connection(address, timeout=10).close()
        await server.stop(0)
    with pytest.raises(
        ConfigError, match=r"the agent cannot listen on 192\.0\.2\.77:7070: 192\.0\.2\.77 cannot be used"
    ):
        listening("192.0.2.77:7070")
    with listen(HOST) as busy, pytest.raises(ConfigError, match=f"port .* of {HOST} is taken"):
        listening(str(address_of(busy)))
