"""Sends the saves of this machine's ranks to their peers, for as long as a generation runs.

One thread for each peer machine. It never holds anything up: a rank that needs
a slot which is being sent takes it, and the sender chooses another step; a peer
that is slow or silent costs steps that are not backed up, and a line that says so.
"""

from __future__ import annotations

from agent.checkpoints.options import LaunchOptions, Place
from agent.checkpoints.peers.own_slots import OwnSlots
from agent.checkpoints.peers.peer_sender import ConnectTo, PeerSender
from agent.checkpoints.peers.rate_limit import Limiter
from agent.v1 import agent_pb2 as pb
from everstep.slots.format import SlotHeader


class Sender:
    """All of a job's ranks on this machine, from ``start`` to ``close``."""

    def __init__(self, place: Place, terms: LaunchOptions, connect: ConnectTo) -> None:
        options = terms.options
        peers: dict[tuple[str, str], list[int]] = {}
        for peer in terms.peers if options.backup else ():
            peers.setdefault((peer.machine, peer.address), []).append(peer.rank)
        limiter = Limiter(options.backup_rate_mb_s * 1e6)
        self._lanes = [
            PeerSender(place, terms, machine=machine, address=address, ranks=ranks, connect=connect, limiter=limiter)
            for (machine, address), ranks in peers.items()
        ]
        self._by_rank: dict[int, PeerSender] = {rank: lane for lane in self._lanes for rank in lane.ranks}
        self._keeper = OwnSlots(place, [rank for rank in terms.ranks if rank not in self._by_rank])

    def start(self) -> None:
        """Begin."""
        for lane in self._lanes:
            lane.start()

    def on_saved(self, rank: int, header: SlotHeader) -> None:
        """A rank saved something."""
        if lane := self._by_rank.get(rank):
            lane.wake()
        else:
            self._keeper.on_saved(rank, header)

    def align(self, request: pb.AlignRequest) -> None:
        """Back up the same steps as all other machines, or again on our own; returns at once."""
        for rank, lane in self._by_rank.items():
            lane.align(rank, request)
        for rank in self._keeper.ranks:
            self._keeper.align(rank, request)

    def close(self) -> None:
        """End; what is under way is broken off."""
        self._keeper.close()
        for lane in self._lanes:
            lane.end()
        for lane in self._lanes:
            lane.join()
