"""Common parts of the benchmarks: the spread of runs, rows with aims, the environment, and output."""

from __future__ import annotations

import json
import math
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

PACKAGES = ("everstep", "torch", "temporalio", "grpcio")


@dataclass(frozen=True, slots=True)
class Spread:
    """Median, 90th percentile and maximum of some runs."""

    median: float
    p90: float
    maximum: float
    runs: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Return the spread of at least one value."""
        return cls(quantile(values, 0.5), quantile(values, 0.9), max(values), len(values))


def quantile(values: Sequence[float], share: float) -> float:
    """Return a quantile by linear interpolation between the two nearest values.

    Raises:
        ValueError: there are no values, or the share is not between 0 and 1.
    """
    if not values or not 0 <= share <= 1:
        raise ValueError(f"no quantile {share} of {len(values)} values")
    ordered = sorted(values)
    at = share * (len(ordered) - 1)
    below = math.floor(at)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (at - below)


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a benchmark's result. Smaller is better, unless ``larger`` is set."""

    name: str
    unit: str
    ours: float | None
    peer: float | None = None
    """The value of the peer that the name mentions; None: there is no peer, or it did not run."""
    aim: float | None = None
    """Limit of ``ratio``, or of ``ours`` (see ``aim_of``); None: there is no aim."""
    aim_of: Literal["ratio", "ours"] = "ratio"
    larger: bool = False
    """Whether a larger value is better."""

    @property
    def ratio(self) -> float | None:
        """Everstep's value divided by the peer's."""
        return None if self.ours is None or not self.peer else self.ours / self.peer

    @property
    def met(self) -> bool | None:
        """Whether the aim is met; None: there is no aim, or no value to compare with it."""
        value = self.ratio if self.aim_of == "ratio" else self.ours
        if self.aim is None or value is None:
            return None
        return value >= self.aim if self.larger else value <= self.aim

    def as_json(self) -> dict[str, Any]:
        """Return the row with its ratio and whether the aim is met."""
        fields = asdict(self)
        del fields["larger"]
        return fields | {"ratio": self.ratio, "met": self.met}


def rows_of(name: str, unit: str, ours: Sequence[float], peer: Sequence[float], *, aim: float | None) -> list[Row]:
    """Return rows with median, p90 and maximum of both sides; the aim limits the ratio in each row."""
    mine, theirs = (Spread.of(values) if values else None for values in (ours, peer))
    return [
        Row(
            f"{name}, {label}",
            unit,
            getattr(mine, field) if mine else None,
            getattr(theirs, field) if theirs else None,
            aim,
        )
        for label, field in (("median", "median"), ("p90", "p90"), ("maximum", "maximum"))
    ]


def environment() -> dict[str, Any]:
    """Return the environment of a benchmark's run, which is shown with every figure."""
    pages, page = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "cores": os.cpu_count(),
        "memory_gib": round(pages * page / 2**30),
        "load": round(os.getloadavg()[0], 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        **{name: version_of(name) for name in PACKAGES},
        "command": shlex.join(["python", *sys.argv]),
    }


def version_of(package: str) -> str:
    """Return the version of an installed package; empty: it is not installed, as in a checkout that is only run."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def say(text: str) -> None:
    """Print progress on stderr; stdout is for the result."""
    print(text, file=sys.stderr, flush=True)


def show(name: str, rows: Sequence[Row], notes: Sequence[str] = ()) -> None:
    """Print the environment, the rows as a table, and the notes; call ``finish`` afterwards."""
    where = environment()
    print(f"{name}: {where['cores']} cores, {where['memory_gib']} GiB, load {where['load']}, {where['date']}")
    print(", ".join(f"{key} {where[key]}" for key in ("python", *PACKAGES)) + f"; {where['command']}\n")
    width = max(len(row.name) for row in rows)
    print(f"{'':{width}}  {'ours':>10} {'peer':>10} {'ratio':>7}  {'aim':>12}")
    for row in rows:
        print(f"{row.name:{width}}  {_number(row.ours):>10} {_number(row.peer):>10} {_ratio(row):>7}  {_aim(row):>12}")
    for note in notes:
        print(f"\n{note}")


def finish(failures: Sequence[str]) -> None:
    """If a side did not run each time, print the failures and exit with code 1; otherwise only flush the output.

    Args:
        failures: The sides that failed, with the reasons.
    """
    sys.stdout.flush()
    if failures:
        say("\nThe comparison is not complete. These did not run, or not each time:")
        for failure in dict.fromkeys(failures):
            say(f"  {failure}")
        sys.exit(1)


def show_json(name: str, rows: Sequence[Row], **more: Any) -> None:
    """Print one JSON object with the benchmark's name, the environment, the rows and further keys."""
    content = {"benchmark": name, "environment": environment(), "rows": [row.as_json() for row in rows], **more}
    print(json.dumps(content, indent=2))


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _ratio(row: Row) -> str:
    return "-" if row.ratio is None else f"{row.ratio:.3f}"


def _aim(row: Row) -> str:
    if row.aim is None:
        return ""
    sign = ">=" if row.larger else "<="
    verdict = {True: "met", False: "missed", None: "unknown"}[row.met]
    return f"{sign} {row.aim:g} {verdict}"
