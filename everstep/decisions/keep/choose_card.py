"""Chooses the network card that carries the state of a rank, and the share of its speed that backups may take.

A machine for training often has one fast card for each GPU, near the GPU on the same PCI switch, and a slow card for
management. A rank's state uses the card of its GPU. Cards with the same position on two machines are connected: in a
network with rails, card 3 of every machine is on rail 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath

MEGABIT = 1e6 / 8
"""Bytes of a megabit."""


@dataclass(frozen=True, slots=True)
class Device:
    """The position of a GPU or of a network card in a machine."""

    path: PurePath
    """Path below ``/sys/devices``, e.g. ``pci0000:15/0000:15:01.0/0000:19:00.0``."""
    numa: int = -1
    """NUMA node; negative: not known."""


@dataclass(frozen=True, slots=True)
class Card:
    """A network card."""

    name: str = ""
    """Name of its interface; empty: not known."""
    host: str = ""
    """Its address, without brackets; empty: the host at which a caller reaches the agent."""
    speed_mbit: int = 0
    """Speed, Mbit/s; 0: not known."""
    device: Device | None = None
    """Its position; None: not known."""
    loopback: bool = False

    def backup_bytes_per_s(self, share: float) -> float:
        """The limit of backups over this card, bytes/s; 0: there is no limit, because the speed is not known or
        ``share`` is 0."""
        return share * self.speed_mbit * MEGABIT


def card_of(local_rank: int, cards: Sequence[Card], gpus: Sequence[Device]) -> int:
    """The index of the card that carries the state of a rank.

    The nearest card of the rank's GPU is chosen. If several cards are equally near, the GPUs that share them take them
    in turn. Without this knowledge, the cards are taken in turn: card 3 for local rank 3.

    Args:
        local_rank: Index of the rank on its machine; it uses the GPU with this index.
        cards: The cards, at least one.
        gpus: The GPUs in the order of their indexes; empty: not known.
    """
    devices = [card.device for card in cards if card.device]
    if local_rank >= len(gpus) or len(devices) < len(cards):
        return local_rank % len(cards)
    near = [_nearest(gpu, devices) for gpu in gpus]
    shared = near[local_rank]
    return shared[near[:local_rank].count(shared) % len(shared)]


def _nearest(gpu: Device, cards: Sequence[Device]) -> list[int]:
    nearness = [_nearness(gpu, card) for card in cards]
    return [index for index, value in enumerate(nearness) if value == max(nearness)]


def _nearness(one: Device, other: Device) -> tuple[int, bool]:
    """How near two devices are: the number of PCI bridges that they share, then whether they share a NUMA node."""
    common = 0
    for mine, theirs in zip(one.path.parts, other.path.parts, strict=False):
        if mine != theirs:
            break
        common += 1
    return common, one.numa == other.numa >= 0


def why_not_backed_up(control: Card | None, others: Sequence[str]) -> str:
    """Why a machine whose operator named no card sends and receives no backups; empty: it does.

    Backups would fill the card with the agent's own address. It often carries the management of the machine, and also
    the messages that detect faults. So an operator has to decide, if there is another card.

    Args:
        control: The card with the agent's address; None: the address is on no known card.
        others: Names of other network cards with a link.
    """
    if control is None or control.loopback or not others:
        return ""
    names = ",".join(others)
    return (
        f"no card is named for backups, and they do not use {control.name}, which has the agent's own address, while "
        f"there are other cards ({names.replace(',', ', ')}). Start the agent with --data-cards {names}, or with "
        f"--data-cards {control.name} to use {control.name} all the same"
    )
