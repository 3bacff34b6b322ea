"""What the parts that keep copies of training state agree on: terms of a launch, the place, the tiers below memory.

One ``JobCheckpoints`` per job (``agent/checkpoints/job_checkpoints.py``) owns them. Between Launch and Stop
it is *open*: saves are told to the sender and to the lower tiers. After Stop
nothing is sent, received or written, so that what Stop answered stays true.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from google.protobuf import json_format

from agent.checkpoints.saved_state import SavedStates
from agent.v1 import agent_pb2 as pb
from everstep import environment
from everstep.slots.format import SlotHeader


@dataclass(frozen=True)
class LaunchOptions:
    """What a Launch said about copies. Kept in the job's record, so that a restarted agent goes on by itself."""

    generation: int
    resume_step: int
    """Copies of later steps, saved in earlier generations, belong to an abandoned future."""
    ranks: tuple[int, ...]
    """This machine's."""
    options: pb.CheckpointOptions
    peers: tuple[pb.BackupPeer, ...] = ()
    topology: str = ""
    """As in ``EVERSTEP_TOPOLOGY``; empty: not known."""
    run: str = ""
    """Which run of the job's name; empty: not known."""

    @classmethod
    def of(cls, request: pb.LaunchRequest) -> LaunchOptions:
        """The terms of a Launch."""
        return cls(
            generation=request.generation,
            resume_step=request.resume_step,
            ranks=tuple(sorted(rank.rank for rank in request.ranks)),
            options=request.checkpoint,
            peers=tuple(sorted(request.peers, key=lambda peer: peer.rank)),
            topology=request.env.get(environment.TOPOLOGY, ""),
            run=request.run,
        )

    def to_json(self) -> str:
        """For the job's record; ``from_json`` reads it."""
        kept = pb.LaunchRequest(
            generation=self.generation,
            resume_step=self.resume_step,
            ranks=[pb.RankLaunch(rank=rank) for rank in self.ranks],
            checkpoint=self.options,
            peers=self.peers,
            env={environment.TOPOLOGY: self.topology},
            run=self.run,
        )
        return json_format.MessageToJson(kept, indent=None)

    @classmethod
    def from_json(cls, text: str) -> LaunchOptions:
        """What ``to_json`` wrote; raises ValueError."""
        try:
            return cls.of(json_format.Parse(text, pb.LaunchRequest(), ignore_unknown_fields=True))
        except json_format.ParseError as error:
            raise ValueError(f"terms cannot be read: {error}") from error

    def abandons(self, header: SlotHeader) -> bool:
        """Whether a copy belongs to a future that this generation does not go on from."""
        return abandoned(header, self.generation, self.resume_step)


def abandoned(header: SlotHeader, generation: int, resume_step: int) -> bool:
    """Whether a copy belongs to a future that a generation does not go on from, which began at a step."""
    later = resume_step <= 0 or header.completed_steps > resume_step
    return header.generation < generation and later


@dataclass(frozen=True)
class Place:
    """Where the copies of one job lie on this machine."""

    job: str
    machine: str
    shm: Path
    """The job's folder in shared memory: ``checkpoint-<rank>``, ``backup-<rank>``, ``bell``."""
    state_dir: Path
    """The agent's; disk checkpoints are under ``checkpoints/<job>`` unless a path is configured."""
    saved: SavedStates
    """To be told of what is on disk and remote."""
    run: str = ""
    """Which run of the job's name they are of; empty: not known."""


FetchRange = Callable[[str, str, int, int, memoryview], SlotHeader]
"""``fetch(address, job, rank, step, view)``: fill ``view`` with the first bytes of the payload of an own slot at
another agent; returns its header. Raises CorruptCheckpoint when it is not there, AgentUnreachable, OSError."""


class LowerTiers(Protocol):
    """Disk and remote storage, of one job. Every method but ``on_saved`` and ``persist`` may take its time: it is
    called in a thread, one at a time. ``JobTiers(place, fetch)`` in ``agent/checkpoints/tiers/job_tiers.py`` is one."""

    def open(self, terms: LaunchOptions) -> None:
        """A generation starts, or goes on after the agent was restarted: set abandoned steps aside, start to write.

        Generations count from 1 in each run of a job, and what an earlier run left on disk may be of a higher one.
        """

    def on_saved(self, rank: int, header: SlotHeader) -> None:
        """A slot of an own file is committed; called in the bell's thread, returns at once. Only while open."""

    def persist(self, request: pb.PersistRequest) -> None:
        """Write a coming step too, and keep what all ranks of the job have on disk; returns at once."""

    def shut(self) -> None:
        """Stop: nothing is written to disk any more when this returns. Copies under way to remote may go on."""

    def held(self, request: pb.CheckpointsRequest) -> list[pb.HeldCheckpoint]:
        """What lies on disk, and on remote storage where the request names it; headers only unless ``verify``."""

    def restore(self, shard: pb.ShardSource, options: pb.CheckpointOptions, fenced: int) -> int:
        """Fill the own slot file of ``shard.rank`` from disk or remote; returns the bytes moved.

        The slot's generation is that of the copy, and ``fenced`` (the newest that was stopped) at most: that of
        another run means nothing in this one.

        Raises:
            CorruptCheckpoint: the copy is bad or gone.
            AgentUnreachable, CheckpointError, OSError: it cannot be read now, or there is no room.
        """

    def close(self) -> None:
        """The job or the agent ends: threads end; what is on disk stays."""
