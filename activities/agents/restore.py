"""Bringing copies of training state to the machines whose ranks need them.

What the agents bring is in the rank's own slot afterwards, verified; ranks only
ever restore from there. A copy that is there already is compared with its
checksum and not moved again, so that all of this may run twice; of own slots that
a Stop told of by their headers that is all there is to do.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from activities.agents.call_all import on_all, prepared
from activities.agents.convert import TO_WIRE, checkpoint_options
from activities.heartbeat import Say, request_id
from activities.messages import RestoreInput
from agent.client import AgentClient, AgentClients
from agent.v1 import agent_pb2 as pb
from everstep.decisions.keep.choose_restore import readers
from everstep.model.machine import Machine
from everstep.model.state_copy import Restored, StateCopy, Tier

RETRY_S = 0.5
"""Before a copy that could not be fetched is tried again, seconds."""
SLOWEST_MB_S = 20.0
"""An agent that brings less is taken to hang, MB/s."""
LEAST_S = 30.0
"""Any answer may take this long, seconds."""


@dataclass(slots=True)
class _Round:
    """What has become of the copies so far."""

    moved: dict[int, pb.ShardRestored] = field(default_factory=dict)
    damaged: dict[int, str] = field(default_factory=dict)
    unreached: dict[int, str] = field(default_factory=dict)
    silent: set[str] = field(default_factory=set)


class CopyRestorer:
    """One restore; the activity of the name calls :meth:`run`."""

    def __init__(self, agents: AgentClients, restore: RestoreInput, say: Say) -> None:
        self._agents = agents
        self._restore = restore
        self._say = say
        self._assignment = restore.spec.assignment(restore.machines)
        self._addresses = {machine.name: machine.address for machine in restore.machines}
        self._copies = {copy.rank: copy for copy in restore.copies}
        self._so_far = _Round()

    async def run(self) -> Restored:
        """Bring all copies; damaged ones, unreachable ones and silent machines are in the answer."""
        clock = asyncio.get_running_loop()
        began = clock.time()
        so_far = self._so_far
        readers_of = readers(
            self._restore.copies,
            self._restore.digests,
            self._assignment.topology,
            disk_shared=self._restore.disk_shared,
        )
        await self._bring(self._copies.keys() - readers_of.keys(), {}, "first")
        from_reader = {rank: reader for rank, reader in readers_of.items() if reader in so_far.moved}
        await self._bring(from_reader.keys(), from_reader, "second")
        # Whoever got nothing from the rank that was to read for it reads for itself.
        alone = readers_of.keys() - so_far.moved.keys()
        for rank in alone:
            so_far.damaged.pop(rank, None)
            so_far.unreached.pop(rank, None)
        await self._bring(alone, {}, "alone")
        return Restored(
            moved=[self._copies[rank] for rank in sorted(so_far.moved) if not self._in_place(rank)],
            verified=[self._copies[rank] for rank in sorted(so_far.moved) if self._in_place(rank)],
            failed=[self._failed(rank, reason) for rank, reason in sorted(so_far.damaged.items())],
            unreached=[self._failed(rank, reason) for rank, reason in sorted(so_far.unreached.items())],
            bytes=sum(reply.bytes for reply in so_far.moved.values()),
            seconds=round(clock.time() - began, 4),
            unreachable=sorted(so_far.silent),
        )

    async def _bring(self, ranks: Collection[int], from_reader: Mapping[int, int], phase: str) -> None:
        """Ask all machines at once, and again for what could not be fetched, until the time is up."""
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
        so_far = self._so_far
        wanted: dict[str, list[int]] = defaultdict(list)
        for rank in sorted(ranks):
            wanted[self._assignment.home(rank).name].append(rank)
        answering = wanted.keys() - so_far.silent
        asked = [machine for machine in self._restore.machines if machine.name in answering]

        async def restore_machine(machine: Machine, client: AgentClient) -> pb.RestoreReply:
            request = pb.RestoreRequest(
                request_id=f"{request_id()}/{label}",
                job=self._restore.spec.name,
                shards=[self._source(rank, from_reader.get(rank)) for rank in wanted[machine.name]],
                checkpoint=checkpoint_options(self._restore.spec),
                run=self._restore.run,
            )
            size_mb = sum(self._restore.bytes.get(rank, 0) for rank in wanted[machine.name]) / 1e6
            patience_s = LEAST_S + size_mb / SLOWEST_MB_S
            restore = self._restore
            return await prepared(
                client, restore.spec, restore.run, lambda: client.restore(request, timeout_s=patience_s)
            )

        done, silent = await on_all(
            self._agents, asked, restore_machine, say=self._say, patience_s=self._restore.patience_s
        )
        so_far.silent.update(silent)
        for machine, reply in done.items():
            answers = {shard.rank: shard for shard in reply.shards}
            for rank in wanted[machine]:
                self._take(rank, answers.get(rank, pb.ShardRestored(reason=f"{machine} said nothing of it")))

    def _take(self, rank: int, answer: pb.ShardRestored) -> None:
        so_far = self._so_far
        so_far.unreached.pop(rank, None)
        if answer.ok:
            so_far.moved[rank] = answer
        elif answer.damaged:
            so_far.damaged[rank] = answer.reason
        else:
            so_far.unreached[rank] = answer.reason

    def _source(self, rank: int, reader: int | None) -> pb.ShardSource:
        copy = self._copies[rank]
        at_home = copy.machine == self._assignment.home(rank).name
        source = pb.ShardSource(
            rank=rank,
            completed_steps=copy.completed_steps,
            tier=TO_WIRE[copy.tier],
            machine=copy.machine,
            address="" if at_home else self._addresses.get(copy.machine, ""),
            saved_ns=copy.saved_ns,
        )
        if reader is not None:
            source.tensors_rank = reader
            source.tensors_address = self._assignment.home(reader).address
        return source

    def _in_place(self, rank: int) -> bool:
        """Whether a rank's copy is its own slot already, and is only verified."""
        copy = self._copies[rank]
        return copy.tier is Tier.OWN and copy.machine == self._assignment.home(rank).name

    def _failed(self, rank: int, reason: str) -> StateCopy:
        copy = self._copies[rank]
        return StateCopy(**copy.model_dump(), valid=False, reason=reason or "the agent gives no reason")
