"""Restore checkpoints: bring copies of training state to the machines whose ranks need them.

The agents write each copy into the rank's own slot and verify it; ranks only restore from there. A copy that is in the
slot already is verified by its checksum and not moved again, so the activity may run twice. A stop may read only the
header of an own slot; this activity verifies such slots too.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING

from activities.activity import Activity, Bounds, twice
from activities.heartbeat import Say, request_id
from everstep.decisions.keep.choose_restore import Restore, readers
from everstep.decisions.keep.copies_text import wanted_text
from everstep.model.evidence import Evidence
from everstep.model.job import PlacedJob
from everstep.model.machine import Machine
from everstep.model.places import Places
from everstep.model.ranks import text_of
from everstep.model.state_copy import Restored, StateCopies, Tier

if TYPE_CHECKING:
    from activities.tools import Tools
    from agent.client import AgentClient, AgentClients
    from agent.v1 import agent_pb2 as pb

SLOWEST_BYTES = 20_000_000
"""One machine is expected to restore its copies at least this fast, bytes per second."""

RETRY_S = 0.5
"""The wait before a failed fetch of a copy is repeated, seconds."""
SLOWEST_MB_S = 20.0
"""An agent that transfers less than this counts as hung, MB/s."""
LEAST_S = 30.0
"""The shortest time limit of any answer, seconds."""


class RestoreCheckpoints(Activity[Restored]):
    """Bring copies into the own slots of the ranks that need them."""

    name = "Restore checkpoints"

    job: PlacedJob
    copies: list[StateCopies]
    """The copies to move, or to verify if they are in the ranks' own slots already; one of each rank at most."""
    disk_shared: bool = False
    patience_s: float = 30.0
    """Silent agents are asked again for this long, seconds."""
    reach_s: float = 10.0
    """Failed fetches of copies are repeated for this long, seconds."""
    what: str = ""
    """A text about what is restored, for the timeline."""

    @classmethod
    def of(cls, job: PlacedJob, chosen: Restore, evidence: Evidence) -> RestoreCheckpoints:
        """Return an activity that brings the chosen copies, and verifies the own slots that were not verified yet."""
        return cls(
            job=job,
            copies=[*chosen.copies, *chosen.unverified],
            disk_shared=evidence.disk_shared,
            what=f"step {chosen.step}: {wanted_text(chosen.copies, chosen.unverified)}",
        )

    def line(self) -> str:
        return self.what

    def bounds(self) -> Bounds:
        most = self.job.spec.ranks_per_machine * max((copies.bytes for copies in self.copies), default=0)
        return twice(timedelta(seconds=180 + most / SLOWEST_BYTES))

    async def perform(self, tools: Tools, say: Say) -> Restored:
        return await CopyRestorer(tools.agents, self, say).run()


@dataclass(slots=True)
class _Round:
    """The results of all requests so far, by rank."""

    moved: dict[int, pb.ShardRestored] = field(default_factory=dict)
    damaged: dict[int, str] = field(default_factory=dict)
    unreached: dict[int, str] = field(default_factory=dict)
    silent: set[str] = field(default_factory=set)


