"""Measures the time from the loss of machines to the next step of all ranks, on other machines.

Four sides take turns: everstep with as many standbys as ByteRobust's rule requires (standbys); everstep with a standby
for each lost machine (unlimited); torchrun that starts the complete job again (requeue); and torchrun that replaces
only the lost machines (reschedule). Both of torchrun's sides are favoured: the loss is known at once, new machines are
ready, and no checkpoint is read. everstep has to detect the loss, and restores the previous step.

The job has 6 machines with one rank each. 1, 2 or 3 machines are lost at once, and no two of them have each other's
backups. The weighted time is computed as in ByteRobust's figure 12, from two parts. The first part has a weight of
0.99: it is the mean over 1 to P99 evictions, by the binomial distribution for 128 machines. The second part has a
weight of 0.01: it is a loss of more machines than there are standbys. Here that is the loss of 3 machines, for which
everstep has to provision one machine.

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
"""Numbers of the machines that are lost: only the first one, the first two, or all three. Their backups are on other
machines."""
STANDBYS = 2
AT_STEP = 20
SCRIPT = Path(__file__).resolve().parents[1] / "examples" / "gpt.py"
ARGS = ("--steps", "1000000")
WEIGHED, RATE, CATASTROPHE = 128, 0.0012, 0.01
"""Number of machines for the weights, the share of them that fails in a day (ByteRobust, table 5), and the weight of a
loss of many machines (figure 12)."""
IDLE_S = 30.0
SIDES = ("standbys", "unlimited", "requeue", "reschedule")
AGAINST_REQUEUE, AGAINST_RESCHEDULE, AGAINST_UNLIMITED, AIM_S, IDLE_AIM = 1 / 10.9, 1 / 5.4, 1.05, 1.5, 0.01


@dataclass(slots=True)
class Measured:
    """The measurements of all sides."""

    seconds: dict[str, dict[int, list[float]]] = field(default_factory=lambda: {side: {} for side in SIDES})
    idle: list[float] = field(default_factory=list)
    """Shares of a core that an idle standby uses."""
    failures: list[str] = field(default_factory=list)

    def add(self, side: str, lost: int, seconds: float) -> None:
        """Add the time of one loss."""
        self.seconds[side].setdefault(lost, []).append(seconds)
        say(f"  {side}, {lost} lost: {seconds:.2f} s")

    def weighted(self, side: str) -> float | None:
        """Return the weighted time of a side; None: a loss was not measured."""
        medians = {lost: Spread.of(values).median for lost, values in self.seconds[side].items()}
        return weighted(medians)


def weighted(seconds: dict[int, float]) -> float | None:
    """Return the weighted time of ByteRobust's figure 12; None: a loss was not measured.

    Args:
        seconds: Number of lost machines → seconds; the largest number has the weight of a loss of many machines.
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
    parser.add_argument("--rounds", type=int, default=3, help="number of rounds of all sides (default: %(default)s)")
    parser.add_argument("--sides", default=",".join(SIDES), help="sides to measure (default: %(default)s)")
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
    """Measure all sides in turn, in reverse order in every second round."""
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
    """Measure each loss on a new cluster, since lost machines stay away."""
    for count in range(1, len(LOST) + 1):
        standbys = STANDBYS if side == "standbys" else len(LOST)
        async with EverstepSide(machines=MACHINES, standbys=standbys, at_most=MACHINES + len(LOST)) as cluster:
            if count == 1 and side == "standbys":
                measured.idle.append(await asyncio.to_thread(cluster.idle_share, f"m{MACHINES}", IDLE_S))
            lost = [f"m{number}" for number in LOST[:count]]
            measured.add(side, count, await cluster.lose(SCRIPT, ARGS, machines=lost, at_step=AT_STEP))


def _theirs(measured: Measured, side: str, folder: Path) -> None:
    if side == "requeue":  # its time does not depend on the number of lost machines
        seconds = torchrun_machines.requeue(folder, SCRIPT, ARGS, machines=MACHINES)
        for count in range(1, len(LOST) + 1):
            measured.add(side, count, seconds)
        return
    for count in range(1, len(LOST) + 1):
        lost = LOST[:count]
        seconds = torchrun_machines.reschedule(folder / str(count), SCRIPT, ARGS, machines=MACHINES, lost=lost)
        measured.add(side, count, seconds)


def rows_of(measured: Measured) -> list[Row]:
    """Return rows for the loss of one machine, for the weighted times, and for an idle standby."""
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
    """Return a table of the median times."""
    lines = [f"Median seconds, by machines lost{'1':>10}{'2':>8}{'3':>8}"]
    for side, found in measured.seconds.items():
        cells = "".join(f"{Spread.of(found[k]).median:8.2f}" if k in found else f"{'-':>8}" for k in (1, 2, 3))
        lines.append(f"  {side:32}{cells}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
