"""This module samples all processes of a job's ranks on this machine at the same time, within a time limit.

Thousands of machines may be sampled at once. So an answer has only what a judgement needs
(``agent/tracer/signatures.py``). The newest samples are kept whole, and their stacks and records can be fetched.
"""

from __future__ import annotations

import asyncio
import gzip
import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from agent.tracer import stack_dump
from agent.tracer.control_plane import flight_record
from agent.tracer.dump_files import of_ranks
from agent.tracer.processes import STOPPED, TRACING, FamilyMember, Used, families, used
from agent.tracer.signatures import reduced
from agent.v1 import agent_pb2 as pb
from everstep.errors import AgentError, CannotInspect
from everstep.system.blocked import BlockedIn, blocked_in
from everstep.system.procfs import state_of

LIMIT_S = 5.0
"""The time limit of a sample if the request has none, seconds."""
LONGEST_S = 60.0
"""The longest time limit that a request may have, seconds."""
RECORD_S = 0.5
"""The time limit for a rank's flight record, seconds: a stopped process accepts requests and never answers."""
AT_ONCE = 16
"""The number of processes that are read at the same time."""
MOST_PROCESSES = 512
"""The largest number of processes of a machine that are read; further processes are left out."""
MOST_BYTES = 16 << 20
"""The largest size of all stacks in a reply, bytes; further stacks are left out."""
KEPT = 16
"""The largest number of samples that are kept whole. A round of a vote takes 10."""
KEPT_BYTES = 32 << 20
"""The largest size of all samples that are kept whole, bytes; the newest is kept in any case."""
NO_PY_SPY = "py-spy is not installed: install it beside everstep"


@dataclass(frozen=True, slots=True)
class RankTraced:
    """A rank that is to be sampled."""

    rank: int
    pid: int
    ticks: int
    """Start time of its process, in clock ticks."""
    server: Path
    """Socket of torch's control server in the rank."""


class Tracer:
    """Samples the ranks of a machine.

    Args:
        machine: Name of the machine.
        program: py-spy with its first arguments; by default the installed one.
    """

    def __init__(self, machine: str, program: Sequence[str] = ()) -> None:
        self._machine = machine
        self._program = [*program]
        self._one = asyncio.Lock()
        self._kept: deque[tuple[str, pb.StacksReply]] = deque(maxlen=KEPT)
        """Job and whole sample, the newest last."""

    async def sample(
        self, job: str, ranks: Sequence[RankTraced], generation: int, limit_s: float, *, ranks_only: bool = False
    ) -> pb.SampleReply:
        """Sample ranks and their helpers. Samples are taken in sequence, because each would disturb another one.

        Args:
            job: The job of the ranks.
            ranks: Ranks of a generation.
            generation: The generation.
            limit_s: Time limit for the whole sample, seconds; 0: the default.
            ranks_only: Leave out helpers, and flight records, because threads of the rank itself write the records.
        """
        async with self._one:
            limit_s = min(limit_s or LIMIT_S, LONGEST_S)
            whole, reply = await asyncio.to_thread(self._sample, ranks, generation, limit_s, ranks_only)
        self._kept.append((job, whole))
        while len(self._kept) > 1 and sum(kept.ByteSize() for _, kept in self._kept) > KEPT_BYTES:
            self._kept.popleft()
        return reply

    def stacks(self, job: str, time_ns: int, ranks: Collection[int]) -> pb.StacksReply:
        """Return whole stacks and flight records of a sample.

        Args:
            job: The job of the ranks.
            time_ns: The time at which the sample began, nanoseconds.
            ranks: The ranks that are wanted; empty: all.

        Raises:
            AgentError: the sample is not kept.
        """
        for of_job, kept in self._kept:
            if (of_job, kept.time_ns) == (job, time_ns):
                return of_ranks(kept, ranks)
        raise AgentError(f"{self._machine} does not keep this sample of {job} any more: take a new one")

    def _sample(
        self, ranks: Sequence[RankTraced], generation: int, limit_s: float, ranks_only: bool
    ) -> tuple[pb.StacksReply, pb.SampleReply]:
        """Return a whole sample, and its signatures."""
        began = time.monotonic()
        whole = pb.StacksReply(machine=self._machine, generation=generation, time_ns=time.time_ns())
        living = {
            rank_process.rank: rank_process for rank_process in ranks if state_of(rank_process.pid, rank_process.ticks)
        }
        members = families({rank: rank_process.pid for rank, rank_process in living.items()})
        # Ranks come first: if room or time is short, helpers are left out.
        members.sort(key=lambda member: member.process.pid != living[member.rank].pid)
        if ranks_only:
            members = [member for member in members if member.process.pid == living[member.rank].pid]
        left_out = len(members) - MOST_PROCESSES
        members = members[:MOST_PROCESSES]
        with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="trace") as threads:
            asked = threads.map(_record, () if ranks_only else living.values())
            before = [_before(member) for member in members]
            dumps = list(threads.map(partial(self._dump, deadline=began + limit_s), members))
            records = list(asked)
        size = 0
        for member, then, found in zip(members, before, dumps, strict=True):
            packed = gzip.compress(found.json, 1, mtime=0) if found.json else b""
            has_room = size + len(packed) <= MOST_BYTES
            size += len(packed)
            stacks, why = (packed, found.problem) if has_room else (b"", "there was no room for its stacks")
            whole.processes.append(_process(member, then, stacks, why))
        whole.records.extend(records)
        reply = reduced(whole)
        if left_out > 0:
            reply.unread.append(f"{self._machine} has {left_out} processes more than {MOST_PROCESSES}")
        return whole, reply

    def _dump(self, member: FamilyMember, deadline: float) -> stack_dump.StackDump:
        program = self._program or [path for path in [stack_dump.py_spy()] if path]
        if not program:
            return stack_dump.StackDump(b"", NO_PY_SPY)
        if time.monotonic() >= deadline:
            return stack_dump.StackDump(b"", "there was no time for its stacks")
        return stack_dump.dump(member.process.pid, member.process.start, deadline=deadline, program=program)


