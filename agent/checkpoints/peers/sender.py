"""This module sends the saves of this machine's ranks to their peers while a generation runs.

Each peer machine has its own thread; if cards are named, each card has one too. Sending never delays training: if a
rank needs a slot that is being sent, the rank overwrites it, and the sender chooses another step. If a peer is slow or
silent, there are fewer backups; if sending fails, this is logged.
"""

from __future__ import annotations

from collections import defaultdict

from agent.checkpoints.options import LaunchOptions, Place
from agent.checkpoints.peers.cards import Cards
from agent.checkpoints.peers.own_slots import OwnSlots
from agent.checkpoints.peers.peer_sender import ConnectTo, PeerSender
from agent.checkpoints.peers.rate_limit import Limiter
from agent.v1 import agent_pb2 as pb
from everstep.slots.format import SlotHeader


class Sender:
    """Sends the saves of all of a job's ranks on this machine, from ``start`` to ``close``.

    Args:
        place: Locations of the job's copies.
        launch: Checkpoint options of the Launch.
        connect: Connects to other agents' data ports.
        cards: The network cards of this machine that carry backups.
    """

    def __init__(self, place: Place, launch: LaunchOptions, connect: ConnectTo, cards: Cards) -> None:
        options, local = launch.options, {rank: index for index, rank in enumerate(launch.ranks)}
        of_peer: dict[tuple[str, str, int], list[int]] = defaultdict(list)
        for peer in launch.peers if options.backup and not cards.why_not else ():
            of_peer[peer.machine, peer.address, cards.of(local[peer.rank])].append(peer.rank)
        of_machine = Limiter(options.backup_rate_mb_s * 1e6)
        of_card = [Limiter(card.backup_bytes_per_s(options.backup_card_share)) for card in cards.cards]
        self._senders = [
            PeerSender(
                place,
                launch,
                machine=machine,
                address=address,
                card=card,
                ranks=ranks,
                connect=connect,
                limits=[of_machine, of_card[card]],
            )
            for (machine, address, card), ranks in of_peer.items()
        ]
        self._by_rank: dict[int, PeerSender] = {rank: sender for sender in self._senders for rank in sender.ranks}
        self._own_slots = OwnSlots(place, [rank for rank in launch.ranks if rank not in self._by_rank])
        if options.backup and cards.why_not:
            for peer in launch.peers:
                place.saved.update(peer.rank, backup_problem=cards.why_not)

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
