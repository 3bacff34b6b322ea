"""Measures saves of several GB from a GPU: how long they block, how much throughput is lost, how fast they copy.

One rank runs, and the sides take turns, each turn in a process of its own. ``--device cpu`` only tries the benchmark on
a computer without a GPU: such figures mean nothing for GPUs.

    python -P -m benchmarks.checkpoint_gpu --gigabytes 12
    python -P -m benchmarks.checkpoint_gpu --device cpu --gigabytes 0.1 --rounds 1 --steps 3
"""

from __future__ import annotations

import argparse
import ctypes
import sys
import time
from pathlib import Path

import torch

from benchmarks.checkpoint_saves import AGAINST_STAGER, Saves, calibrate, run_turn
from benchmarks.common import Row, Spread, finish, rows_of, say, show, show_json
from benchmarks.peers.torchrun import PeerFailed

SIDES = ("none", "everstep", "everstep blocking", "DCP stager")
THROUGHPUT_AIM = 0.99
COPY_MB = 1000


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="device of the state (default: %(default)s)"
    )
    parser.add_argument("--gigabytes", type=float, default=4.0, help="size of the state, GB (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="number of turns of each side (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=10, help="number of saves in a turn (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no GPU here; --device cpu runs the benchmark without one")
    found = Saves(round(options.gigabytes * 1000), ranks=1)
    device, here = options.device, Path(sys.executable)
    limit = copy_rate(device)
    calls = calibrate(1, device)
    for turn in range(options.rounds):
        for side in SIDES if turn % 2 == 0 else SIDES[::-1]:
            try:
                turned = run_turn(side, here, found.megabytes, calls, steps=options.steps, ranks=1, device=device)
            except PeerFailed as error:
                found.failures.append(f"{side}: {error}")
                continue
            found.samples.setdefault(side, []).extend(turned.steady)
            found.first.setdefault(side, []).extend(turned.first)
            step = Spread.of([sample.step for sample in turned.steady]).median
            say(f"round {turn + 1} of {options.rounds}: {side} {step:.3f} s")
    # In this turn a step has almost no work, so the blocking time is the time of the complete copy.
    bare = run_turn("everstep", here, found.megabytes, 1, steps=options.steps, ranks=1, device=device)
    rates = [found.megabytes / 1e3 / (sample.save + sample.gate) for sample in bare.steady]
    rows = rows_of(
        f"save of {found.megabytes} MB blocks, DCP's stager",
        "s",
        found.blocking("everstep"),
        found.blocking("DCP stager"),
        aim=AGAINST_STAGER,
    )
    without = [1 / sample.step for sample in found.samples["none"]]
    for side in SIDES[1:]:
        rates_of_side = [1 / sample.step for sample in found.samples.get(side, [])]
        if rates_of_side:
            aim = THROUGHPUT_AIM if side == "everstep" else None
            medians = (Spread.of(rates_of_side).median, Spread.of(without).median)
            rows.append(Row(f"throughput with {side}, without", "steps/s", *medians, aim, larger=True))
    rows.append(Row("device to host, bare pinned copy", "GB/s", Spread.of(rates).median, limit, larger=True))
    if options.json:
        show_json("checkpoint_gpu", rows, failures=found.failures)
    else:
        show("checkpoint_gpu", rows, [found.table()])
    finish(found.failures)


def copy_rate(device: str) -> float:
    """Return the rate of the fastest plain copy from the device into pinned host memory, GB/s: the limit of the bus."""
    there = torch.ones(COPY_MB * 250_000, device=device)
    here = torch.empty_like(there, device="cpu", pin_memory=device == "cuda").zero_()
    best = float("inf")
    for _ in range(5):
        began = time.perf_counter()
        if device == "cuda":
            here.copy_(there, non_blocking=True)
            torch.cuda.synchronize()
        else:
            ctypes.memmove(here.data_ptr(), there.data_ptr(), COPY_MB * 1_000_000)
        best = min(best, time.perf_counter() - began)
    return COPY_MB / 1e3 / best


if __name__ == "__main__":
    main()