class _Before(NamedTuple):
    """What /proc shows of a process before its stacks are read: reading them disturbs the process."""

    state: str
    used: Used
    blocked_in: BlockedIn | None


def _before(member: FamilyMember) -> _Before:
    pid = member.process.pid
    return _Before(_settled(member), used(pid), blocked_in(pid))


def _settled(member: FamilyMember) -> str:
    """Return the state of a process; if the process is being traced, wait a moment for another state."""
    for _ in range(10):
        state = state_of(member.process.pid, member.process.start)
        if state != TRACING:
            break
        time.sleep(0.005)
    return state


def _record(rank: RankTraced) -> pb.FlightRecord:
    if state_of(rank.pid, rank.ticks) == STOPPED:
        return pb.FlightRecord(rank=rank.rank, problem="the process of the rank is stopped")
    try:
        return pb.FlightRecord(rank=rank.rank, record=gzip.compress(flight_record(rank.server, RECORD_S), 1, mtime=0))
    except CannotInspect as error:
        return pb.FlightRecord(rank=rank.rank, problem=str(error))


def _process(member: FamilyMember, before: _Before, stacks: bytes, problem: str) -> pb.TracedProcess:
    return pb.TracedProcess(
        rank=member.rank,
        pid=member.process.pid,
        parent=member.process.parent,
        role=member.role or "",
        name=member.process.name,
        state=before.state,
        cpu_s=before.used.cpu_s,
        waited_s=before.used.waited_s,
        io_bytes=before.used.io_bytes,
        switches=before.used.switches,
        blocked_in=before.blocked_in or "",
        stacks=stacks,
        problem=problem,
    )


def ranks_traced(pids: Mapping[int, tuple[int, int]], shm: Path) -> list[RankTraced]:
    """Return the ranks of a job.

    Args:
        pids: Rank → its process and the start of that process.
        shm: Folder of the job in shared memory.
    """
    return [RankTraced(rank, pid, ticks, server_of(shm, rank)) for rank, (pid, ticks) in sorted(pids.items())]


def server_of(shm: Path, rank: int) -> Path:
    """Return the socket of torch's server in a rank."""
    return shm / f"control-{rank}"
