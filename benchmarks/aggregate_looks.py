"""Measures the trace of a job of up to 9,600 ranks that hangs: two samples of all ranks, and the verdict.

Each machine has 8 ranks. Each rank has four processes with stacks of 30 frames, and a flight record with 256 entries in
its tensor, pipeline and data parallel group and in the world group. One rank has not entered its last collective.
Agents in a process of their own answer by gRPC with the signatures of these stacks and records, made by the code of the
real agent. The measured time is the CPU time of the process that asks, samples and judges.

For comparison, the same process judges the whole stacks and records of both samples from their bytes, without gRPC. The
benchmark fails if the two verdicts differ.

    python -P -m benchmarks.aggregate_looks
    python -P -m benchmarks.aggregate_looks --quick --json
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import gzip
import json
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from activities.agents.looks import RankLook, judge_looks, look
from activities.turns import gathered
from agent.client import AgentClients
from agent.fake import FakeAgent
from agent.tracer.control_plane import cut
from agent.tracer.dump_files import files_of
from agent.tracer.signatures import reduced
from agent.v1 import agent_pb2 as pb
from benchmarks.aggregate import PER_MACHINE, Dumps
from benchmarks.aggregate_records import FlightRecords
from benchmarks.common import Row, finish, quantile, say, show, show_json
from controlplane.worker import COLLECT_AFTER
from everstep.decisions.blame.hang.analysis import judge_hang
from everstep.decisions.blame.hang.rank_samples import compared
from everstep.decisions.blame.hang.verdict import HangVerdict
from everstep.decisions.blame.slow.by_samples import SampleCounts, count_sample
from everstep.dumps.folder import FolderReader
from everstep.dumps.py_spy import StackReader
from everstep.model.job import JobSpec
from everstep.model.machine import Machine
from everstep.model.topology import Topology

TRACE_AIM_S, VERDICT_AIM_S, WIRE_AIM_MB = 3.0, 1.0, 20.0
"""The aims for 1,200 machines: CPU seconds of both samples and of the verdict alone, and MB of all answers."""
LARGEST = 1_200
SIZES = (150, LARGEST)
TP, PP = 8, 10
STEPS = 64
"""Number of rounds of four collectives, which make 256 entries."""


def spec_of(machines: int) -> JobSpec:
    """Return a job of this size."""
    return JobSpec(name="bench", script="/x.py", machines=machines, ranks_per_machine=PER_MACHINE, tp=TP, pp=PP)


def whole_samples(topology: Topology) -> Iterator[pb.StacksReply]:
    """Yield the whole sample of each machine."""
    records, files = FlightRecords(topology, ("tp", "pp", "dp"), STEPS), Dumps(topology).files()
    for machine in range(topology.machines):
        whole = pb.StacksReply(machine=f"m{machine}", generation=1, time_ns=1)
        for rank in topology.ranks(machine):
            for role in ("trainer", "data loader", "data loader", "checkpoint"):
                data = next(files)[1]
                (thread,) = json.loads(data)
                whole.processes.add(
                    rank=rank,
                    pid=thread["pid"],
                    role=role,
                    state="S",
                    cpu_s=7.5,
                    stacks=gzip.compress(data, 1, mtime=0),
                )
            record = json.dumps(cut(records.of(rank)), separators=(",", ":")).encode()
            whole.records.add(rank=rank, record=gzip.compress(record, 1, mtime=0))
        yield whole


@dataclass
class Whole:
    """The answers of all machines, and what they cost if whole stacks and records are judged."""

    replies: list[bytes] = field(default_factory=list)
    """The signatures of each machine, as bytes."""
    seconds: float = 0.0
    """The CPU time of both samples and the verdict."""
    size: int = 0
    """The bytes of both samples."""
    agent_s: list[float] = field(default_factory=list)
    """The CPU time in which each agent makes its signatures."""


def judge_whole(topology: Topology) -> tuple[Whole, HangVerdict]:
    """Judge whole stacks and records, and return the signatures of the same samples."""
    found, stacks = Whole(), StackReader()
    readers = FolderReader(stacks), FolderReader(stacks)
    for whole in whole_samples(topology):
        began = time.process_time()
        for reader in readers:
            reader.read(files_of(whole))
        read = time.process_time()
        reply = reduced(whole)
        found.agent_s.append(time.process_time() - read)
        found.seconds += read - began
        found.size += 2 * whole.ByteSize()
        found.replies.append(reply.SerializeToString())
    began = time.process_time()
    samples = replace(compared(*(reader.samples() for reader in readers)), is_hung=True)
    verdict = judge_hang(samples, topology, names=[f"m{machine}" for machine in range(topology.machines)])
    found.seconds += time.process_time() - began
    return found, verdict


async def answer(replies: list[bytes]) -> None:
    """Run an agent for each answer, and print their addresses; never returns."""
    async with AsyncExitStack() as stack:
        addresses = []
        for number, data in enumerate(replies):
            agent = FakeAgent.empty(f"m{number}", sample=pb.SampleReply.FromString(data))
            addresses.append((await stack.enter_async_context(agent)).address)
        print(json.dumps(addresses), flush=True)
        await asyncio.Event().wait()


@dataclass
class Traced:
    """What the control plane needs for a trace by signatures."""

    seconds: float
    """The CPU time of both samples and the verdict."""
    verdict_s: float
    """The CPU time of the verdict alone."""
    verdict: HangVerdict
    further: list[tuple[float, float]]
    """The CPU and elapsed seconds of each further sample, as in a vote."""


async def trace(addresses: list[str], spec: JobSpec) -> Traced:
    """Sample the agents twice and judge, then sample them as a vote does."""
    machines = [Machine(name=f"m{number}", address=address) for number, address in enumerate(addresses)]
    agents = AgentClients()
    gc.freeze()  # as in a worker
    gc.set_threshold(*COLLECT_AFTER)
    await gathered(agents.get(machine.address).describe(timeout_s=60) for machine in machines)
    began, looks = time.process_time(), list[RankLook]()
    for _ in range(2):
        looks.append(await look(agents, spec.name, machines, generation=1, limit_s=60))
    sampled = time.process_time()
    judged = await asyncio.to_thread(judge_looks, looks, spec, machines, is_hung=True)
    over = time.process_time()
    if any(one.silent for one in looks):
        raise AssertionError(f"agents did not answer: {looks[0].silent or looks[1].silent}")
    further, counts = list[tuple[float, float]](), dict[int, SampleCounts]()
    for _ in range(3):
        start = time.process_time(), time.monotonic()
        one = await look(agents, spec.name, machines, generation=1, limit_s=60, ranks_only=True)
        for part in one.parts.values():
            count_sample(counts, part.ranks)
        further.append((time.process_time() - start[0], time.monotonic() - start[1]))
    await agents.close()
    return Traced(over - began, over - sampled, judged.check.verdict, further)


def measure(machines: int) -> list[Row]:
    """Return the rows of one size.

    Raises:
        AssertionError: signatures and whole records have different verdicts, or none.
    """
    spec, mb = spec_of(machines), 1e6
    say(f"{machines} machines: whole stacks and records")
    whole, expected = judge_whole(spec.topology())
    say(f"{machines} machines: signatures")
    with tempfile.TemporaryDirectory(prefix="everstep-bench-") as folder:
        path = Path(folder) / "replies"
        path.write_bytes(pickle.dumps(whole.replies))
        command = [sys.executable, "-P", "-m", "benchmarks.aggregate_looks", "--answer", str(path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as agents:
            try:
                assert agents.stdout
                traced = asyncio.run(trace(json.loads(agents.stdout.readline()), spec))
            finally:
                agents.kill()
    if traced.verdict != expected or not expected.evicts:
        raise AssertionError(f"{traced.verdict.reason}, and from whole records: {expected.reason}")
    aims = (TRACE_AIM_S, VERDICT_AIM_S, WIRE_AIM_MB) if machines == LARGEST else (None, None, None)
    size = 2 * sum(map(len, whole.replies))
    cpu, elapsed = (quantile(values, 0.5) for values in zip(*traced.further, strict=True))
    name = f"{machines} machines"
    return [
        Row(f"{name}, two samples and verdict, CPU; peer: whole", "s", traced.seconds, whole.seconds, aims[0], "ours"),
        Row(f"{name}, merge and verdict alone, CPU", "s", traced.verdict_s, None, aims[1], "ours"),
        Row(f"{name}, all answers; peer: whole", "MB", size / mb, whole.size / mb, aims[2], "ours"),
        Row(f"{name}, a further sample for a vote, CPU", "s", cpu),
        Row(f"{name}, a further sample for a vote, elapsed", "s", elapsed),
        Row(f"{name}, signatures of 8 ranks in their agent, CPU", "ms", quantile(whole.agent_s, 0.5) * 1e3),
    ]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="only 150 machines")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--answer", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.answer:
        asyncio.run(answer(pickle.loads(options.answer.read_bytes())))
        return
    rows = [row for machines in (SIZES[:1] if options.quick else SIZES) for row in measure(machines)]
    if options.json:
        show_json("aggregate_looks", rows)
    else:
        show("aggregate_looks", rows)
    finish([])


if __name__ == "__main__":
    main()
