"""Reads the captured output of a job's ranks, line by line, from all machines at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeAlias

from agent.client import AgentClients
from agent.v1 import agent_pb2 as pb
from everstep.errors import AgentError, AgentUnreachable, ConfigError
from everstep.model.job import JobSpec
from everstep.model.machine import Machine

LINE_BYTES = 256
"""First estimate of the length of a line, bytes; it is increased until enough lines are read."""
QUIET_S = 1.0
"""After a job's end, its logs are complete if no output arrived for this time, seconds."""
RECONNECT_S = 0.5
RECENT = 4 * 1024
"""Length of the last shown output that is kept to find the position after a reconnect, bytes."""
OVERLAP = 64 * 1024
"""Length of output that is read again after a reconnect, bytes; an agent sends it as one chunk."""

Stream: TypeAlias = "pb.ReadLogRequest.Stream.ValueType"
STREAMS: dict[str, tuple[Stream, ...]] = {
    "both": (pb.ReadLogRequest.STDOUT, pb.ReadLogRequest.STDERR),
    "stdout": (pb.ReadLogRequest.STDOUT,),
    "stderr": (pb.ReadLogRequest.STDERR,),
}


@dataclass(frozen=True, slots=True)
class Source:
    """One rank, and the machine that has its log."""

    rank: int
    machine: Machine


def sources_of(spec: JobSpec, machines: Sequence[Machine], rank: int | None = None) -> list[Source]:
    """The sources of the logs of all ranks, or of one rank.

    Raises:
        ConfigError: there is no such rank.
    """
    topology = spec.topology()
    if rank is not None and not 0 <= rank < topology.world_size:
        raise ConfigError(f"job {spec.name} has no rank {rank}: its ranks go from 0 to {topology.world_size - 1}")
    wanted = range(topology.world_size) if rank is None else [rank]
    assignment = spec.assignment(machines)
    return [Source(number, assignment.home(number)) for number in wanted]


@dataclass(slots=True)
class LineCutter:
    """Splits the chunks of one stream into lines; a chunk may end within a line or a character."""

    rest: bytes = b""

    def take(self, data: bytes) -> list[str]:
        """The lines that are complete with this chunk."""
        *lines, self.rest = (self.rest + data).split(b"\n")
        return [line.decode(errors="replace").rstrip("\r") for line in lines]

    def end(self) -> list[str]:
        """The last line, if it has no end of line."""
        left, self.rest = self.rest, b""
        return [left.decode(errors="replace")] if left else []


def last_lines(data: bytes, count: int | None) -> bytes:
    """The last lines of some output, or all of it."""
    if count is None:
        return data
    return b"".join(data.splitlines(keepends=True)[-count:]) if count else b""


def after(recent: bytes, data: bytes) -> bytes:
    """The output after the part that was shown; all output if it does not contain that part."""
    at = data.rfind(recent) if recent else -1
    return data[at + len(recent) :] if at >= 0 else data


class RankLogs:
    """Reads logs through the agents.

    Args:
        agents: clients of the agents.
        job: name of the job.
        stream: ``both``, ``stdout`` or ``stderr``.
    """

    def __init__(self, agents: AgentClients, job: str, stream: str = "both") -> None:
        self._agents = agents
        self._job = job
        self._streams = STREAMS[stream]

    async def read(self, source: Source, tail: int | None = None) -> list[str]:
        """Read the stored log of one rank, stdout first: all of it, or the last lines of each stream.

        Raises:
            AgentError: the machine does not answer, or has no log of this rank.
        """
        lines: list[str] = []
        missing: list[AgentError] = []
        for stream in self._streams:
            try:
                data = await self._kept(source, stream, tail)
            except AgentUnreachable:
                raise
            except AgentError as error:  # a rank may have only one of the streams
                missing.append(error)
            else:
                cutter = LineCutter()
                lines += cutter.take(data) + cutter.end()
        if len(missing) == len(self._streams):
            raise missing[0]
        return lines

    async def _kept(self, source: Source, stream: Stream, tail: int | None) -> bytes:
        guess = 0 if tail is None else max(tail, 1) * LINE_BYTES
        while True:
            data = await self._once(source, stream, guess)
            # The first line may be cut: so one line more than requested is read.
            if tail is None or data.count(b"\n") > tail or len(data) < guess:
                return last_lines(data, tail)
            guess *= 4

    async def _once(self, source: Source, stream: Stream, tail_bytes: int) -> bytes:
        agent = self._agents.get(source.machine.address)
        request = self._request(source, stream, tail_bytes)
        return b"".join([chunk.data async for chunk in agent.read_log(request)])

    def _request(self, source: Source, stream: Stream, tail_bytes: int, *, follow: bool = False) -> pb.ReadLogRequest:
        return pb.ReadLogRequest(job=self._job, rank=source.rank, stream=stream, tail_bytes=tail_bytes, follow=follow)

    async def follow(
        self, sources: Sequence[Source], tail: int | None, over: asyncio.Event
    ) -> AsyncIterator[tuple[int, str]]:
        """Yield pairs of rank and line as they arrive, until the job has ended and its logs are read to the end.

        Args:
            sources: the ranks.
            tail: begin with this many last lines of each rank; None: with the whole stored log.
            over: set when the job has ended.
        """
        queue: asyncio.Queue[tuple[int, str]] = asyncio.Queue(maxsize=10_000)
        readers = [
            asyncio.create_task(self._follow_one(source, stream, tail, queue))
            for source in sources
            for stream in self._streams
        ]
        try:
            while True:
                try:
                    async with asyncio.timeout(QUIET_S):
                        rank_and_line = await queue.get()
                except TimeoutError:
                    if over.is_set():
                        return
                else:
                    yield rank_and_line
        finally:
            for reader in readers:
                reader.cancel()
            await asyncio.gather(*readers, return_exceptions=True)

    async def _follow_one(
        self, source: Source, stream: Stream, tail: int | None, queue: asyncio.Queue[tuple[int, str]]
    ) -> None:
        """Follow one stream of one rank; after an outage of its agent it continues at the same position."""
        cutter = LineCutter()
        recent = b""

        async def show(data: bytes) -> None:
            nonlocal recent
            recent = (recent + data)[-RECENT:]
            for line in cutter.take(data):
                await queue.put((source.rank, line))

        agent = self._agents.get(source.machine.address)
        with suppress(AgentError):  # there is no log yet
            await show(await self._kept(source, stream, tail))
        while True:
            fresh = True
            request = self._request(source, stream, OVERLAP if recent else 0, follow=True)
            with suppress(AgentError):
                async for chunk in agent.read_log(request):
                    await show(after(recent, chunk.data) if fresh else chunk.data)
                    fresh = False
            await asyncio.sleep(RECONNECT_S)
