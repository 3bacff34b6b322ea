"""How much room this machine has for checkpoints: shared memory, memory, disk."""

from __future__ import annotations

from pathlib import Path

from agent.v1 import agent_pb2 as pb
from everstep.memory import free, memory_available


def room(shm_dir: Path, state_dir: Path) -> pb.Room:
    """What is free, bytes."""
    return pb.Room(shm_free=free(shm_dir), memory_available=memory_available(), disk_free=free(state_dir))
