"""A simulated training job on GPUs, which writes the flight records that NCCL would write.

Each rank enqueues its operations before its GPU reaches them. The GPU executes them in order. An operation ends when
all of its ranks have reached it. So the flight records differ from those of gloo: most pending operations of a rank are
only scheduled. A rank that blocks the job may have enqueued as much as the other ranks.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from everstep.decisions.blame.hang.rank_samples import JobSamples, RankSample
from everstep.dumps.flight_records import flight_record
from everstep.model.topology import Topology

STEPS, MICRO_BATCHES = 2, 3
AHEAD = 6
"""Number of operations that a rank enqueues before its GPU has reached them."""
KEPT = 40
"""Number of entries in a flight record."""
WORLD = "0"


@dataclass(frozen=True)
class Operation:
    """One operation of a rank: a collective of a group, or a transfer to or from a peer."""

    name: str
    group: str
    peer: int = -1

    @property
    def is_p2p(self) -> bool:
        return self.peer >= 0


@dataclass(frozen=True)
class Faults:
    """The faults of a job, by rank. An operation is given by its number in the rank's program."""

    stops_before: Mapping[int, int] = field(default_factory=dict)
    """The rank does not call the operation, nor any operation after it."""
    skips: Mapping[int, int] = field(default_factory=dict)
    """The rank leaves out the operation."""
    never_ends: Mapping[int, int] = field(default_factory=dict)
    """The rank's GPU does not finish the operation."""
    alone: bool = False
    """The operation never ends for the rank, but it ends for the operation's other ranks."""
    swaps: frozenset[int] = frozenset()
    """The rank calls the last two collectives of its data parallel group in the other order."""


