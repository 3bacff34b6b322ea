"""The sender: which steps it sends and pins, and how it handles a peer that fails."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from agent.checkpoints.options import LaunchOptions, Place
from agent.checkpoints.peers import peer_sender
from agent.checkpoints.peers.cards import Cards
from agent.checkpoints.peers.sender import Sender
from agent.checkpoints.peers.wire import Wire
from agent.checkpoints.save_watch import SaveWatch
from agent.checkpoints.saved_state import SavedStates
from agent.v1 import agent_pb2 as pb
from everstep.decisions.keep.choose_card import Card
from everstep.errors import AgentUnreachable
from everstep.slots.file import SlotFile
from everstep.slots.format import Pin, SlotHeader
from tests.agent.checkpoints.peers.sides import JOB, OWNER, Side, save, side
from tests.everstep.slots.saved import payload_at, pins_in

DATA = bytes(range(256)) * 400


class Mine:
    """One machine with its sender; with ``failure``, the connection to the peer fails."""

    def __init__(
        self, here: Side, peer: Side, *, ranks: tuple[int, ...] = (0,), cards: Cards | None = None, **options: float
    ) -> None:
        self.here = here
        self.peer = peer
        self.saved = SavedStates()
        self.failure: Exception | None = None
        self.connections = 0
        self.cards_used: set[int] = set()
        place = Place(JOB, "m1", here.shm, here.shm, self.saved)
        chosen = {"backup": True, "backup_slots": 2, "backup_every_steps": 1} | options
        peers = tuple(pb.BackupPeer(rank=rank, machine="m2", address="nowhere:1") for rank in ranks)
        launch = LaunchOptions(1, 0, ranks, pb.CheckpointOptions(**chosen), peers)  # type: ignore[arg-type]
        self.sender = Sender(place, launch, self._connect, cards or Cards())
        self.save_watch = SaveWatch(place, [self.sender.on_saved])
        self.sender.start()
        self.save_watch.start()

    def _connect(self, address: str, job: str, card: int, closing: threading.Event) -> Wire:
        if self.failure:
            raise self.failure
        self.connections += 1
        self.cards_used.add(card)
        return self.peer.connect(patience_s=1)

    def save(self, step: int, rank: int = 0, data: bytes = DATA) -> SlotHeader:
        return save(self.here.shm / f"checkpoint-{rank}", step, data)

    def state(self, rank: int = 0) -> pb.SavedState:
        return self.saved.of(rank)

    def close(self) -> None:
        self.sender.close()
        self.save_watch.close()


@pytest.fixture
def mine() -> Iterator[Mine]:
    with side() as here, side() as peer:
        found = Mine(here, peer)
        yield found
        found.close()


def wait(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, f"after 20 s this is still not true: {what}"
        time.sleep(0.005)


def test_every_step_is_backed_up_if_the_rank_saves_slowly(mine: Mine) -> None:
    for step in range(1, 6):
        mine.save(step)
        wait(lambda step=step: mine.state().backup_step == step, f"step {step}")  # type: ignore[misc]
        assert mine.peer.payload(0, step) == mine.here.payload(0, step, "checkpoint")
    assert mine.connections == 1
    assert mine.peer.steps(0) == [4, 5]
    state = mine.state()
    assert state.backup_problem == ""

    def pins() -> tuple[int, int]:
        found = pins_in(mine.here.shm / "checkpoint-0")
        return found[Pin.KEEP], found[Pin.BACKUP]

    wait(
        lambda: pins() == (5, -1),
        "the step that was sent is not pinned for sending any more, and is pinned for keeping",
    )


def test_only_every_nth_step() -> None:
    with side() as here, side() as peer:
        mine = Mine(here, peer, backup_every_steps=3)
        for step in range(1, 8):
            mine.save(step)
            if step % 3 == 0:
                wait(lambda step=step: mine.state().backup_step == step, f"step {step}")  # type: ignore[misc]
        assert peer.steps(0) == [3, 6]
        mine.close()


def test_a_named_step_replaces_a_later_backup_but_not_the_complete_step(mine: Mine) -> None:
    for step in (4, 6):
        mine.save(step)
        wait(lambda step=step: mine.state().backup_step == step, f"step {step}")  # type: ignore[misc]
    mine.saved.update(0, own_step=6, backup_named=5, backup_whole=4)
    mine.sender.align(pb.AlignBackupsRequest(named=7, whole=4, settled=5))
    pins = pins_in(mine.here.shm / "checkpoint-0")
    assert (pins[Pin.KEEP], pins[Pin.NAMED]) == (4, 7), "step 7 is pinned before it is saved"
    for step in (7, 8):
        mine.save(step)
        wait(lambda: mine.state().backup_step == 7, "step 7")
    mine.sender.align(pb.AlignBackupsRequest(named=0, settled=6))
    time.sleep(0.1)
    assert mine.peer.steps(0) == [4, 7]

    mine.sender.align(pb.AlignBackupsRequest(named=0, settled=7))
    wait(lambda: mine.state().backup_step == 8, "no step is named any more, so the newest step is sent")
    assert mine.peer.steps(0) == [7, 8]


def test_all_ranks_with_the_same_peer_are_backed_up() -> None:
    with side() as here, side() as peer:
        mine = Mine(here, peer, ranks=(0, 1, 2))
        for step in (1, 2):
            for rank in (0, 1, 2):
                mine.save(step, rank)
        wait(lambda: all(mine.state(rank).backup_step == 2 for rank in (0, 1, 2)), "all ranks")
        assert mine.connections == 1
        mine.close()


def test_a_peer_that_cannot_be_reached_is_named_and_tried_again(mine: Mine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_sender, "FIRST_RETRY_S", 0.05)
    mine.failure = AgentUnreachable("the agent at nowhere:1 did not answer")
    mine.save(1)
    wait(lambda: "no backup to m2 at nowhere:1: the agent" in mine.state().backup_problem, "the problem is reported")
    mine.save(2)
    mine.save(3)
    assert mine.state().backup_step == -1
    mine.failure = None
    wait(lambda: mine.state().backup_step == 3, "the newest step is sent")
    assert mine.state().backup_problem == ""


def test_an_unexpected_error_is_reported_and_backups_continue(mine: Mine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_sender, "FIRST_RETRY_S", 0.05)
    mine.failure = ZeroDivisionError("nobody thought of it")
    mine.save(1)
    wait(lambda: "to m2: ZeroDivisionError: nobody" in mine.state().backup_problem, "the problem is reported")
    mine.failure = None
    wait(lambda: mine.state().backup_step == 1, "step 1 is sent in spite of the error")
    assert mine.state().backup_problem == ""


def test_a_slot_is_not_pinned_for_ever(mine: Mine, monkeypatch: pytest.MonkeyPatch) -> None:
    def kept() -> int:
        return pins_in(mine.here.shm / "checkpoint-0")[Pin.KEEP]

    mine.save(1)
    wait(lambda: kept() == 1, "step 1 is pinned")
    mine.failure = AgentUnreachable("gone")
    for connection in list(mine.peer.port._connections):
        connection.shutdown(2)
    mine.save(2)
    wait(lambda: mine.state().backup_problem != "", "the problem is reported")
    assert kept() == 1
    monkeypatch.setattr(peer_sender, "LET_GO_S", 0.0)
    wait(lambda: kept() == -1, "step 1 is not pinned any more")
    mine.failure = None
    wait(lambda: kept() == 2, "step 2 is pinned")


def test_a_restarted_peer_is_not_reported_as_a_problem(mine: Mine) -> None:
    mine.save(1)
    wait(lambda: mine.state().backup_step == 1, "step 1")
    for connection in list(mine.peer.port._connections):
        connection.shutdown(2)
    mine.save(2)
    wait(lambda: mine.state().backup_step == 2 or mine.state().backup_problem != "", "step 2")
    assert mine.state().backup_problem == ""
    assert mine.connections == 2


def test_a_refusal_is_named(mine: Mine) -> None:
    mine.peer.received.stop(1)
    mine.save(1)
    wait(
        lambda: "m2 refused the backup of rank 0: generation 1 was stopped" in mine.state().backup_problem,
        "the refusal is reported",
    )
    assert mine.peer.steps(0) == []


def test_damage_in_own_memory_is_named_and_the_next_step_is_sent(mine: Mine) -> None:
    mine.failure = AgentUnreachable("not yet")
    mine.save(1)
    wait(lambda: mine.state().backup_problem != "", "the sender has tried once")
    with (mine.here.shm / "checkpoint-0").open("r+b") as file:
        file.seek(payload_at(mine.here.shm / "checkpoint-0", 1) + 5000)
        file.write(b"\1")
    mine.failure = None
    wait(lambda: "damaged in its own memory" in mine.state().backup_problem, "the damage is reported")
    mine.save(2)
    wait(lambda: mine.state().backup_step == 2, "step 2")
    assert mine.peer.steps(0) == [2]


def test_a_step_that_the_peer_has_is_not_sent_again() -> None:
    with side() as here, side() as peer:
        first = Mine(here, peer)
        first.save(4)
        wait(lambda: first.state().backup_step == 4, "step 4")
        first.close()
        before = (peer.shm / "backup-0").stat().st_mtime_ns
        again = Mine(here, peer)
        wait(lambda: again.state().backup_step == 4, "the peer says that it has step 4")
        assert (peer.shm / "backup-0").stat().st_mtime_ns == before
        again.close()


def test_a_rate_limit_slows_the_sender_but_not_the_rank() -> None:
    with side() as here, side() as peer:
        mine = Mine(here, peer, backup_rate_mb_s=0.2, backup_chunk_mb=0.01)
        with contextlib.closing(SlotFile(here.shm / "checkpoint-0", slots=3, owner=OWNER(0), generation=1)) as file:
            began = time.monotonic()
            for step in range(1, 40):
                file.begin(b"{}", len(DATA))
                file.tensors()[:] = DATA
                file.commit(step)
                time.sleep(0.005)
            saving = time.monotonic() - began
        wait(lambda: mine.state().backup_step > 0, "one of the steps is backed up")
        taken = time.monotonic() - began
        assert taken > len(DATA) / 0.2e6 * 0.8
        assert saving < taken
        mine.close()


def test_a_share_of_the_card_s_speed_slows_the_sender() -> None:
    with side() as here, side() as peer:
        slow = Cards((Card("eth0", speed_mbit=8),))  # 1 MB/s
        mine = Mine(here, peer, cards=slow, backup_card_share=0.2, backup_chunk_mb=0.01)
        began = time.monotonic()
        mine.save(1)
        wait(lambda: mine.state().backup_step == 1, "the step is backed up")
        assert time.monotonic() - began > len(DATA) / 0.2e6 * 0.8
        mine.close()


def test_each_card_has_its_own_thread_and_its_own_limit() -> None:
    with side() as here, side() as peer:
        cards = Cards((Card("ib0", speed_mbit=8_000), Card("ib1", speed_mbit=8_000)))
        mine = Mine(here, peer, ranks=(4, 5, 6), cards=cards, backup_card_share=0.5)
        assert [sender.ranks for sender in mine.sender._senders] == [[4, 6], [5]]
        limits = [sender._limits for sender in mine.sender._senders]
        assert [[limit.bytes_per_s for limit in of_card] for of_card in limits] == [[0, 0.5e9], [0, 0.5e9]]
        assert limits[0][1] is not limits[1][1]
        assert limits[0][0] is limits[1][0], "backup_rate_mb_s is for the machine"
        for rank in (4, 5, 6):
            mine.save(1, rank)
        wait(lambda: all(mine.state(rank).backup_step == 1 for rank in (4, 5, 6)), "all ranks are backed up")
        assert sorted(mine.cards_used) == [0, 1]
        mine.close()


def test_closing_does_not_wait_for_a_hanging_peer(mine: Mine) -> None:
    hold = threading.Event()
    taken = threading.Event()

    def hang(*_: object) -> Wire:
        taken.set()
        hold.wait(30)
        raise AgentUnreachable("at last")

    mine.sender._senders[0]._connect = hang
    mine.save(1)
    assert taken.wait(10)
    began = time.monotonic()
    mine.sender.close()
    assert time.monotonic() - began < 5
    hold.set()
