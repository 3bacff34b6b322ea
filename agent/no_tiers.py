"""Stands for the tiers below memory until they are there."""

from __future__ import annotations

from agent.terms import FetchRange, Place, Terms
from agent.v1 import agent_pb2 as pb
from everstep.errors import CorruptCheckpoint
from everstep.slot_format import SlotHeader


class JobTiers:
    """None."""

    def __init__(self, place: Place, fetch: FetchRange) -> None:
        pass

    def open(self, terms: Terms) -> None:
        """Nothing."""

    def on_saved(self, rank: int, header: SlotHeader) -> None:
        """Nothing."""

    def persist(self, step: int) -> None:
        """Nothing."""

    def shut(self) -> None:
        """Nothing."""

    def held(self, request: pb.CheckpointsRequest) -> list[pb.HeldCheckpoint]:
        """Nothing."""
        return []

    def restore(self, shard: pb.ShardSource, options: pb.CheckpointOptions, fenced: int) -> int:
        """Nothing."""
        raise CorruptCheckpoint("no such tier")

    def close(self) -> None:
        """Nothing."""
