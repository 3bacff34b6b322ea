"""Saves after every step of half a second, against DCP's stager: what blocks, and by how much steps become slower."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.checkpoint_saves import Saves, Turn, calibrate, run_turn
from benchmarks.common import Spread
from benchmarks.gpu.parts import Line
from benchmarks.gpu.room import missing_shm
from benchmarks.peers.torchrun import PeerFailed

STEP_S = 0.5
SIDES = ("none", "everstep", "DCP stager")
SMALL_GB, SMALL_STEP_S, SMALL_STEPS = 0.03, 0.05, 2


def measure(*, gpu: bool, gigabytes: float, steps: int, ranks: int = 1) -> Iterator[Line]:
    """Yield the times of saves, for everstep with the stager as peer."""
    device = "cuda" if gpu else "cpu"
    if not gpu:
        gigabytes, steps = SMALL_GB, SMALL_STEPS
    # Both sides need room for three copies: everstep's slots; the stager's buffer and two files.
    if why := missing_shm(4 * gigabytes * ranks):
        yield Line("saves", None, why=why)
        return
    calls = max(1, round(calibrate(ranks, device) * (STEP_S if gpu else SMALL_STEP_S)))
    turns: dict[str, Turn] = {}
    for side in SIDES:
        try:
            turns[side] = run_turn(
                side, Path(sys.executable), round(gigabytes * 1000), calls, steps=steps, ranks=ranks, device=device
            )
        except PeerFailed as error:
            yield Line(f"turn of {side}", None, why=str(error))
        else:
            yield Line(f"step, {side}", median(turns, side, "step"), "s")
    found = Saves(round(gigabytes * 1000), ranks, samples={side: turn.steady for side, turn in turns.items()})
    ours, peer = (Spread.of(found.blocking(side)) if side in turns else None for side in SIDES[1:])
    if ours is not None:
        first = Spread.of([sample.save + sample.gate for sample in turns["everstep"].first])
        yield Line("the first three saves block, maximum", first.maximum, "s")
        for name in ("median", "maximum"):
            yield Line(f"a save blocks, {name}", getattr(ours, name), "s", getattr(peer, name) if peer else None)
    if "none" in turns and ours is not None:
        alone = median(turns, "none", "step")
        slower = [100 * (median(turns, side, "step") / alone - 1) if side in turns else None for side in SIDES[1:]]
        yield Line("a step becomes slower by", slower[0], "%", slower[1])


def median(turns: dict[str, Turn], side: str, part: str) -> float:
    """Return the median of one of the times of a side's samples."""
    return Spread.of([getattr(sample, part) for sample in turns[side].steady]).median
