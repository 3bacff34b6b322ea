"""The network cards for state: which are found, which carry a rank's state, and what happens without a choice."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agent.checkpoints.options import LaunchOptions, Place
from agent.checkpoints.peers.backups import PeerBackups
from agent.checkpoints.peers.cards import Cards, MachineNetwork, find_cards
from agent.checkpoints.peers.data_port import DataPort, Tokens
from agent.checkpoints.peers.sender import Sender
from agent.checkpoints.peers.wire import Wire, connect
from agent.checkpoints.saved_state import SavedStates
from agent.monitor.network import netlink
from agent.monitor.network.netlink import Link
from agent.v1 import agent_pb2 as pb
from everstep.base.addresses import Ports
from everstep.errors import CannotInspect, ConfigError
from tests.agent.checkpoints.peers.sides import JOB, OWNER, fresh_shm, offer, save, side
from tests.hosts import own_host

CLONE_NEWNET = 0x40000000
DATA = bytes(range(256)) * 8000
HOST = own_host(43)


class Node:
    """A machine with a management card, two cards for GPUs and two GPUs, as its kernel would describe it."""

    def __init__(self, folder: Path) -> None:
        self.sys = folder
        self.links = [
            Link(1, "lo", loopback=True),
            Link(2, "eth0"),
            Link(3, "ib0", "ipoib"),
            Link(4, "ib1", "ipoib"),
            Link(5, "docker0", "bridge"),
            Link(6, "usb0", carrier=False),
        ]
        self.addresses = {"127.0.0.1": 1, "10.0.4.17": 2, "fe80::3": 3, "fd00::3": 3, "10.1.0.17": 3, "10.1.1.17": 4}
        self.speeds = {"eth0": 1000, "ib0": 400_000, "ib1": 400_000, "docker0": 10_000}
        self.device("0000:08:00.0", "pci0000:00/0000:00:01.0", "ib1")
        self.device("0000:09:00.0", "pci0000:00/0000:00:01.0", gpu="0x030200")
        self.device("0000:18:00.0", "pci0000:10/0000:10:01.0", "ib0")
        self.device("0000:19:00.0", "pci0000:10/0000:10:01.0", gpu="0x030200")
        self.device("0000:1a:00.0", "pci0000:10/0000:10:01.0", gpu="0x010802")

    def device(self, address: str, bridge: str, card: str = "", gpu: str = "") -> None:
        folder = self.sys / "devices" / bridge / address
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text("0\n")
        (folder / "vendor").write_text("0x10de\n" if gpu else "0x15b3\n")
        (folder / "class").write_text(f"{gpu or '0x020700'}\n")
        (self.sys / "bus/pci/devices").mkdir(parents=True, exist_ok=True)
        (self.sys / "bus/pci/devices" / address).symlink_to(folder)
        if card:
            (self.sys / "class/net" / card).mkdir(parents=True)
            (self.sys / "class/net" / card / "device").symlink_to(folder)

    def find(self, *wanted: str, host: str = "10.0.4.17") -> Cards:
        by_name = {link.name: link for link in self.links}
        return find_cards(
            host, wanted, MachineNetwork(lambda: by_name, lambda: self.addresses, lambda: self.speeds, self.sys)
        )


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def test_named_cards_are_found_with_address_speed_and_position(node: Node) -> None:
    cards = node.find("ib0", "10.1.1.17")
    assert [(card.name, card.host, card.speed_mbit) for card in cards.cards] == [
        ("ib0", "10.1.0.17", 400_000),
        ("ib1", "10.1.1.17", 400_000),
    ]
    assert [cards.of(local) for local in range(4)] == [1, 0, 0, 1], "each GPU has the card on its own bridge"
    assert (cards.why_not, cards.without_speed) == ("", [])


def test_an_ipv6_address_names_a_card_too(node: Node) -> None:
    [card] = node.find("[fd00::3]").cards
    assert (card.name, card.host) == ("ib0", "fd00::3")


@pytest.mark.parametrize(
    ("wanted", "told"),
    [
        ("ib7", r"'ib7' is no interface and no address of this machine; there is eth0, ib0, ib1, docker0, usb0"),
        ("10.9.9.9", "'10.9.9.9' is no interface and no address"),
        ("usb0", "usb0 has no IP address, and state is sent by TCP"),
    ],
)
def test_a_card_that_cannot_be_used_is_named(node: Node, wanted: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        node.find("ib0", wanted)


def test_the_card_of_the_agent_s_address_carries_no_backups_unasked(node: Node) -> None:
    cards = node.find()
    assert "do not use eth0" in cards.why_not
    assert "--data-cards ib0,ib1" in cards.why_not
    assert cards.without_speed == []
    asked = node.find("eth0")
    assert (asked.why_not, asked.cards[0].speed_mbit) == ("", 1000)


def _alone(node: Node) -> None:
    node.links = node.links[:2]


def _bond(node: Node) -> None:
    """The agent's address is on a bond of the other cards."""
    node.links = [Link(9, "bond0", "bond"), *(Link(n, f"eth{n}", master=9) for n in (2, 3))]
    node.addresses = {"10.0.4.17": 9}


