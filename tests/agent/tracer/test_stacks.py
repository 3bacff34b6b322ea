"""Samples of an agent with real ranks: which processes there are, what each does, its collectives, whole stacks."""

from __future__ import annotations

import asyncio
import gzip
import os
import signal
from typing import Any

import pytest

from agent.tracer.signatures import reduced, samples_of
from agent.tracer.tracer import KEPT
from agent.v1 import agent_pb2 as pb
from everstep.decisions.blame.hang.stacks import LeafKind
from everstep.dumps.flight_records import flight_record, parse_record
from everstep.dumps.py_spy import StackReader
from everstep.errors import AgentError
from everstep.system.procfs import process_of
from tests.agent.agents import Job, RunningAgent, prepared

pytestmark = pytest.mark.asyncio(loop_scope="module")

HANGS = """
import os, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        return self.read_remote_shard()
    def read_remote_shard(self):
        time.sleep(600)
for _ in range(3):
    dist.all_reduce(torch.ones(8))
if rank == 1:
    loader = torch.utils.data.DataLoader(Slow(), num_workers=1)
    next(iter(loader))
dist.all_reduce(torch.ones(8))
"""


async def hanging(agent: RunningAgent) -> Job:
    job = await prepared(agent, HANGS)
    store = await agent.client.start_store(pb.StartStoreRequest(job=job.name, generation=1))
    request = job.launch_request()
    request.program.env.update({"WORLD_SIZE": "2", "MASTER_ADDR": store.host, "MASTER_PORT": str(store.port)})
    request.program.env["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    await agent.client.launch(request, timeout_s=60)
    return job


async def whole(job: Job, **options: Any) -> pb.StacksReply:
    """Take a sample, and return its whole stacks and records."""
    sample = await job.agent.client.sample(pb.SampleRequest(job=job.name, **options))
    return await job.agent.client.stacks(pb.StacksRequest(job=job.name, time_ns=sample.time_ns))


async def looked(job: Job, ready: Any) -> pb.StacksReply:
    """Return a whole sample once the job hangs."""
    async with asyncio.timeout(60):
        while True:
            reply = await whole(job)
            if ready(reply):
                return reply
            await asyncio.sleep(0.1)


def has_loader(reply: pb.StacksReply) -> bool:
    return any(b"read_remote_shard" in gzip.decompress(one.stacks) for one in reply.processes if one.stacks)


def leaf_of(one: pb.TracedProcess) -> str:
    (found,) = StackReader().read("it", gzip.decompress(one.stacks))
    signature = found.signature()
    assert signature
    return f"{signature.leaf}"


async def test_who_waits_and_who_is_waited_for(agent: RunningAgent) -> None:
    job = await hanging(agent)
    await looked(job, has_loader)  # system calls are read before stacks, so the loader may not sleep yet here
    reply = await looked(job, has_loader)

    trainers = {one.rank: one for one in reply.processes if one.role == "trainer"}
    (loader,) = [one for one in reply.processes if one.role == "data loader"]
    assert (reply.machine, reply.generation, sorted(trainers), loader.rank) == ("m1", 1, [0, 1], 1)
    assert loader.parent == trainers[1].pid
    assert f"all_reduce ({LeafKind.COLLECTIVE})" in leaf_of(trainers[0])
    assert f"({LeafKind.DATA})" in leaf_of(trainers[1])
    assert all(one.cpu_s > 0 and one.state in {"S", "R"} for one in trainers.values())
    assert (trainers[0].blocked_in, loader.blocked_in) == ("", "sleep"), (
        "rank 0 waits in gloo for a lock of its own process"
    )

    again = {one.pid: one for one in (await looked(job, has_loader)).processes}
    assert all(again[one.pid].switches - one.switches < 20 for one in reply.processes), (
        "all processes wait, and only gloo's loop runs"
    )

    records = {one.rank: one for one in reply.records}
    assert [records[rank].problem for rank in (0, 1)] == ["", ""]
    entered = {
        rank: max(flight_record(parse_record("it", gzip.decompress(one.record))).record.last.values())
        for rank, one in records.items()
    }
    assert entered[0] == entered[1] + 1
    await job.stop()


async def test_a_stopped_rank_is_told_and_stays_so(agent: RunningAgent) -> None:
    job = await hanging(agent)
    pid = next(one.pid for one in (await looked(job, has_loader)).processes if one.rank == 0)
    os.kill(pid, signal.SIGSTOP)
    # A look that begins before the process shows its stop, and ends after it, continues the process. See let_go.
    async with asyncio.timeout(30):
        while (found := process_of(pid)) is None or found.state != "T":  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(0.01)

    reply = await whole(job)

    stopped = reply.processes[0]
    assert stopped.state == "T"
    assert (stopped.pid, leaf_of(stopped)) == (pid, f"all_reduce ({LeafKind.COLLECTIVE})")
    record = next(one for one in reply.records if one.rank == 0)
    assert record.problem and not record.record
    now = process_of(pid)
    assert now and now.state == "T"
    await job.stop()


async def test_two_looks_do_not_see_each_other(agent: RunningAgent) -> None:
    job = await hanging(agent)
    await looked(job, has_loader)

    replies = await asyncio.gather(*(whole(job) for _ in range(3)))

    assert [{one.state for one in reply.processes} & {"T", "t"} for reply in replies] == [set()] * 3
    assert [sum(1 for one in reply.processes if one.stacks) for reply in replies] == [3] * 3
    await job.stop()


async def test_of_ranks_alone_there_are_no_helpers_and_no_records(agent: RunningAgent) -> None:
    job = await hanging(agent)
    every = await looked(job, has_loader)

    reply = await whole(job, ranks_only=True)

    assert {one.role for one in every.processes} > {one.role for one in reply.processes} == {"trainer"}
    assert [one.rank for one in reply.processes] == [0, 1] and all(one.stacks for one in reply.processes)
    assert len(every.records) == 2 and list(reply.records) == []
    await job.stop()


async def test_nothing_runs_any_more(agent: RunningAgent) -> None:
    job = await prepared(agent, "print()")
    reply = await agent.client.sample(pb.SampleRequest(job=job.name))
    assert (list(reply.ranks), list(reply.stacks)) == ([], [])


async def test_the_signatures_of_a_sample_are_those_of_its_whole_stacks(agent: RunningAgent) -> None:
    job = await hanging(agent)
    await looked(job, has_loader)

    sample = await agent.client.sample(pb.SampleRequest(job=job.name))
    of_one = await agent.client.stacks(pb.StacksRequest(job=job.name, time_ns=sample.time_ns, ranks=[1]))
    every = await agent.client.stacks(pb.StacksRequest(job=job.name, time_ns=sample.time_ns))

    assert {process.rank for process in of_one.processes} == {record.rank for record in of_one.records} == {1}
    assert reduced(every) == sample
    ranks = samples_of(sample).ranks
    assert [f"{ranks[rank].trainer}".endswith("(collective)") for rank in (0, 1)] == [True, False]
    [pending] = ranks[0].record.pending if ranks[0].record else ()
    assert (pending.operation, ranks[1].record and ranks[1].record.pending) == ("all_reduce", ())
    await job.stop()


async def test_only_the_newest_samples_are_kept_whole(agent: RunningAgent) -> None:
    job = await prepared(agent, "print()")
    first = await agent.client.sample(pb.SampleRequest(job=job.name))
    request = pb.StacksRequest(job=job.name, time_ns=first.time_ns)
    assert (await agent.client.stacks(request)).time_ns == first.time_ns
    for _ in range(KEPT):
        await agent.client.sample(pb.SampleRequest(job=job.name))

    with pytest.raises(AgentError, match="does not keep this sample"):
        await agent.client.stacks(request)
