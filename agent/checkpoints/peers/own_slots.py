"""This module handles ranks without backups, which keep named steps only in their own slots when machines are aligned.

With it, ranks that drift apart keep a common step even without backups, also on a single machine. A ``PeerSender``
counts a step as kept when the peer has it; ``OwnSlots`` counts it as kept when the rank has saved it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from functools import partial

from agent.checkpoints.options import Place
from agent.checkpoints.peers.align import apply, kept, lost, pending, pins, remember
from agent.v1 import agent_pb2 as pb
from everstep.decisions.keep.align_backups import NO_NAMED_STEP
from everstep.errors import CorruptCheckpoint
from everstep.slots.format import EMPTY, Pin, SlotHeader, own_slots
from everstep.slots.reader import SlotReader


class OwnSlots:
    """Ranks of a job on this machine that are not backed up; thread-safe."""

    def __init__(self, place: Place, ranks: Sequence[int]) -> None:
        self.ranks = ranks
        self._place = place
        self._lock = threading.Lock()
        self._closed = False
        for rank in ranks:
            place.saved.update(rank, backup_none=True)
            on_own_file(place, rank, partial(self._remember, rank))

    def align(self, rank: int, request: pb.AlignBackupsRequest) -> None:
        """Keep the step that all machines keep, or no step."""
        self._place.saved.change(rank, partial(apply, request=request))
        self._spare(rank)

    def on_saved(self, rank: int, header: SlotHeader) -> None:
        """Handle a rank's save, which may be the named step or a later one."""
        state = self._place.saved.of(rank)
        named = pending(state)
        if not named or header.completed_steps < named:
            return
        if header.completed_steps == named:
            self._place.saved.change(rank, partial(kept, step=named, every=1))
        elif named not in state.own_steps:
            self._place.saved.change(rank, partial(lost, named=named))
        self._spare(rank)

    def close(self) -> None:
        """Set no more pins."""
        with self._lock:
            self._closed = True

    def _remember(self, rank: int, reader: SlotReader) -> None:
        """Restore the state from the rank's pins after a restart of the agent."""
        pinned = {why: reader.pinned(why) for why in Pin}
        if pinned[Pin.NAMED] > 0:
            self._place.saved.change(rank, partial(remember, pinned=pinned))

    def _spare(self, rank: int) -> None:
        def pin(reader: SlotReader) -> None:
            state = self._place.saved.of(rank)
            sent = state.backup_step if state.backup_named != NO_NAMED_STEP else EMPTY
            for why, step in pins(state, EMPTY, sent):
                reader.pin(why, step)

        with self._lock:
            if not self._closed:
                on_own_file(self._place, rank, pin)


def on_own_file(place: Place, rank: int, act: Callable[[SlotReader], None]) -> None:
    """Call ``act`` with a reader of a rank's own slots; does nothing if the file is missing or being replaced."""
    try:
        reader = SlotReader(own_slots(place.shm, rank), place.owner(rank))
    except (OSError, CorruptCheckpoint):
        return
    with contextlib.closing(reader), contextlib.suppress(OSError, CorruptCheckpoint):
        act(reader)
