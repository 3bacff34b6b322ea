"""What a machine holds for other machines: fences, abandoned steps, stale backups, and room for backups."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from pathlib import Path

import pytest

from agent.checkpoints.peers import backups as received_module
from agent.checkpoints.peers.copy_requests import PartHeader, Request
from agent.checkpoints.peers.send_slot import Fate, Outcome, put
from agent.checkpoints.peers.wire import Wire
from everstep.slots.format import SlotHeader
from everstep.slots.reader import SlotReader
from tests.agent.checkpoints.peers.sides import Side, offer, only, save, side

DATA = bytes(range(256)) * 400


class Owner:
    """A machine with one rank that sends its steps to a peer."""

    def __init__(self, mine: Side, peer: Side, rank: int = 0) -> None:
        self.path = mine.shm / f"checkpoint-{rank}"
        self.peer = peer
        self.rank = rank

    def send(self, step: int, *, generation: int = 1, resume_step: int = 0, saved_in: int = 0) -> Outcome:
        header = save(self.path, step, DATA, generation=saved_in or generation)
        return self.send_header(header, generation=generation, resume_step=resume_step)

    def send_header(self, header: SlotHeader, *, generation: int = 1, resume_step: int = 0) -> Outcome:
        made = offer(header, rank=self.rank, generation=generation, resume_step=resume_step)
        with contextlib.closing(SlotReader(self.path)) as reader, contextlib.closing(self.peer.connect()) as wire:
            return put(only(wire, 10_000), reader, header, made)


def test_a_stopped_generation_adds_nothing() -> None:
    with side() as mine, side() as peer:
        owner = Owner(mine, peer)
        assert owner.send(5, generation=2).fate is Fate.KEPT
        peer.received.stop(2)
        late = owner.send(6, generation=2)
        assert late.fate is Fate.REFUSED
        assert "generation 2 was stopped" in late.reason
        assert peer.steps(0) == [5]
        assert owner.send(7, generation=3, resume_step=6).fate is Fate.KEPT


def test_the_fence_outlives_the_agent() -> None:
    with side() as mine, side(fenced=2) as peer:
        assert Owner(mine, peer).send(5, generation=2).fate is Fate.REFUSED
        assert peer.steps(0) == []


def test_a_stop_breaks_off_what_is_on_its_way() -> None:
    with side() as mine, side() as peer:
        path = mine.shm / "checkpoint-0"
        header = save(path, 5, DATA)
        with contextlib.closing(peer.connect()) as wire:
            wire.send(offer(header).model_dump())
            assert wire.receive() == {"allocating": True}
            assert wire.receive()["missing"] == [[0, header.payload_bytes]]
            begin(wire, header)
            peer.received.stop(1)
            with pytest.raises(OSError):
                _finish(wire, header, path)
        assert peer.steps(0) == []
        again = Owner(mine, peer).send_header(header, generation=2, resume_step=5)
        assert (again.fate, again.bytes) == (Fate.KEPT, header.payload_bytes), (
            "the part that came before the stop is forgotten, so everything is sent again"
        )


def begin(wire: Wire, header: SlotHeader) -> None:
    """Send the first bytes of a slot."""
    wire.send(PartHeader(start=0, stop=header.payload_bytes).model_dump())
    wire.send_chunk(memoryview(DATA)[:50_000])


def _finish(wire: Wire, header: SlotHeader, path: Path) -> None:
    with contextlib.closing(SlotReader(path)) as reader:
        rest = bytearray(header.payload_bytes)
        reader.read_into(header, 0, memoryview(rest))
    wire.send_chunk(memoryview(rest)[50_000:])
    wire.send(PartHeader().model_dump())
    wire.receive()


def test_a_stop_of_an_older_generation_touches_nothing() -> None:
    with side() as mine, side() as peer:
        owner = Owner(mine, peer)
        owner.send(5, generation=2)
        header = save(owner.path, 6, DATA, generation=2)
        with contextlib.closing(peer.connect()) as wire:
            wire.send(offer(header, generation=2).model_dump())
            assert wire.receive() == {"allocating": True}  # the second slot is used for the first time
            assert wire.receive()["missing"] == [[0, header.payload_bytes]]
            begin(wire, header)
            peer.received.stop(1)
            _finish(wire, header, owner.path)
        assert peer.steps(0) == [5, 6]


@pytest.mark.parametrize("first", ["launch", "offer"])
def test_an_abandoned_future_is_forgotten_whoever_comes_first(first: str) -> None:
    """The data port may get a backup before or after the agent gets the launch."""
    with side() as mine, side() as peer:
        owner = Owner(mine, peer)
        for step in (20, 21):
            owner.send(step, generation=1)
        peer.received.stop(1)
        if first == "launch":
            peer.received.launch(2, 20)
            assert peer.steps(0) == [20]
        # The step at which the generation began is offered first. It is already there.
        header = SlotReader(owner.path).header(20)
        assert header is not None
        assert owner.send_header(header, generation=2, resume_step=20).bytes == 0
        assert peer.steps(0) == [20]
        assert owner.send(21, generation=2, resume_step=20).fate is Fate.KEPT
        peer.received.launch(2, 20)
        assert peer.steps(0) == [20, 21], "the backup of the new generation is kept"


@pytest.mark.parametrize("resume_step", [0, -1])
def test_from_the_beginning_nothing_is_kept(resume_step: int) -> None:
    with side() as mine, side() as peer:
        owner = Owner(mine, peer)
        owner.send(3, generation=1)
        peer.received.launch(2, resume_step)
        assert peer.steps(0) == []


def test_an_older_generation_that_sends_on_is_refused() -> None:
    with side() as mine, side() as peer:
        owner = Owner(mine, peer)
        assert owner.send(5, generation=2).fate is Fate.KEPT
        assert owner.send(6, generation=1).fate is Fate.REFUSED


def test_backups_that_are_kept_elsewhere_now_go_when_no_rank_could_need_them() -> None:
    with side() as mine, side() as peer:
        moved, stays = Owner(mine, peer, 0), Owner(mine, peer, 1)
        for owner in (moved, stays):
            owner.send(10, generation=1)
        peer.received.stop(1)
        peer.received.launch(2, 10)
        assert peer.received.remove_stale(50) is True, (
            "no rank of the new generation has sent anything yet, so nothing may be removed"
        )
        assert stays.send(11, generation=2, resume_step=10).fate is Fate.KEPT
        assert peer.received.remove_stale(10) is True
        assert peer.steps(0) == [10], "step 10 may still be needed, so the old backup stays"
        assert peer.received.remove_stale(11) is False
        assert not (peer.shm / "backup-0").exists()
        assert peer.steps(1) == [10, 11]


def test_no_room_is_told_with_numbers_and_stale_backups_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    with side() as mine, side() as peer:
        stale, owner = Owner(mine, peer, 0), Owner(mine, peer, 1)
        stale.send(10, generation=1)
        free = 10_000

        def room(_: object) -> int:
            return free if (peer.shm / "backup-0").exists() else 1 << 40

        monkeypatch.setattr(received_module, "free", room)
        refused = owner.send(10, generation=1)
        assert refused.fate is Fate.REFUSED
        assert "no room for the backup of rank 1: it needs 0." in refused.reason
        assert "0.0 MB are free" in refused.reason
        Owner(mine, peer, 2).peer.received.stop(1)
        # A rank of the new generation offers a step. Rank 0 has sent nothing in this generation.
        with contextlib.closing(peer.connect()) as wire:
            made = offer(save(owner.path, 11, DATA, generation=2), rank=1, generation=2, resume_step=10)
            wire.send(made.model_dump())
            assert wire.receive() == {"allocating": True}
            assert "missing" in wire.receive()
        assert not (peer.shm / "backup-0").exists()


@pytest.mark.parametrize("harm", ["cut short", "removed", "overwritten"])
def test_a_backup_that_is_harmed_from_outside_is_made_anew(harm: str) -> None:
    with side() as mine, side() as peer:
        owner, path = Owner(mine, peer), peer.shm / "backup-0"
        for step in (5, 6):
            owner.send(step)
        size = path.stat().st_size
        if harm == "cut short":
            os.truncate(path, size // 3)
        elif harm == "removed":
            path.unlink()
        else:
            path.write_bytes(b"no checkpoint")
        for step in (7, 8):
            assert owner.send(step).fate is Fate.KEPT
            assert peer.payload(0, step) == mine.payload(0, step, "checkpoint")
        assert path.stat().st_size == size


def test_a_new_connection_takes_over_from_one_that_hangs() -> None:
    with side() as mine, side() as peer:
        owner = Owner(mine, peer)
        header = save(owner.path, 5, DATA)
        with contextlib.closing(peer.connect()) as hanging:
            hanging.send(offer(header).model_dump())
            hanging.receive()
            hanging.receive()
            begin(hanging, header)
            _until_received(peer, 50_000)
            sent = owner.send_header(header)
            assert sent.fate is Fate.KEPT
            assert sent.bytes == header.payload_bytes - 50_000


def _until_received(peer: Side, count: int) -> None:
    deadline = time.monotonic() + 10
    while not (incoming := peer.received._backup(0).incoming) or incoming.done < count:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_nothing_is_taken_when_the_job_is_over() -> None:
    with side() as mine, side() as peer:
        owner = Owner(mine, peer)
        owner.send(5)
        peer.received.close()
        assert owner.send(6).fate is Fate.REFUSED


def test_too_many_connections_that_know_the_token_are_turned_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agent.checkpoints.peers.data_port.MOST_CONNECTIONS", 3)
    wanted = Request(file="own", rank=0, step=1).model_dump()
    with side() as mine, side() as peer, contextlib.ExitStack() as stack:
        for _ in range(3):
            idle = stack.enter_context(contextlib.closing(peer.connect()))
            idle.send(wanted)
            assert "gone" in idle.receive()
        with contextlib.closing(peer.connect()) as more:
            more.send(wanted)
            with pytest.raises(OSError, match=r"closed|reset"):
                more.receive()
        stack.close()
        deadline = time.monotonic() + 10
        while peer.port._connections and time.monotonic() < deadline:
            time.sleep(0.01)
        assert Owner(mine, peer).send(5).fate is Fate.KEPT
    assert threading.active_count() < 50


def test_who_never_comes_to_the_point_does_not_keep_the_place_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agent.checkpoints.peers.handshake.GREET_S", 1.0)
    with side() as peer, socket.create_connection(("127.0.0.1", peer.address.port)) as slow:
        deadline = time.monotonic() + 8
        with contextlib.suppress(OSError):
            while time.monotonic() < deadline:  # the client sends a byte now and then, so that it is never silent
                slow.sendall(b"\x20")
                time.sleep(0.2)
        assert time.monotonic() < deadline, "a client that never shows a token is disconnected"