def _vlan(node: Node) -> None:
    node.links = [Link(9, "eth0.7", "vlan", lower=2), Link(2, "eth0")]
    node.addresses = {"10.0.4.17": 9}


def _pod(node: Node) -> None:
    """In a container, the index of the other end of a veth may be the index of another interface here."""
    node.links = [Link(2, "eth0", "veth", lower=5), Link(5, "tun0", "tun")]


@pytest.mark.parametrize("change", [_alone, _bond, _vlan, _pod])
def test_the_only_card_carries_backups(node: Node, change: Callable[[Node], None]) -> None:
    change(node)
    cards = node.find()
    assert cards.why_not == ""
    assert [card.host for card in cards.cards] == [""], "the other side uses the host at which it reaches the agent"


def test_a_speed_that_is_made_up_counts_as_unknown(node: Node) -> None:
    _pod(node)
    node.speeds["eth0"] = 10_000
    assert node.find().without_speed == ["eth0"]
    assert node.find().cards[0].backup_bytes_per_s(0.25) == 0


def test_loopback_is_no_card(node: Node) -> None:
    for cards in (node.find(host="127.0.0.12"), node.find("127.0.0.12", "127.0.0.13"), node.find(host="::1")):
        assert (cards.why_not, cards.without_speed) == ("", [])


def test_an_address_on_no_known_card_is_used_without_a_limit(node: Node) -> None:
    cards = node.find(host="0.0.0.0")
    assert (cards.why_not, cards.without_speed) == ("", ["the card with the agent's address"])


def test_a_kernel_that_does_not_answer_is_no_reason_against_backups(node: Node) -> None:
    def silent() -> dict[str, Link]:
        raise CannotInspect("no answer")

    machine = MachineNetwork(silent, dict, dict, node.sys)
    assert find_cards("10.0.4.17", (), machine).why_not == ""
    with pytest.raises(ConfigError, match="--data-cards cannot be checked: no answer"):
        find_cards("10.0.4.17", ("ib0",), machine)


def test_a_machine_without_a_choice_neither_sends_nor_accepts_backups(node: Node) -> None:
    cards = node.find()
    with side() as mine, side() as peer:
        header = save(mine.shm / "checkpoint-0", 7, DATA)
        saved = SavedStates()
        sender = _sender(mine.shm, saved, cards, lambda *_: pytest.fail("no connection is made"))
        sender.start()
        sender.on_saved(0, header)
        assert saved.of(0).backup_problem == cards.why_not
        sender.close()

        refusing = DataPort([HOST], peer.tokens, why_not=cards.why_not)
        refusing.start(lambda _: peer.received)
        with contextlib.closing(connect(refusing.addresses[0], JOB, peer.tokens.issue(JOB))) as wire:
            wire.send(offer(header).model_dump())
            assert wire.receive() == {"refused": cards.why_not, "newest": -1}
            save(peer.shm / "backup-1", 5, b"x")
            wire.send({"op": "get", "rank": 1, "step": 5, "file": "backup"})
            assert "header" in wire.receive(), "copies for a restore are still sent"
        refusing.close()
        assert peer.steps(0) == []


def _sender(shm: Path, saved: SavedStates, cards: Cards, connected: Callable[..., Wire], ranks: int = 1) -> Sender:
    options = pb.CheckpointOptions(backup=True, backup_slots=2, backup_every_steps=1, backup_card_share=0.25)
    peers = tuple(pb.BackupPeer(rank=rank, machine="m2", address="m2:1") for rank in range(ranks))
    launch = LaunchOptions(1, 0, tuple(range(ranks)), options, peers)
    return Sender(Place(JOB, "m1", shm, shm, saved), launch, connected, cards)


# Real cards: pairs of veth between two network namespaces.

MISSING = "" if os.geteuid() == 0 and shutil.which("ip") else "network namespaces need root and iproute2"
HERE, THERE = (f"everstep-test-{os.getpid()}-{side}" for side in ("here", "there"))
CARDS = {"eth0": "10.97.4", "rail0": "10.97.10", "rail1": "10.97.11"}
"""Card → its network; the first one is for management."""


def _ip(words: str) -> None:
    subprocess.run(["ip", *words.split()], check=True, capture_output=True)


