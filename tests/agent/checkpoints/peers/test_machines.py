"""Real agents back up each other's ranks while one of the agents fails."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from agent.checkpoints.peers.cards import Cards
from agent.checkpoints.peers.exchange import Exchange
from agent.security import ClientSecurity, ServerSecurity
from agent.v1 import agent_pb2 as pb
from everstep.base.addresses import ANY_PORT, parse_address
from everstep.errors import AgentError, UnknownJob
from tests.agent.agents import RunningAgent, running_agent
from tests.agent.checkpoints.peers.machines import job_on, running_agents, state
from tests.everstep.slots.saved import payload_at

OWN, BACKUP = pb.HeldCheckpoint.OWN, pb.HeldCheckpoint.BACKUP


def steps(reply: pb.StopReply | pb.CheckpointsReply, tier: int, rank: int) -> list[int]:
    """Return the valid steps that a machine reports for a tier and a rank."""
    return sorted(
        one.completed_steps for one in reply.checkpoints if one.valid and (one.tier, one.rank) == (tier, rank)
    )


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def agents(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[list[RunningAgent]]:
    async with running_agents(tmp_path_factory.mktemp("agents"), 3, "--prewarm") as running:
        yield running


async def test_a_machine_that_was_lost_is_restored_from_its_peer(agents: list[RunningAgent], tmp_path: Path) -> None:
    async with job_on(agents[:2], tmp_path) as job:
        await job.launch()
        for index in (0, 1):
            seen = await job.until(index, lambda rank: rank.saved.backup_step >= 5, "each machine backs up the other")
            assert seen.saved.own_step >= seen.saved.backup_step
            assert seen.saved.backup_problem == ""
        await job.lose(1)
        first, second = await job.stop(1)
        assert (first.unknown, second.unknown) == (False, True)
        assert steps(second, OWN, 1) == []
        common = [step for step in steps(first, BACKUP, 1) if step in steps(first, OWN, 0)]
        assert common, f"own {steps(first, OWN, 0)}, backup {steps(first, BACKUP, 1)}"
        step = common[-1]
        assert job.payload(0, "backup-1", step) == state(1, step)
        await job.prepare()
        restore = pb.RestoreRequest(
            request_id="restore",
            job=job.job,
            shards=[
                pb.ShardSource(rank=1, completed_steps=step, tier=BACKUP, machine="m1", address=job.agents[0].address)
            ],
            checkpoint=pb.CheckpointOptions(slots=3),
        )
        reply = await job.agents[1].client.restore(restore, timeout_s=60)
        assert reply.shards[0].ok, reply.shards[0].reason
        assert reply.shards[0].bytes > len(state(1, step))
        restore.request_id = "again"
        assert (await job.agents[1].client.restore(restore, timeout_s=60)).shards[0].bytes == 0, (
            "the step is restored already, so nothing is copied"
        )
        await job.launch(2, step)
        for index in (0, 1):
            seen = await job.until(
                index, lambda rank: rank.saved.backup_step > step + 2, "both ranks are backed up again"
            )
            assert seen.alive
        one, two = await job.stop(2)
        for answer, own, other in ((one, 0, 1), (two, 1, 0)):
            assert max(steps(answer, OWN, own)) > step + 2
            assert max(steps(answer, BACKUP, other)) > step + 2
            newest = max(steps(answer, BACKUP, other))
            assert job.payload(own, f"backup-{other}", newest) == state(other, newest)


async def test_a_peer_that_hangs_is_named_and_training_does_not_notice(
    agents: list[RunningAgent], tmp_path: Path
) -> None:
    async with job_on(agents[:2], tmp_path) as job:
        await job.launch(pause=0.02)
        await job.until(0, lambda rank: rank.saved.backup_step >= 3, "backups succeed")
        peer = job.agents[1].process
        assert peer
        peer.send_signal(signal.SIGSTOP)
        hung = await job.until(0, lambda rank: "no backup to m2" in rank.saved.backup_problem, "the peer is named")
        assert hung.completed_steps > hung.saved.backup_step + 20, "the rank continued to step meanwhile"
        assert hung.saved.own_step >= hung.completed_steps - 2
        peer.send_signal(signal.SIGCONT)
        later = await job.until(
            0,
            lambda rank: rank.saved.backup_step > hung.completed_steps and not rank.saved.backup_problem,
            "backups succeed again",
        )
        assert later.alive


async def test_a_peer_that_dies_and_comes_back_gets_the_newest(agents: list[RunningAgent], tmp_path: Path) -> None:
    async with job_on(agents[:2], tmp_path) as job:
        await job.launch(pause=0.02)
        await job.until(0, lambda rank: rank.saved.backup_step >= 3, "backups succeed")
        job.agents[1].kill()
        died = await job.until(0, lambda rank: "no backup to m2" in rank.saved.backup_problem, "the peer is named")
        await job.agents[1].start()
        await job.until(
            0,
            lambda rank: rank.saved.backup_step > died.completed_steps and not rank.saved.backup_problem,
            "backups succeed again",
        )


async def test_an_agent_that_is_restarted_goes_on_by_itself(agents: list[RunningAgent], tmp_path: Path) -> None:
    async with job_on(agents[:2], tmp_path) as job:
        await job.launch(pause=0.02)
        for index in (0, 1):
            await job.until(index, lambda rank: rank.saved.backup_step >= 3, "backups succeed")
        before = await job.until(0, lambda rank: True, "progress")
        job.agents[0].kill()
        await asyncio.sleep(0.3)
        await job.agents[0].start()
        for index in (0, 1):
            await job.until(
                index,
                lambda rank: rank.saved.backup_step > before.completed_steps + 10 and not rank.saved.backup_problem,
                "the restarted agent sends and receives backups again",
            )


async def test_what_stop_answered_stays_true(agents: list[RunningAgent], tmp_path: Path) -> None:
    async with job_on(agents[:2], tmp_path) as job:
        job.in_step = False
        await job.launch(pause=0.02)
        for index in (0, 1):
            await job.until(index, lambda rank: rank.saved.backup_step >= 3, "backups succeed")
        (answer,) = await job.stop(1, 1)
        await job.until(
            0,
            lambda rank: "generation 1 was stopped" in rank.saved.backup_problem,
            "the stopped machine refuses backups of m1",
        )
        held = await job.agents[1].client.checkpoints(pb.CheckpointsRequest(job=job.job, verify=True))
        assert steps(held, BACKUP, 0) == steps(answer, BACKUP, 0)
        assert steps(held, OWN, 1) == steps(answer, OWN, 1)
        await job.stop(1, 0)


async def test_a_placement_that_changed_and_a_step_back(agents: list[RunningAgent], tmp_path: Path) -> None:
    async with job_on(agents, tmp_path) as job:
        await job.launch(pause=0.02)
        for index in (0, 1, 2):
            await job.until(index, lambda rank: rank.saved.backup_step >= 12, "backups succeed")
        replies = await job.stop(1)
        step = max(set(steps(replies[0], OWN, 0)) & set(steps(replies[1], OWN, 1)) & set(steps(replies[2], OWN, 2)))
        job.script.with_name(f"{job.script.name}.hold").touch()
        await job.launch(2, step, peers=[2, 0, 1])
        for index in (0, 1, 2):
            await job.until(
                index,
                lambda rank: rank.saved.backup_step == step,
                "the step at which the generation began is backed up first",
            )
            assert max(rank.completed_steps for rank in await held(job.agents[index].client, job.job)) == step
        job.script.with_name(f"{job.script.name}.hold").unlink()
        for index in (0, 1, 2):
            await job.until(index, lambda rank: rank.saved.backup_step > step + 8, "the new peers have newer backups")
        stale = [job.shm(1) / "backup-0", job.shm(2) / "backup-1", job.shm(0) / "backup-2"]
        async with asyncio.timeout(20):
            while any(path.exists() for path in stale):  # noqa: ASYNC110 - there is no event
                await asyncio.sleep(0.05)


async def held(client: object, job: str) -> list[pb.HeldCheckpoint]:
    reply = await client.checkpoints(pb.CheckpointsRequest(job=job))  # type: ignore[attr-defined]
    return [one for one in reply.checkpoints if one.valid]


async def test_damage_and_absence_are_told_apart_from_silence(agents: list[RunningAgent], tmp_path: Path) -> None:
    async with job_on(agents[:2], tmp_path) as job:
        await job.launch(pause=0.02)
        await job.until(1, lambda rank: rank.saved.backup_step >= 3, "backups succeed")
        first, second = await job.stop(1)
        newest = max(steps(first, BACKUP, 1))
        path = job.shm(0) / "backup-1"
        data = bytearray(path.read_bytes())
        for step in steps(first, BACKUP, 1):  # damage only the contents: a slot with a damaged header is not held
            data[payload_at(path, step) + 4096] ^= 1
        path.write_bytes(data)
        (job.shm(1) / "checkpoint-1").unlink()

        async def restore(name: str, **source: object) -> pb.ShardRestored:
            given = {"rank": 1, "completed_steps": newest, "tier": BACKUP, "machine": "m1"} | source
            request = pb.RestoreRequest(
                request_id=name,
                job=job.job,
                shards=[pb.ShardSource(**given)],  # type: ignore[arg-type]
                checkpoint=pb.CheckpointOptions(slots=3),
            )
            return (await job.agents[1].client.restore(request, timeout_s=60)).shards[0]

        bad = await restore("bad", address=job.agents[0].address)
        assert (bad.ok, bad.damaged) == (False, True)
        assert "does not match its checksum" in bad.reason
        gone = await restore("gone", address=job.agents[0].address, completed_steps=100_000)
        assert (gone.ok, gone.damaged) == (False, True)
        silent = await restore("silent", address="127.0.0.21:1")
        assert (silent.ok, silent.damaged) == (False, False)
        assert "cannot be fetched" in silent.reason
        absent = await restore("absent", tier=OWN)
        assert (absent.ok, absent.damaged) == (False, True)
        assert steps(await job.agents[1].client.checkpoints(pb.CheckpointsRequest(job=job.job)), OWN, 1) == []
        assert steps(second, OWN, 1)


async def test_an_agent_that_waits_for_another_ends_when_told(agents: list[RunningAgent], tmp_path: Path) -> None:
    async with job_on(agents[:2], tmp_path) as job:
        assert job.agents[0].process
        job.agents[0].process.send_signal(signal.SIGSTOP)
        shards = [pb.ShardSource(rank=1, completed_steps=1, tier=BACKUP, address=job.agents[0].address)]
        request = pb.RestoreRequest(request_id="r", job=job.job, shards=shards)
        waiting = asyncio.create_task(job.agents[1].client.restore(request, timeout_s=60))
        await asyncio.sleep(0.5)
        await asyncio.to_thread(job.agents[1].kill, signal.SIGTERM)
        with pytest.raises(AgentError):
            await waiting


async def test_nothing_is_restored_under_a_rank_that_lives(agents: list[RunningAgent], tmp_path: Path) -> None:
    async with job_on(agents[:2], tmp_path) as job:
        await job.launch(pause=0.02)
        shards = [pb.ShardSource(rank=0, completed_steps=1, tier=BACKUP)]
        with pytest.raises(AgentError, match="rank 0 still lives"):
            await job.agents[0].client.restore(pb.RestoreRequest(request_id="r", job=job.job, shards=shards))


async def test_agents_with_tls_and_a_token_reach_each_other(tmp_path: Path, keys: Path) -> None:
    security = ClientSecurity(ca_file=keys / "cert.pem", token_file=keys / "token")
    options = ("--tls-cert", keys / "cert.pem", "--tls-key", keys / "key.pem", "--token-file", keys / "token")
    given = [*map(str, options), "--ca-file", str(keys / "cert.pem")]
    async with running_agent(tmp_path, *given, security=security) as agent:
        # Both ends of this call are agents. The client is the exchange's own, with the token that the agent was given.
        shown = ServerSecurity(token_file=keys / "token").as_client(keys / "cert.pem")
        exchange = Exchange("m2", "127.0.0.1", Cards(), ANY_PORT, shown)
        try:
            with pytest.raises(UnknownJob, match="is not prepared"):
                await asyncio.to_thread(exchange.connect, agent.address, "gpt", 0)
            await agent.client.stop(pb.StopRequest(request_id="s", job="gpt", generation=1))
            wire = await asyncio.to_thread(exchange.connect, agent.address, "gpt", 0)
            wire.send({"op": "get", "rank": 0, "step": 1, "file": "own", "offset": 0, "length": -1})
            assert "gone" in wire.receive()
            wire.close()
        finally:
            await exchange.close()
        stranger = Exchange("m3", "127.0.0.1", Cards(), ANY_PORT, ClientSecurity(ca_file=keys / "cert.pem"))
        with pytest.raises(AgentError, match="no valid token"):
            await asyncio.to_thread(stranger.connect, agent.address, "gpt", 0)
        await stranger.close()


async def test_a_machine_says_what_room_it_has(agents: list[RunningAgent]) -> None:
    room = (await agents[0].client.describe()).room
    assert room.shm_free > 0
    assert room.memory_available > 0
    assert room.disk_free > 0


async def test_aligned_machines_back_up_what_is_named_and_keep_it_until_all_have_the_next(
    agents: list[RunningAgent], tmp_path: Path
) -> None:
    async with job_on(agents[:2], tmp_path) as job:
        job.options |= {"slots": 5}
        await job.launch(pause=0.02)

        async def align(named: int, *, whole: int = 0, settled: int = 0, generation: int = 1) -> None:
            for agent in job.agents:
                await agent.client.align_backups(
                    pb.AlignBackupsRequest(
                        job=job.job, generation=generation, whole=whole, settled=settled, named=named
                    )
                )

        async def coming() -> int:
            return (
                await job.until(0, lambda rank: rank.saved.backup_step > 0, "a step is backed up")
            ).saved.own_step + 25

        async def has(step: int) -> None:
            for index in (0, 1):
                seen = await job.until(
                    index,
                    lambda rank: rank.saved.own_step > step + 3 and rank.saved.backup_step >= step,
                    "the named step is backed up",
                )
                assert (seen.saved.backup_step, seen.saved.backup_named) == (step, step), (
                    "only the named step is backed up, and no later step"
                )

        await align(1_000_000, generation=2)  # a request for another generation is ignored
        await align(await coming())
        await align(10_000)
        await align(0, settled=10_000)
        await job.until(
            0,
            lambda rank: rank.saved.backup_step >= rank.saved.own_step - 1,
            "the rank is backed up without named steps again",
        )
        first = await coming()
        await align(first)
        await has(first)
        await align(first + 10, settled=first - 1)
        await has(first)
        second = await coming()
        await align(second, whole=first, settled=first)
        await align(first + 20, settled=first - 1)  # this request is late
        await has(second)
        for index in (0, 1):
            job.agents[index].kill()
            await job.agents[index].start()
        await has(second)

        third = await coming()
        await align(third, settled=second)  # another machine passed the second step, so this step is never complete
        await has(third)
        replies = await job.stop(1)
        for index, reply in enumerate(replies):
            own, backup = steps(reply, OWN, index), steps(reply, BACKUP, 1 - index)
            assert {first, third} <= set(own), "the last complete step and the step that may be the next one are kept"
            assert backup == [first, third]


async def test_backups_go_on_while_hundreds_of_strangers_hold_connections(
    agents: list[RunningAgent], tmp_path: Path
) -> None:
    async with job_on(agents[:2], tmp_path) as job, asyncio.TaskGroup() as group:
        process = agents[1].process
        assert process
        [port] = data_ports(process.pid, agents[1].address)
        strangers = [group.create_task(stranger(parse_address(agents[1].address).host, port)) for _ in range(320)]
        await asyncio.sleep(0.5)
        await job.launch(pause=0.02)
        seen = await job.until(0, lambda rank: rank.saved.backup_step >= 30, "backups succeed")
        assert seen.saved.backup_problem == ""
        for one in strangers:
            one.cancel()


def data_ports(pid: int, address: str) -> list[int]:
    """Return the ports on which an agent listens, except the port for gRPC."""
    listening = {one.laddr.port for one in psutil.Process(pid).net_connections("tcp") if one.status == "LISTEN"}
    return sorted(listening - {parse_address(address).port})


async def stranger(host: str, port: int) -> None:
    """Connect and send nothing, and connect again after the connection was closed."""
    while True:
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                await reader.read(-1)
            finally:
                writer.close()
        await asyncio.sleep(0.5)
