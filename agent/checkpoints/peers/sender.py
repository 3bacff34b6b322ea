"""This module sends the saves of this machine's ranks to their peers while a generation runs.

Each peer machine has its own thread. Sending never delays training: if a rank needs a slot that is being sent, the rank
overwrites it, and the sender chooses another step. If a peer is slow or silent, there are fewer backups; if sending
fails, this is logged.
"""

from __future__ import annotations

from agent.checkpoints.options import LaunchOptions, Place
from agent.checkpoints.peers.own_slots import OwnSlots
from agent.checkpoints.peers.peer_sender import ConnectTo, PeerSender
from agent.checkpoints.peers.rate_limit import Limiter
from agent.v1 import agent_pb2 as pb
from everstep.slots.format import SlotHeader


class Sender:
    """Sends the saves of all of a job's ranks on this machine, from ``start`` to ``close``."""

    def __init__(self, place: Place, launch: LaunchOptions, connect: ConnectTo) -> None:
        options = launch.options
        peers: dict[tuple[str, str], list[int]] = {}
        for peer in launch.peers if options.backup else ():
            peers.setdefault((peer.machine, peer.address), []).append(peer.rank)
        limiter = Limiter(options.backup_rate_mb_s * 1e6)
        self._senders = [
            PeerSender(place, launch, machine=machine, address=address, ranks=ranks, connect=connect, limiter=limiter)
            for (machine, address), ranks in peers.items()
        ]
        self._by_rank: dict[int, PeerSender] = {rank: sender for sender in self._senders for rank in sender.ranks}
        self._own_slots = OwnSlots(place, [rank for rank in launch.ranks if rank not in self._by_rank])

    def start(self) -> None:
        """Start all threads."""
        for sender in self._senders:
            sender.start()

    def on_saved(self, rank: int, header: SlotHeader) -> None:
        """Handle the save of a rank."""
        if sender := self._by_rank.get(rank):
            sender.wake()
        else:
            self._own_slots.on_saved(rank, header)

    def align(self, request: pb.AlignBackupsRequest) -> None:
        """Back up the step that all machines back up, or any step again; returns at once."""
        for rank, sender in self._by_rank.items():
            sender.align(rank, request)
        for rank in self._own_slots.ranks:
            self._own_slots.align(rank, request)

    def close(self) -> None:
        """End all threads; transfers in progress are broken off."""
        self._own_slots.close()
        for sender in self._senders:
            sender.end()
        for sender in self._senders:
            sender.join()
