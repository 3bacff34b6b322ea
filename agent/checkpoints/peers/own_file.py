"""A rank's checkpoint file, looked at for a moment."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from agent.checkpoints.options import Place
from everstep.errors import CorruptCheckpoint
from everstep.slots.format import own_slots
from everstep.slots.reader import SlotReader


def on_own_file(place: Place, rank: int, act: Callable[[SlotReader], None]) -> None:
    """Do something with the file of a rank's own slots; nothing where there is none yet, or it is replaced."""
    try:
        reader = SlotReader(own_slots(place.shm, rank))
    except (OSError, CorruptCheckpoint):
        return
    with contextlib.closing(reader), contextlib.suppress(OSError):
        act(reader)
