"""A disk that hangs delays neither a launch nor a stop."""

from __future__ import annotations

import threading
import time
from typing import cast

import pytest

from agent.checkpoints.options import LaunchOptions
from agent.checkpoints.saved_state import SavedStates
from agent.checkpoints.tiers import open_with_timeout
from agent.checkpoints.tiers.job_tiers import JobTiers
from agent.checkpoints.tiers.open_with_timeout import TiersWithTimeout
from agent.v1 import agent_pb2 as pb
from everstep.errors import CheckpointError
from everstep.slots.format import SlotHeader

HEADER = SlotHeader(1, 1, 0, 0, 0, 0)


class Tiers:
    """Tiers that note their calls; ``open`` waits until ``hang`` is set."""

    def __init__(self) -> None:
        self.hang = threading.Event()
        self.hang.set()
        self.failure: Exception | None = None
        self.calls: list[str] = []

    def open(self, launch: LaunchOptions) -> None:
        self.hang.wait(30)
        if self.failure:
            raise self.failure
        self.calls.append(f"open {launch.generation}")

    def on_saved(self, rank: int, header: SlotHeader) -> None:
        self.calls.append(f"saved {header.completed_steps}")

    def shut(self) -> None:
        self.calls.append("shut")

    def persist(self, request: pb.PersistRequest) -> None: ...

    def held(self, request: pb.CheckpointsRequest) -> list[pb.HeldCheckpoint]:
        return []

    def restore(self, shard: pb.ShardSource, options: pb.CheckpointOptions, fenced: int) -> int:
        return 0

    def close(self) -> None: ...


def launch(generation: int) -> LaunchOptions:
    return LaunchOptions(generation, 0, (0, 1), pb.CheckpointOptions())


def until(tiers: Tiers, calls: list[str]) -> None:
    deadline = time.monotonic() + 20
    while tiers.calls != calls:
        assert time.monotonic() < deadline, tiers.calls
        time.sleep(0.005)


def test_calls_are_made_in_order() -> None:
    tiers, saved = Tiers(), SavedStates()
    found = TiersWithTimeout(cast(JobTiers, tiers), saved)
    found.on_saved(0, HEADER)
    found.open(launch(1))
    found.on_saved(0, HEADER)
    found.shut()
    found.on_saved(0, HEADER)
    found.shut()
    assert tiers.calls == ["open 1", "saved 1", "shut"]
    assert saved.of(0).disk_problem == ""


def test_a_failed_open_is_reported_and_nothing_is_written() -> None:
    tiers, saved = Tiers(), SavedStates()
    tiers.failure = CheckpointError("no such folder")
    found = TiersWithTimeout(cast(JobTiers, tiers), saved)
    found.open(launch(1))
    found.on_saved(0, HEADER)
    found.shut()
    assert tiers.calls == []
    assert saved.of(1).disk_problem == "no such folder"


def test_a_disk_that_hangs_is_reported_and_opened_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_with_timeout, "OPEN_S", 0.05)
    tiers, saved = Tiers(), SavedStates()
    tiers.hang.clear()
    found = TiersWithTimeout(cast(JobTiers, tiers), saved)
    found.open(launch(1))
    assert "does not answer" in saved.of(0).disk_problem
    found.on_saved(0, HEADER)
    tiers.hang.set()
    until(tiers, ["open 1"])
    deadline = time.monotonic() + 20
    while saved.of(1).disk_problem:
        assert time.monotonic() < deadline, "a problem that is over must not be reported any more"
        time.sleep(0.005)
    found.shut()
    assert tiers.calls == ["open 1", "shut"]


def test_a_launch_that_was_stopped_during_the_hang_is_not_left_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_with_timeout, "OPEN_S", 0.05)
    tiers = Tiers()
    tiers.hang.clear()
    found = TiersWithTimeout(cast(JobTiers, tiers), SavedStates())
    found.open(launch(1))
    found.shut()
    assert tiers.calls == []
    tiers.hang.set()
    until(tiers, ["open 1", "shut"])


def test_after_a_hang_the_newest_launch_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_with_timeout, "OPEN_S", 0.05)
    tiers = Tiers()
    tiers.hang.clear()
    found = TiersWithTimeout(cast(JobTiers, tiers), SavedStates())
    found.open(launch(1))
    found.shut()
    found.open(launch(2))
    tiers.hang.set()
    until(tiers, ["open 1", "shut", "open 2"])
    found.shut()
    assert tiers.calls[-1] == "shut"


def test_an_open_that_failed_for_lack_of_room_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_with_timeout, "AGAIN_S", 0.02)
    tiers, saved = Tiers(), SavedStates()
    tiers.failure = CheckpointError("no room")
    found = TiersWithTimeout(cast(JobTiers, tiers), saved)
    found.open(launch(1))
    assert saved.of(0).disk_problem == "no room"
    tiers.failure = None
    until(tiers, ["open 1"])
    deadline = time.monotonic() + 20
    while saved.of(1).disk_problem:
        assert time.monotonic() < deadline, "a problem that is over must not be reported any more"
        time.sleep(0.005)
    found.on_saved(0, HEADER)
    found.shut()
    assert tiers.calls == ["open 1", "saved 1", "shut"]

    tiers.failure = CheckpointError("no room")
    found.open(launch(2))
    found.shut()
    tiers.failure = None
    found.open(launch(3))
    assert tiers.calls[3:] == ["open 3"], "generation 2 was stopped before there was room, so it is never opened"
    found.shut()
