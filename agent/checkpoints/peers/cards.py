"""This module finds the network cards of this machine that carry training state, and the GPUs near them."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePath

from agent.monitor.network import interfaces, netlink
from agent.monitor.network.netlink import Link
from everstep.base.addresses import is_loopback
from everstep.base.text import listed
from everstep.decisions.keep.choose_card import Card, Device, card_of, why_not_backed_up
from everstep.errors import CannotInspect, ConfigError

HARDWARE = {"", "ipoib"}
"""Kinds of interfaces that are network cards, as rtnetlink names them."""
WITH_SPEED = HARDWARE | {"bond", "team", "vlan"}
"""Kinds of interfaces that have the speed of network cards. That of a ``veth``, e.g. in a container, is made up."""
ABOVE = {"vlan", "macvlan", "ipvlan"}
"""Kinds of interfaces that lie on another interface of the same machine."""
GPU_CLASSES = ("0x0300", "0x0302", "0x0380", "0x1200")
"""Beginnings of the PCI classes of GPUs: VGA and 3D controllers, other displays, processing accelerators."""
GPU_VENDORS = ("0x10de", "0x1002")
"""PCI vendors of GPUs for training: NVIDIA, AMD."""


@dataclass(frozen=True)
class Cards:
    """The network cards that carry the state of this machine's ranks."""

    cards: tuple[Card, ...] = (Card(),)
    gpus: tuple[Device, ...] = ()
    """The GPUs in the order of their PCI addresses, which is that of their indexes."""
    why_not: str = ""
    """Why this machine sends and receives no backups; empty: it does."""

    def of(self, local_rank: int) -> int:
        """Return the index of the card for a rank, by the rank's index on this machine."""
        return card_of(local_rank, self.cards, self.gpus)

    @property
    def without_speed(self) -> list[str]:
        """Return the cards whose speed is not known; backups are not limited to a share of it."""
        return [
            card.name or "the card with the agent's address"
            for card in self.cards
            if not (card.loopback or card.speed_mbit or self.why_not)
        ]


@dataclass(frozen=True)
class MachineNetwork:
    """What this machine's kernel says about interfaces and devices; tests replace it."""

    links: Callable[[], dict[str, Link]] = netlink.links
    addresses: Callable[[], dict[str, int]] = netlink.addresses
    speeds: Callable[[], dict[str, int]] = interfaces.speeds
    sys: Path = Path("/sys")


def find_cards(host: str, wanted: Sequence[str], machine: MachineNetwork | None = None) -> Cards:
    """Return the cards that carry state.

    Args:
        host: Host on which the agent listens.
        wanted: Names or addresses of interfaces; empty: the interface with the agent's address.
        machine: This machine; None: as its kernel describes it.

    Raises:
        ConfigError: an interface in ``wanted`` does not exist or has no address.
    """
    machine = machine or MachineNetwork()
    try:
        links, addresses = machine.links(), machine.addresses()
    except CannotInspect as error:
        if wanted:
            raise ConfigError(f"--data-cards cannot be checked: {error}") from error
        return Cards()
    known = {link.index: link for link in links.values()}

    def card(address: str, name: str = "") -> Card:
        if is_loopback(address):
            return Card("lo", address, loopback=True)
        link = links[name] if name else known.get(addresses.get(address, -1))
        if link is None:
            return Card(host=address)
        speed = machine.speeds().get(link.name, 0) if link.kind in WITH_SPEED else 0
        # /sys may show another network namespace, where a virtual interface of this one would be a card.
        device = _device(machine.sys / "class/net" / link.name / "device") if link.kind in HARDWARE else None
        return Card(link.name, address, speed, device)

    if wanted:
        cards = tuple(card(*_chosen(name, links, addresses)) for name in wanted)
        return Cards(cards, _gpus(machine.sys))
    own = card(interfaces.address_of(host) or host)
    others = _others(own, links)
    # The other side uses the host at which it reaches this agent, which may be a name or another address of the card.
    unnamed = Card(own.name, "", own.speed_mbit, own.device, own.loopback)
    return Cards((unnamed,), why_not=why_not_backed_up(own if own.name else None, others))


def _chosen(wanted: str, links: Mapping[str, Link], addresses: Mapping[str, int]) -> tuple[str, str]:
    """Return the address and the interface of an entry of ``--data-cards``.

    Raises:
        ConfigError: there is no such interface, or it has no address.
    """
    if wanted in links:
        own = [address for address, index in addresses.items() if index == links[wanted].index]
        usable = sorted(filter(_is_usable, own), key=lambda address: ":" in address)
        if not usable:
            raise ConfigError(
                f"--data-cards: {wanted} has no IP address, and state is sent by TCP: give it an address, or name "
                "another card"
            )
        return usable[0], wanted
    with suppress(ValueError):
        address = str(ipaddress.ip_address(wanted.strip("[]")))
        if address in addresses or is_loopback(address):
            return address, ""
    there = listed([link.name for link in links.values() if not link.loopback]) or "only the loopback interface"
    raise ConfigError(f"--data-cards: {wanted!r} is no interface and no address of this machine; there is {there}")


def _is_usable(address: str) -> bool:
    return not ipaddress.ip_address(address).is_link_local


def _others(own: Card, links: Mapping[str, Link]) -> list[str]:
    """Return the names of network cards with a link, without those that carry the agent's own address."""
    if own.name not in links:
        return []
    link = links[own.name]
    mine = {link.index, link.lower if link.kind in ABOVE else link.index}
    mine |= {each.index for each in links.values() if each.master in mine}
    return sorted(
        each.name
        for each in links.values()
        if each.kind in HARDWARE and each.carrier and not each.loopback and each.index not in mine
    )


def _gpus(sys: Path) -> tuple[Device, ...]:
    found = []
    with suppress(OSError):
        for path in sorted((sys / "bus/pci/devices").iterdir(), key=lambda path: path.name):
            if _line(path / "vendor") in GPU_VENDORS and _line(path / "class").startswith(GPU_CLASSES):
                found.append(_device(path))
    return tuple(device for device in found if device)


def _device(link: Path) -> Device | None:
    """Return the position of a device; ``link`` is a link to its folder below ``/sys/devices``."""
    try:
        path = link.resolve(strict=True)
    except OSError:
        return None
    with suppress(ValueError):
        return Device(PurePath(*path.parts[path.parts.index("devices") + 1 :]), int(_line(path / "numa_node") or -1))
    return None


def _line(path: Path) -> str:
    with suppress(OSError):
        return path.read_text().strip()
    return ""
