"""What the parts that keep copies of training state agree on: what a launch said, and the place.

One ``JobCheckpoints`` per job (``agent/checkpoints/job_checkpoints.py``) owns them. Between Launch and Stop
it is *open*: saves are told to the sender and to the lower tiers. After Stop
nothing is sent, received or written, so that what Stop answered stays true.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from google.protobuf import json_format

from agent.checkpoints.saved_state import SavedStates
from agent.v1 import agent_pb2 as pb
from everstep.rank import environment
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
        """What a Launch says."""
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
        """For the job's record; ``from_json`` reads it. It is a Launch: protobuf has the fields of later versions."""
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
            raise ValueError(f"what the launch said cannot be read: {error}") from error

    def abandons(self, header: SlotHeader) -> bool:
        """Whether a copy is of a step that this generation does not continue from."""
        return abandoned(header, self.generation, self.resume_step)


def abandoned(header: SlotHeader, generation: int, resume_step: int) -> bool:
    """Whether an earlier generation saved a copy after the step at which this generation began."""
    later = resume_step <= 0 or header.completed_steps > resume_step
    return header.generation < generation and later


@dataclass(frozen=True)
class Place:
    """Where the copies of one job lie on this machine."""

    job: str
    machine: str
    shm: Path
    """The job's folder in shared memory: ``checkpoint-<rank>``, ``backup-<rank>``, and the FIFO of saves."""
    state_dir: Path
    """The agent's; disk checkpoints are under ``checkpoints/<job>`` unless a path is configured."""
    saved: SavedStates
    """To be told of what is on disk and remote."""
    run: str = ""
    """Which run of the job's name they are of; empty: not known."""
    version_of: Callable[[int], int] = lambda _: 0
    """Which version of the job's code a generation ran; 0: not known. Called in any thread."""


FetchRange = Callable[[str, str, int, int, memoryview], SlotHeader]
"""``fetch(address, job, rank, step, view)``: fill ``view`` with the first bytes of the payload of an own slot at
another agent; returns its header. Raises CorruptCheckpoint when it is not there, AgentUnreachable, OSError."""
