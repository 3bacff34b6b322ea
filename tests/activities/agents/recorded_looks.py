"""Recorded hangs (``tests/data/hangs``), as the answers of agents: whole stacks and their signatures."""

from __future__ import annotations

import gzip
import json
import re
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path

from agent.tracer.dump_files import of_ranks
from agent.tracer.signatures import reduced
from agent.v1 import agent_pb2 as pb
from everstep.model.topology import Topology

RECORDED = Path(__file__).resolve().parents[2] / "data" / "hangs"
_STACK = re.compile(r"snapshot-(\d)/rank-(\d+)(-child-\d+)?\.json")
_RECORD = re.compile(r"snapshot-(\d)/flight-record-rank-(\d+)\.json")


def whole_looks(
    name: str, *, cpu_s: Mapping[int, float] | None = None
) -> tuple[Topology, int, list[list[pb.StacksReply]]]:
    """Return the topology, the rank at fault, and the whole stacks of each machine in each sample.

    Args:
        name: The name of the recording.
        cpu_s: Rank → CPU seconds that it used between two samples.
    """
    used = dict(cpu_s or {})
    with tarfile.open(RECORDED / f"{name}.tar.xz") as archive:
        files = {one.name: archive.extractfile(one).read() for one in archive if one.isfile()}  # type: ignore[union-attr]
    about = json.loads(files[".about.json"])
    topology = Topology.parse(about["topology"])
    found = []
    for look in (1, 2):
        known = json.loads(files.get(f"snapshot-{look}/processes.json", b"[]"))
        states = {one["pid"]: one["state"] for one in known}
        replies = [pb.StacksReply(machine="it", generation=3, time_ns=look) for _ in range(topology.machines)]
        for path, data in sorted(files.items()):
            if (stack := _STACK.fullmatch(path)) and int(stack[1]) == look:
                rank, is_child = int(stack[2]), bool(stack[3])
                pid = json.loads(data)[0]["pid"] if data.strip() else rank + 1
                replies[topology.machine(rank)].processes.add(
                    rank=rank,
                    pid=pid,
                    role="" if is_child else "trainer",
                    state=states.get(pid, "S"),
                    cpu_s=0.0 if is_child else look * used.get(rank, 0.0),
                    stacks=gzip.compress(data),
                )
            elif (record := _RECORD.fullmatch(path)) and int(record[1]) == look:
                replies[topology.machine(int(record[2]))].records.add(rank=int(record[2]), record=gzip.compress(data))
        # A stopped rank answers no request for its stack, so only its state is known.
        for one in known:
            told = {process.pid for reply in replies for process in reply.processes}
            if one["pid"] not in told and one["state"] == "T":
                reply = replies[topology.machine(one["rank"])]
                reply.processes.add(rank=one["rank"], pid=one["pid"], role="trainer", state="T")
        found.append(replies)
    return topology, about["fault"]["rank"], found


def looks(name: str, *, cpu_s: Mapping[int, float] | None = None) -> tuple[Topology, int, list[list[pb.SampleReply]]]:
    """Return the topology, the rank at fault, and the signatures of each machine in each sample."""
    topology, culprit, told = whole_looks(name, cpu_s=cpu_s)
    return topology, culprit, [[reduced(whole) for whole in look] for look in told]


def telling_whole(*kept: pb.StacksReply) -> Callable[[pb.StacksRequest], pb.StacksReply]:
    """Return the answer of an agent that keeps these whole samples."""

    def answer(request: pb.StacksRequest) -> pb.StacksReply:
        [found] = [whole for whole in kept if whole.time_ns == request.time_ns]
        return of_ranks(found, request.ranks)

    return answer