class SimulatedGpus:
    """A job with tensor, pipeline and data parallelism.

    Args:
        topology: The topology of the job.
        faults: The faults of the job.
        has_timing: Whether the records show which operations have started, as with ``TORCH_NCCL_ENABLE_TIMING``.
    """

    def __init__(self, topology: Topology, faults: Faults | None = None, *, has_timing: bool = True) -> None:
        self.topology = topology
        self.faults = faults or Faults()
        self.has_timing = has_timing
        self.groups: dict[str, tuple[int, ...]] = {WORLD: tuple(range(topology.world_size))}
        self.programs = {rank: self._with_faults(rank, self.program(rank)) for rank in range(topology.world_size)}
        self.done = dict.fromkeys(self.programs, 0)
        """Rank → the number of its operations that are over."""
        self._keys = {rank: self._numbered(rank) for rank in self.programs}

    def program(self, rank: int) -> list[Operation]:
        """Return the operations that a healthy rank calls, in order."""
        line = self.topology.along(rank, ["pp"])
        at = line.index(rank)
        tp, dp, pp = (self._group(rank, kind) for kind in ("tp", "dp", "pp"))
        reduces = [Operation("all_reduce", tp)] * 2
        before = [("recv", "send", line[at - 1])] if at else []
        after = [("send", "recv", line[at + 1])] if at + 1 < len(line) else []
        forward = [Operation(name, pp, peer) for name, _, peer in before] + reduces
        forward += [Operation(name, pp, peer) for name, _, peer in after]
        backward = [Operation(name, pp, peer) for _, name, peer in after] + reduces
        backward += [Operation(name, pp, peer) for _, name, peer in before]
        last = [
            Operation("_reduce_scatter_base", dp),
            Operation("_all_gather_base", dp),
            Operation("all_reduce", WORLD),
        ]
        return (forward * MICRO_BATCHES + backward * MICRO_BATCHES + last) * STEPS

    def run(self, operations: int = 10**9, order: random.Random | None = None) -> SimulatedGpus:
        """Execute operations until none can continue, or until a number of operations of single ranks is complete."""
        inside: dict[tuple[object, ...], set[int]] = defaultdict(set)
        ready = list(self.programs)
        while ready and operations > 0:
            rank = ready.pop(order.randrange(len(ready)) if order else -1)
            at = self.done[rank]
            if at >= len(self.programs[rank]) or self.faults.stops_before.get(rank) == at:
                continue
            key = self._keys[rank][at]
            inside[key].add(rank)
            members = inside[key]
            stuck = {one for one in members if self.faults.never_ends.get(one) == self.done[one]}
            calls = {self.programs[one][self.done[one]].name for one in members}
            if (
                len(members) < self._size(key)
                or (len(calls) > 1 and key[0] != "p2p")
                or (stuck and not self.faults.alone)
            ):
                continue
            for one in members - stuck:
                self.done[one] += 1
                ready.append(one)
            operations -= len(members)
        return self

    def samples(self, unknown: frozenset[int] = frozenset()) -> JobSamples:
        """Return what the flight records of all ranks show, without the records of some ranks."""
        records = {rank: flight_record(self.record(rank)) for rank in self.programs if rank not in unknown}
        return JobSamples({rank: RankSample(record=one.record) for rank, one in records.items()}, self.groups)

    def record(self, rank: int) -> dict[str, Any]:
        """Return the flight record of a rank, as torch writes it."""
        program, at = self.programs[rank], self.done[rank]
        end = self._enqueued(rank)
        numbers: Counter[tuple[str, bool]] = Counter()
        entries = []
        for number, operation in enumerate(program[:end]):
            numbers[operation.group, operation.is_p2p] += 1
            name = operation.name
            if operation.is_p2p:
                members = self.groups[operation.group]
                arrow = "->" if name == "send" else "<-"
                name += f" {members.index(rank)}{arrow}{members.index(operation.peer)}"
            state = "completed" if number < at else "started" if number == at and self.has_timing else "scheduled"
            entries.append(
                {
                    "record_id": number,
                    "process_group": [operation.group, "undefined"],
                    "collective_seq_id": numbers[operation.group, False],
                    "p2p_seq_id": numbers[operation.group, True],
                    "profiling_name": f"nccl:{name}",
                    "input_sizes": [[8192, 1, 5120]],
                    "state": state,
                    "retired": number < at,
                    "is_p2p": operation.is_p2p,
                }
            )
        own = {operation.group for operation in program}
        config = {group: {"name": group, "desc": "", "ranks": str(list(self.groups[group]))} for group in own}
        return {"version": "2.10", "pg_config": config, "entries": entries[-KEPT:]}

    def _enqueued(self, rank: int) -> int:
        """Return how many operations a rank has called. It waits for the result of the collective of all ranks."""
        program, at = self.programs[rank], self.done[rank]
        end = min(len(program), at + 1 + AHEAD)
        end = next((number + 1 for number in range(at, end) if program[number].group == WORLD), end)
        return min(end, self.faults.stops_before.get(rank, end))

    def _with_faults(self, rank: int, program: list[Operation]) -> list[Operation]:
        if rank in self.faults.swaps:
            program[-3], program[-2] = program[-2], program[-3]
        if rank in self.faults.skips:
            del program[self.faults.skips[rank]]
        return program

    def _group(self, rank: int, kind: str) -> str:
        ranks = self.topology.group(rank, kind)
        name = f"{kind} {ranks[0]}"
        self.groups[name] = ranks
        return name

    def _numbered(self, rank: int) -> list[tuple[object, ...]]:
        """Return a key for each operation of a rank. The key is equal for all ranks of the operation."""
        numbers: Counter[object] = Counter()
        keys: list[tuple[object, ...]] = []
        for operation in self.programs[rank]:
            if operation.is_p2p:
                ends = (rank, operation.peer) if operation.name == "send" else (operation.peer, rank)
                numbers[ends] += 1
                keys.append(("p2p", *ends, numbers[ends]))
            else:
                numbers[operation.group] += 1
                keys.append((operation.group, numbers[operation.group]))
        return keys

    def _size(self, key: tuple[object, ...]) -> int:
        return 2 if key[0] == "p2p" else len(self.groups[str(key[0])])