@contextlib.contextmanager
def entered(namespace: str) -> Iterator[None]:
    """Move this thread, and threads that it starts, into a network namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/proc/thread-self/ns/net").open("rb") as before, Path("/run/netns", namespace).open("rb") as there:
        assert libc.setns(there.fileno(), CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
        try:
            yield
        finally:
            assert libc.setns(before.fileno(), CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())


@pytest.fixture
def _two_machines() -> Iterator[None]:
    if MISSING:
        pytest.skip(MISSING)
    try:
        for namespace in (HERE, THERE):
            _ip(f"netns add {namespace}")
        for card, network in CARDS.items():
            _ip(f"-n {HERE} link add {card} type veth peer name {card} netns {THERE}")
            for number, namespace in enumerate((HERE, THERE), 1):
                _ip(f"-n {namespace} address add {network}.{number}/24 dev {card}")
                _ip(f"-n {namespace} link set {card} up")
        yield
    finally:
        for namespace in (HERE, THERE):
            subprocess.run(["ip", "netns", "del", namespace], capture_output=True, check=False)


@pytest.mark.usefixtures("_two_machines")
def test_each_rank_s_backup_uses_its_own_card_and_none_the_management_card() -> None:
    here, there = fresh_shm(), fresh_shm()
    received, tokens, saved = PeerBackups(there, OWNER), Tokens(), SavedStates()
    token = tokens.issue(JOB)
    with contextlib.ExitStack() as ended:
        for shm in (here, there):
            ended.callback(shutil.rmtree, shm)
        ended.callback(received.close)
        with entered(THERE):
            cards_there = find_cards("10.97.4.2", ("rail0", "rail1"))
            port = DataPort([card.host for card in cards_there.cards], tokens, Ports(7000, 7010))
            port.start(lambda _: received)
        ended.callback(port.close)
        assert [str(address) for address in port.addresses] == ["10.97.10.2:7000", "10.97.11.2:7000"]

        with entered(HERE):
            cards = find_cards("10.97.4.1", ("rail0", "rail1"))

            def connected(_address: str, job: str, card: int, _closing: threading.Event) -> Wire:
                return connect(port.addresses[card], job, token, card=cards.cards[card])

            for rank in range(2):
                save(here / f"checkpoint-{rank}", 7, DATA * (rank + 1))
            sender = _sender(here, saved, cards, connected, ranks=2)
            sender.start()
        ended.callback(sender.close)
        deadline = time.monotonic() + 20
        while not all(saved.of(rank).backup_step == 7 for rank in range(2)):
            assert time.monotonic() < deadline, [saved.of(rank).backup_problem for rank in range(2)]
            time.sleep(0.02)
        with entered(HERE):
            sent = {name: link.statistics["tx_bytes"] for name, link in netlink.links().items()}
    assert len(DATA) < sent["rail0"] < 1.5 * len(DATA)
    assert 2 * len(DATA) < sent["rail1"] < 3 * len(DATA)
    assert sent["eth0"] < 10_000


@pytest.mark.usefixtures("_two_machines")
def test_a_card_sends_itself_although_another_card_is_in_the_same_network() -> None:
    """Without the device, the kernel would send by the first route to the network."""
    _ip(f"-n {THERE} link add br0 type bridge")
    for card in ("rail0", "rail1"):
        _ip(f"-n {THERE} address flush dev {card}")
        _ip(f"-n {THERE} link set {card} master br0")
    _ip(f"-n {THERE} address add 10.97.10.2/24 dev br0")
    _ip(f"-n {THERE} link set br0 up")
    _ip(f"-n {HERE} address flush dev rail1")
    _ip(f"-n {HERE} address add 10.97.10.11/24 dev rail1")
    settings = ["net.ipv4.conf.all.arp_ignore=1", "net.ipv4.conf.all.arp_announce=2"]  # docs/guides/deploy.md
    subprocess.run(["ip", "netns", "exec", HERE, "sysctl", "-q", *settings], check=True)
    there = fresh_shm()
    tokens = Tokens()
    with contextlib.ExitStack() as ended:
        ended.callback(shutil.rmtree, there)
        with entered(THERE):
            port = DataPort(["10.97.10.2"], tokens)
            port.start(lambda _: PeerBackups(there, OWNER))
        ended.callback(port.close)
        with entered(HERE):
            [rail] = find_cards("10.97.4.1", ("rail1",)).cards
            before = netlink.links()["rail1"].statistics["tx_bytes"]
            for _ in range(20):
                with contextlib.closing(connect(port.addresses[0], JOB, tokens.issue(JOB), card=rail)) as wire:
                    wire.send({"op": "get", "rank": 0, "step": 1, "file": "own"})
                    assert "gone" in wire.receive()
            after = netlink.links()["rail1"].statistics["tx_bytes"]
    assert after - before > 20 * 100
