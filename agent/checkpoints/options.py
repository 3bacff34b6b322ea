"""This module has the checkpoint options of a launch, and the locations of a job's copies on this machine.

Copying (``agent/checkpoints/job_checkpoints.py``) is *open* between Launch and Stop. After Stop nothing is sent,
received or written, so that the list of copies in the answer to Stop stays true.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from google.protobuf import json_format

from agent.checkpoints.saved_state import SavedStates
from agent.v1 import agent_pb2 as pb
from everstep.rank import environment
from everstep.slots.format import ANY_SAVE, SlotHeader
from everstep.slots.owner import SlotOwner


def saves_of(shard: pb.ShardSource) -> range:
    """Return the times, nanoseconds, at which the chosen save of a copy was made; empty: any save."""
    return range(shard.saved_ns, max(shard.saved_ns, shard.saved_until_ns) + 1) if shard.saved_ns else ANY_SAVE


@dataclass(frozen=True)
class LaunchOptions:
    """Checkpoint options of a Launch, kept in the job's record so that a restarted agent can resume copying."""

    generation: int
    resume_step: int
    """The step from which the generation resumes. If an earlier generation saved a copy of a later step, the copy
    belongs to an abandoned future."""
    ranks: tuple[int, ...]
    """Ranks on this machine."""
    options: pb.CheckpointOptions
    peers: tuple[pb.BackupPeer, ...] = ()
    topology: str = ""
    """Topology in the format of ``EVERSTEP_TOPOLOGY``; empty: not known."""
    run: str = ""
    """Id of the run of the job; empty: not known."""

    @classmethod
    def of(cls, request: pb.LaunchRequest) -> LaunchOptions:
        """Extract the options from a Launch request."""
        return cls(
            generation=request.generation,
            resume_step=request.resume_step,
            ranks=tuple(sorted(rank.rank for rank in request.ranks)),
            options=request.checkpoint,
            peers=tuple(sorted(request.peers, key=lambda peer: peer.rank)),
            topology=request.program.env.get(environment.TOPOLOGY, ""),
            run=request.run,
        )

    def to_json(self) -> str:
        """Format the options as a Launch request in JSON, for the job's record. New fields of the messages are kept."""
        kept = pb.LaunchRequest(
            generation=self.generation,
            resume_step=self.resume_step,
            ranks=[pb.RankLaunch(rank=rank) for rank in self.ranks],
            checkpoint=self.options,
            peers=self.peers,
            program=pb.Program(env={environment.TOPOLOGY: self.topology}),
            run=self.run,
        )
        return json_format.MessageToJson(kept, indent=None)

    @classmethod
    def from_json(cls, text: str) -> LaunchOptions:
        """Parse the text that ``to_json`` wrote; raises ValueError."""
        try:
            return cls.of(json_format.Parse(text, pb.LaunchRequest(), ignore_unknown_fields=True))
        except json_format.ParseError as error:
            raise ValueError(f"the options of the launch cannot be read: {error}") from error

    def abandons(self, header: SlotHeader) -> bool:
        """Return whether this generation abandons the step of a copy."""
        return abandoned(header, self.generation, self.resume_step)


def abandoned(header: SlotHeader, generation: int, resume_step: int) -> bool:
    """Return whether an earlier generation saved the copy, and its step is later than the one to resume from."""
    later = resume_step <= 0 or header.completed_steps > resume_step
    return header.generation < generation and later


@dataclass(frozen=True)
class Place:
    """Locations of one job's copies on this machine."""

    job: str
    machine: str
    shm: Path
    """The job's folder in shared memory: ``checkpoint-<rank>``, ``backup-<rank>``, and the FIFO of saves."""
    state_dir: Path
    """The agent's state folder; disk checkpoints are under ``checkpoints/<job>`` unless a path is configured."""
    saved: SavedStates
    """Records the newest copies of each rank."""
    run: str = ""
    """Id of the run that saved the copies; empty: not known."""
    version_of: Callable[[int], int] = lambda _: 0
    """Returns the version of the job's code that a generation ran; 0: not known. Called in any thread."""

    def owner(self, rank: int) -> SlotOwner:
        """Return the owner of the slots of a rank, which own slots and backups must have."""
        return SlotOwner(self.job, self.run, rank)


FetchRange = Callable[[str, str, int, int, memoryview], SlotHeader]
"""``fetch(address, job, rank, step, view)``: fill ``view`` with the first bytes of the payload of an own slot at
another agent; returns the slot's header. Raises CorruptCheckpoint if the slot is missing, AgentUnreachable, OSError."""
