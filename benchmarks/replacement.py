"""How long from machines that lose their power to the next step of all ranks, on other machines.

Sides, in one session, one after the other: everstep with the standbys that the paper's rule asks for; everstep with
one for every machine that is lost; torchrun where all begins anew (requeue); torchrun where only the lost machines
are replaced (reschedule). Both of torchrun's are in its favour: it is told of the loss, machines are there at once,
and no checkpoint is read; everstep has to find out, and restores the step before.

The job has 6 machines of 1 rank; 1, 2 and 3 of them are lost at once, no two of which have each other's backups. The
weighted time is that of ByteRobust's figure 12: over 1 to P99 evictions by the binomial over 128 machines, and a
catastrophic loss of more machines than there are standbys, with 1 %; here that is 3, of which everstep has to
provision one.

    python -P benchmarks/replacement.py
    python -P benchmarks/replacement.py --rounds 1 --json
"""

from __future__ import annotations

import argparse
import asyncio
import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.common import Row, Spread, finish, say, show, show_json
from benchmarks.everstep_side import EverstepSide
from benchmarks.peers import torchrun_machines
from benchmarks.peers.torchrun import PeerFailed
from everstep.decisions.pool.size import binomial_quantile
from everstep.errors import EverstepError

MACHINES = 6
LOST = (1, 3, 5)
"""Numbers of the machines that are lost, the first one alone, the first two, all: their backups are on others."""
STANDBYS = 2
AT_STEP = 20
SCRIPT = Path(__file__).resolve().parents[1] / "examples" / "gpt.py"
ARGS = ("--steps", "1000000")
WEIGHED, RATE, CATASTROPHE = 128, 0.0012, 0.01
"""Machines that are weighed for, how many of them fail in a day (ByteRobust, table 5), and how often many do at once
(figure 12)."""
IDLE_S = 30.0
SIDES = ("standbys", "unlimited", "requeue", "reschedule")
AGAINST_REQUEUE, AGAINST_RESCHEDULE, AGAINST_UNLIMITED, AIM_S, IDLE_AIM = 1 / 10.9, 1 / 5.4, 1.05, 1.5, 0.01


@dataclass(slots=True)
class Measured:
    """Seconds, by side and number of lost machines."""

    seconds: dict[str, dict[int, list[float]]] = field(default_factory=lambda: {side: {} for side in SIDES})
    idle: list[float] = field(default_factory=list)
    """Shares of a core that an idle standby takes."""
    failures: list[str] = field(default_factory=list)

    def take(self, side: str, lost: int, seconds: float) -> None:
        """One more."""
        self.seconds[side].setdefault(lost, []).append(seconds)
        say(f"  {side}, {lost} lost: {seconds:.2f} s")

    def weighted(self, side: str) -> float | None:
        """Figure 12's time of one side; None: a part is missing."""
        medians = {lost: Spread.of(values).median for lost, values in self.seconds[side].items()}
        return weighted(medians)


def weighted(seconds: dict[int, float]) -> float | None:
    """The mean over losses of 1 to P99 machines by the binomial, and over a catastrophic one.

    Args:
        seconds: By number of lost machines; the largest number is the catastrophe.

    Returns:
        None: one of them is missing.
    """
    p99 = binomial_quantile(WEIGHED, RATE)
    if set(seconds) != {*range(1, p99 + 1), len(LOST)}:
        return None
    odds = {k: math.comb(WEIGHED, k) * RATE**k * (1 - RATE) ** (WEIGHED - k) for k in range(1, p99 + 1)}
    usual = sum(odds[k] * seconds[k] for k in odds) / sum(odds.values())
    return (1 - CATASTROPHE) * usual + CATASTROPHE * seconds[len(LOST)]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="of all sides (default: %(default)s)")
    parser.add_argument("--sides", default=",".join(SIDES), help="(default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    measured = asyncio.run(measure(options.rounds, options.sides.split(",")))
    rows = rows_of(measured)
    if options.json:
        show_json("replacement", rows, seconds=measured.seconds, idle=measured.idle, failures=measured.failures)
    else:
        show("replacement", rows, [each(measured)])
    finish(measured.failures)


async def measure(rounds: int, sides: Sequence[str]) -> Measured:
    """All sides in turn, in another order each time."""
    measured = Measured()
    with tempfile.TemporaryDirectory(prefix="everstep-bench-") as name:
        for number in range(rounds):
            say(f"round {number + 1} of {rounds}")
            for side in sides if number % 2 == 0 else sides[::-1]:
                try:
                    if side in {"standbys", "unlimited"}:
                        await _ours(measured, side)
                    else:
                        await asyncio.to_thread(_theirs, measured, side, Path(name) / f"{side}-{number}")
                except (PeerFailed, EverstepError, TimeoutError) as error:
                    measured.failures.append(f"{side}: {error}")
                    say(measured.failures[-1])
    await asyncio.sleep(0.1)  # the SDK's threads may still be ending
    return measured


async def _ours(measured: Measured, side: str) -> None:
    """Each loss on a cluster of its own: what was lost stays away."""
    for count in range(1, len(LOST) + 1):
        standbys = STANDBYS if side == "standbys" else len(LOST)
        async with EverstepSide(machines=MACHINES, standbys=standbys, at_most=MACHINES + len(LOST)) as cluster:
            if count == 1 and side == "standbys":
                measured.idle.append(await asyncio.to_thread(cluster.idle_share, f"m{MACHINES}", IDLE_S))
            lost = [f"m{number}" for number in LOST[:count]]
            measured.take(side, count, await cluster.lose(SCRIPT, ARGS, machines=lost, at_step=AT_STEP))


def _theirs(measured: Measured, side: str, folder: Path) -> None:
    if side == "requeue":  # the same however many are lost
        seconds = torchrun_machines.requeue(folder, SCRIPT, ARGS, machines=MACHINES)
        for count in range(1, len(LOST) + 1):
            measured.take(side, count, seconds)
        return
    for count in range(1, len(LOST) + 1):
        lost = LOST[:count]
        seconds = torchrun_machines.reschedule(folder / str(count), SCRIPT, ARGS, machines=MACHINES, lost=lost)
        measured.take(side, count, seconds)


def rows_of(measured: Measured) -> list[Row]:
    """One machine lost, the weighted times, and what a standby costs."""
    one = {side: Spread.of(found[1]) for side, found in measured.seconds.items() if 1 in found}
    ours, weights = one.get("standbys"), {side: measured.weighted(side) for side in SIDES}
    rows = []
    for label, name in (("median", "median"), ("maximum", "maximum")):
        value = getattr(ours, name) if ours else None
        rows.append(Row(f"1 machine gone to next step of all, {label}", "s", value, None, AIM_S, aim_of="ours"))
    for side, aim in (
        ("requeue", AGAINST_REQUEUE),
        ("reschedule", AGAINST_RESCHEDULE),
        ("unlimited", AGAINST_UNLIMITED),
    ):
        rows.append(Row(f"weighted time, {side}", "s", weights["standbys"], weights[side], aim))
    idle = Spread.of(measured.idle).maximum if measured.idle else None
    rows.append(Row("idle standby, share of a core, maximum", "", idle, None, IDLE_AIM, aim_of="ours"))
    return rows


def each(measured: Measured) -> str:
    """A table of the medians."""
    lines = [f"Median seconds, by machines lost{'1':>10}{'2':>8}{'3':>8}"]
    for side, found in measured.seconds.items():
        cells = "".join(f"{Spread.of(found[k]).median:8.2f}" if k in found else f"{'-':>8}" for k in (1, 2, 3))
        lines.append(f"  {side:32}{cells}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