class CopyRestorer:
    """A restore of one job."""

    def __init__(self, agents: AgentClients, restore: RestoreCheckpoints, say: Say) -> None:
        self._agents = agents
        self._restore = restore
        self._say = say
        self._assignment = restore.job.spec.assignment(restore.job.machines)
        self._addresses = {machine.name: machine.address for machine in restore.job.machines}
        self._copies = {
            rank: (machine, number)
            for number, copies in enumerate(restore.copies)
            for machine, spans in copies.places.each()
            for first, last in spans
            for rank in range(first, last + 1)
        }
        """Rank → the machine with its copy, and the number of the copy's entry."""
        self._so_far = _Round()

    async def run(self) -> Restored:
        """Restore all copies; the result names damaged copies, unreachable copies and silent machines."""
        clock = asyncio.get_running_loop()
        began = clock.time()
        so_far = self._so_far
        readers_of = readers(self._restore.copies, self._assignment.topology, disk_shared=self._restore.disk_shared)
        await self._restore_ranks(self._copies.keys() - readers_of.keys(), {}, "first")
        from_reader = {rank: reader for rank, reader in readers_of.items() if reader in so_far.moved}
        await self._restore_ranks(from_reader.keys(), from_reader, "second")
        # A rank whose reader failed reads its copy itself.
        alone = readers_of.keys() - so_far.moved.keys()
        for rank in alone:
            so_far.damaged.pop(rank, None)
            so_far.unreached.pop(rank, None)
        await self._restore_ranks(alone, {}, "alone")
        return Restored(
            moved=self._of({rank: "" for rank in so_far.moved if not self._in_place(rank)}),
            verified=self._of({rank: "" for rank in so_far.moved if self._in_place(rank)}),
            failed=self._of(so_far.damaged, valid=False),
            unreached=self._of(so_far.unreached, valid=False),
            bytes=sum(reply.bytes for reply in so_far.moved.values()),
            seconds=round(clock.time() - began, 4),
            unreachable=sorted(so_far.silent),
        )

    async def _restore_ranks(self, ranks: Collection[int], from_reader: Mapping[int, int], phase: str) -> None:
        """Restore the ranks on all their machines at once, and repeat failed fetches until the time is up."""
        clock = asyncio.get_running_loop()
        deadline = clock.time() + self._restore.reach_s
        so_far, waiting, attempt = self._so_far, set(ranks), 0
        while waiting:
            attempt += 1
            await self._ask(waiting, from_reader, f"{phase}-{attempt}")
            waiting &= so_far.unreached.keys()
            if not waiting or clock.time() > deadline:
                return
            first = min(waiting)
            self._say(f"trying again for rank {first}: {so_far.unreached[first]}")
            await asyncio.sleep(RETRY_S)

    async def _ask(self, ranks: Collection[int], from_reader: Mapping[int, int], label: str) -> None:
        from activities.agents.call_all import on_all, prepared
        from activities.agents.convert import checkpoint_options
        from agent.v1 import agent_pb2 as pb

        so_far = self._so_far
        wanted: dict[str, list[int]] = defaultdict(list)
        for rank in sorted(ranks):
            wanted[self._assignment.home(rank).name].append(rank)
        answering = wanted.keys() - so_far.silent
        asked = [machine for machine in self._restore.job.machines if machine.name in answering]

        async def restore_machine(machine: Machine, client: AgentClient) -> pb.RestoreReply:
            request = pb.RestoreRequest(
                request_id=f"{request_id()}/{label}",
                job=self._restore.job.spec.name,
                shards=[self._source(rank, from_reader.get(rank)) for rank in wanted[machine.name]],
                checkpoint=checkpoint_options(self._restore.job.spec),
                run=self._restore.job.run,
            )
            size_mb = sum(self._copy(rank)[1].bytes for rank in wanted[machine.name]) / 1e6
            patience_s = LEAST_S + size_mb / SLOWEST_MB_S
            restore = self._restore
            return await prepared(
                client, restore.job.spec, restore.job.run, lambda: client.restore(request, timeout_s=patience_s)
            )

        done, silent = await on_all(
            self._agents, asked, restore_machine, say=self._say, patience_s=self._restore.patience_s
        )
        so_far.silent.update(silent)
        for machine, reply in done.items():
            answers = {shard.rank: shard for shard in reply.shards}
            for rank in wanted[machine]:
                self._note(rank, answers.get(rank, pb.ShardRestored(reason=f"{machine} did not report on this copy")))

    def _note(self, rank: int, answer: pb.ShardRestored) -> None:
        so_far = self._so_far
        so_far.unreached.pop(rank, None)
        if answer.ok:
            so_far.moved[rank] = answer
        elif answer.damaged:
            so_far.damaged[rank] = answer.reason
        else:
            so_far.unreached[rank] = answer.reason

    def _source(self, rank: int, reader: int | None) -> pb.ShardSource:
        from activities.agents.convert import TO_WIRE
        from agent.v1 import agent_pb2 as pb

        machine, copies = self._copy(rank)
        at_home = machine == self._assignment.home(rank).name
        source = pb.ShardSource(
            rank=rank,
            completed_steps=copies.completed_steps,
            tier=TO_WIRE[copies.tier],
            machine=machine,
            address="" if at_home else self._addresses.get(machine, ""),
            saved_ns=copies.saved_ns,
            saved_until_ns=copies.saved_until_ns,
            local_rank=self._assignment.topology.local_rank(rank),
        )
        if reader is not None:
            source.tensors_rank = reader
            source.tensors_address = self._assignment.home(reader).address
        return source

    def _copy(self, rank: int) -> tuple[str, StateCopies]:
        """Return the machine with the copy of a rank, and the entry of the copy."""
        machine, number = self._copies[rank]
        return machine, self._restore.copies[number]

    def _in_place(self, rank: int) -> bool:
        machine, copies = self._copy(rank)
        return copies.tier is Tier.OWN and machine == self._assignment.home(rank).name

    def _of(self, results: Mapping[int, str], *, valid: bool = True) -> list[StateCopies]:
        """Return the copies of some ranks, each with the reason of its result; copies with one result are one entry."""
        alike: dict[tuple[int, str], dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
        for rank, reason in sorted(results.items()):
            machine, number = self._copies[rank]
            alike[number, reason][machine].append(rank)
        return [
            self._restore.copies[number].changed(
                places=Places({machine: text_of(ranks) for machine, ranks in places.items()}),
                valid=valid,
                reason="" if valid else reason or "the agent gave no reason",
            )
            for (number, reason), places in alike.items()
        ]
