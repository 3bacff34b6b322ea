"""This module converts samples of ranks to messages and back.

In a message, each stack, each group and each order of operations is there once, however many ranks have it. The ranks
of a group are written as runs with a fixed distance: a group along an axis of a mesh is one run, whatever its size.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from functools import lru_cache
from typing import TypeVar

from agent.tracer.dump_files import files_of
from agent.v1 import agent_pb2 as pb
from everstep.decisions.blame.hang.rank_samples import (
    CommunicationRecord,
    JobSamples,
    PendingOperation,
    Position,
    ProcessSample,
    RankSample,
)
from everstep.decisions.blame.hang.stacks import Leaf, LeafKind, ProcessRole, Signature
from everstep.dumps.folder import FolderReader
from everstep.dumps.py_spy import StackReader
from everstep.errors import AgentError

KEPT = 1 << 14
"""The number of different stacks, orders and groups that are kept after they were read: most machines send the same."""


Order = tuple[tuple[int, int, bool], ...]
Key = TypeVar("Key", bound=Hashable)


class _Numbers(dict[Key, int]):
    """The numbers of different values, from 1, in the order in which they are first asked for."""

    def __missing__(self, key: Key) -> int:
        self[key] = len(self) + 1
        return self[key]


def reduced(whole: pb.StacksReply) -> pb.SampleReply:
    """Return the signatures of a machine's whole stacks and flight records."""
    reader = FolderReader(StackReader())
    reader.read(files_of(whole))
    reply = message_of(reader.samples())
    reply.generation, reply.time_ns = whole.generation, whole.time_ns
    ranks = {sampled.rank: sampled for sampled in reply.ranks}
    for process in whole.processes:
        ranks[process.rank].processes.add(
            pid=process.pid,
            cpu_s=process.cpu_s,
            waited_s=process.waited_s,
            io_bytes=process.io_bytes,
            switches=process.switches,
            state=process.state,
            problem=process.problem,
        )
    return reply


def message_of(samples: JobSamples) -> pb.SampleReply:
    """Return one sample of ranks as a message. It has nothing of NCCL's RAS, which agents do not ask."""
    reply = pb.SampleReply(unread=samples.unread)
    stacks, groups, orders = _Numbers[Signature](), _Numbers[str](), _Numbers[Order]()
    for rank, sample in samples.ranks.items():
        sampled = reply.ranks.add(
            rank=rank,
            trainer=stacks[sample.trainer] if sample.trainer else 0,
            helpers=map(stacks.__getitem__, sample.helpers),
            is_stopped=sample.is_stopped,
            sleeps=sample.sleeps,
            blocked_in=sample.blocked_in,
            code=sample.position.code,
        )
        for process in sample.processes:
            sampled.processes.add(**process._asdict())
        if sample.record is not None:
            newest, done = sample.position.record or (-1, -1)
            record = pb.RankRecord(
                newest=newest,
                done=done,
                groups=map(groups.__getitem__, sample.record.last),
                last=sample.record.last.values(),
                order=orders[sample.record.order],
                called=map(groups.__getitem__, sample.record.called),
            )
            for pending in sample.record.pending:
                record.pending.add(**(pending._asdict() | {"group": groups[pending.group]}))
            sampled.record.CopyFrom(record)
    for order in orders:
        reply.orders.add(
            groups=[index for index, _, _ in order],
            numbers=[number for _, number, _ in order],
            p2p=[is_p2p for _, _, is_p2p in order],
        )
    for stack in stacks:
        reply.stacks.add(
            role=stack.role,
            functions=[function for function, _ in stack.path],
            files=[file for _, file in stack.path],
            kind=stack.leaf.kind,
            operation=stack.leaf.operation,
            toward=stack.leaf.toward,
        )
    for name in {**groups, **samples.groups, **samples.labels}:
        runs = runs_of(samples.groups.get(name, ()))
        reply.groups.add(name=name, label=samples.labels.get(name, ""), runs=runs)
    return reply


def samples_of(reply: pb.SampleReply) -> JobSamples:
    """Return the sample of ranks in a message.

    Raises:
        AgentError: the message cannot be read.
    """
    try:
        stacks = [None, *(_signature(stack.SerializeToString()) for stack in reply.stacks)]
        names = ["", *(group.name for group in reply.groups)]
        orders = [(), *(_order(order.SerializeToString()) for order in reply.orders)]
        ranks = {sampled.rank: _rank_sample(sampled, stacks, names, orders) for sampled in reply.ranks}
        groups = {group.name: ranks_in(tuple(group.runs)) for group in reply.groups if group.runs}
    except (LookupError, ValueError) as error:
        raise AgentError(f"its sample of ranks cannot be read ({error!r}): is its agent of another release?") from error
    labels = {group.name: group.label for group in reply.groups if group.label}
    return JobSamples(ranks, groups, labels, unread=tuple(reply.unread))


@lru_cache(maxsize=KEPT)
def _signature(data: bytes) -> Signature:
    stack = pb.StackSignature.FromString(data)
    leaf = Leaf(LeafKind(stack.kind), stack.operation, stack.toward)
    return Signature(ProcessRole(stack.role), tuple(zip(stack.functions, stack.files, strict=True)), leaf)


@lru_cache(maxsize=KEPT)
def _order(data: bytes) -> Order:
    order = pb.CallOrder.FromString(data)
    return tuple(zip(order.groups, order.numbers, order.p2p, strict=True))


def _rank_sample(
    sampled: pb.SampledRank, stacks: Sequence[Signature | None], names: Sequence[str], orders: Sequence[Order]
) -> RankSample:
    record = sampled.record if sampled.HasField("record") else None
    return RankSample(
        stacks[sampled.trainer],
        tuple(stack for number in sampled.helpers if (stack := stacks[number])),
        _communication(record, names, orders[record.order]) if record else None,
        is_stopped=sampled.is_stopped,
        blocked_in=sampled.blocked_in,
        sleeps=sampled.sleeps,
        position=Position(tuple(sampled.code), (record.newest, record.done) if record else None),
        processes=tuple(
            ProcessSample(one.pid, one.cpu_s, one.waited_s, one.io_bytes, one.switches, one.state, one.problem)
            for one in sampled.processes
        ),
    )


def _communication(record: pb.RankRecord, names: Sequence[str], order: Order) -> CommunicationRecord:
    return CommunicationRecord(
        dict(zip(map(names.__getitem__, record.groups), record.last, strict=True)),
        tuple(
            PendingOperation(
                names[one.group],
                one.number,
                one.operation,
                one.sizes,
                one.peer if one.HasField("peer") else None,
                one.is_p2p,
            )
            for one in record.pending
        ),
        order,
        tuple(map(names.__getitem__, record.called)),
    )


def runs_of(ranks: Iterable[int]) -> list[int]:
    """Return the runs of ascending ranks: the first rank, the number of ranks and the distance of each run."""
    runs: list[int] = []
    last = 0
    for rank in ranks:
        if runs and (runs[-2] == 1 or rank - last == runs[-1]):
            runs[-2:] = [runs[-2] + 1, rank - last]
        else:
            runs += [rank, 1, 1]
        last = rank
    return runs


@lru_cache(maxsize=KEPT)
def ranks_in(runs: tuple[int, ...]) -> tuple[int, ...]:
    """Return the ranks of runs.

    Raises:
        ValueError: the numbers are not runs.
    """
    each = zip(runs[::3], runs[1::3], runs[2::3], strict=True)
    return tuple(rank for first, count, apart in each for rank in range(first, first + count * apart, apart))
