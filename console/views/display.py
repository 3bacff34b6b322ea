"""The displays of a followed job: a bar on a terminal, lines in a pipe, JSON lines for a script."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol, TextIO

from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn

from console.terminal import PlainConsole
from controlplane import text
from controlplane.problems import ProblemEvent
from controlplane.queries.events import IncidentEvent, incident_line
from controlplane.shown import clean, clean_line

TICK_S = 1.0
"""Shortest time between two lines about steps in a pipe, seconds."""
QUIET_S = 10.0
"""A job without a new step gets a line this often, seconds."""

BAR = 12
WIDE = 100
"""A terminal with fewer columns gets no bar."""
BESIDE_LINE = 3
"""Columns of the spinner and the gaps, beside the bar."""


@dataclass(frozen=True, slots=True)
class Tick:
    """The progress of a job at one moment."""

    job: str
    status: str
    generation: int
    step: int | None
    """Steps that all ranks have completed."""
    loss: float | None
    steps_per_s: float | None
    tokens_per_s: float | None
    ettr: float | None
    """Productive time over wall time, 0 to 1."""
    ranks_alive: int
    ranks: int
    incidents: int
    silent: tuple[str, ...] = ()
    """Machines whose agent does not answer."""

    @property
    def line(self) -> str:
        """All values in one line."""
        return "  ".join(self._parts())

    def within(self, columns: int) -> str:
        """The line for a narrow terminal: the least important values are left out, so that problems stay visible."""
        parts = self._parts()
        for word in ("token/s", "generation ", "ETTR ", "incidents ", "loss "):
            if len("  ".join(parts)) <= columns:
                break
            parts = [part for part in parts if word not in part]
        return "  ".join(parts)

    def _parts(self) -> list[str]:
        if self.step is None:
            return [self.status, f"{self.ranks_alive} of {self.ranks} ranks", f"generation {self.generation}"]
        return [
            f"step {self.step}",
            f"loss {text.loss(self.loss)}",
            text.per_second(self.steps_per_s, "step"),
            *([text.per_second(self.tokens_per_s, "token")] if self.tokens_per_s else []),
            f"ETTR {text.ratio(self.ettr)}",
            f"generation {self.generation}",
            *([f"incidents {self.incidents}"] if self.incidents else []),
            *([f"{self.ranks_alive} of {self.ranks} ranks"] if self.ranks_alive != self.ranks else []),
            *([self.status] if self.status != "running" else []),
            *([f"no answer from {', '.join(self.silent)}"] if self.silent else []),
        ]


@dataclass(frozen=True, slots=True)
class Ending:
    """The reason why a job is not followed any more."""

    outcome: str
    """``finished``, ``failed``, ``stopped``, ``parked`` or ``detached``."""
    headline: str
    details: tuple[str, ...]
    exit_code: int
    facts: dict[str, Any] = field(default_factory=dict)
    """The outcome in numbers, for a script."""


class Display(Protocol):
    """Shows the events of a followed job."""

    def note(self, line: str) -> None:
        """Show a note for the user."""

    def started(self, job: str, facts: dict[str, Any], lines: Sequence[str]) -> None:
        """Show which job is followed from now on."""

    def tick(self, tick: Tick) -> None:
        """Show the job's progress; called several times a second."""

    def problem(self, event: ProblemEvent) -> None:
        """Show that copies of the state began to fail, or succeed again."""

    def incident(self, event: IncidentEvent, details: Sequence[str]) -> None:
        """Show an event of an incident."""

    def ended(self, ending: Ending) -> None:
        """Show the ending, and restore the terminal."""


def _is_shown_twice(event: IncidentEvent) -> bool:
    """Whether the next event repeats this one: the incident was opened and closed between two polls."""
    return event.kind == "opened" and bool(event.incident.resolution)


class Lines:
    """Shows plain lines, about one a second while the job steps."""

    def __init__(self, out: TextIO | None = None) -> None:
        self._out = out or sys.stdout
        self._shown_at = 0.0
        self._last_shown = ""

    def note(self, line: str) -> None:
        """Print one line with the time."""
        self._print(f"{text.clock(time.time_ns())}  {line}")

    def started(self, job: str, facts: dict[str, Any], lines: Sequence[str]) -> None:
        """Print the lines as they are."""
        for line in lines:
            self._print(line)

    def tick(self, tick: Tick) -> None:
        """Print a line if the job has progressed, at most one line a second."""
        now = time.monotonic()
        quiet = now - self._shown_at
        state = f"{tick.step} {tick.generation} {tick.status} {tick.silent}"
        if quiet < TICK_S or (state == self._last_shown and quiet < QUIET_S):
            return
        self._shown_at, self._last_shown = now, state
        self.note(tick.line)

    def problem(self, event: ProblemEvent) -> None:
        """Print the event."""
        self.note(event.line)

    def incident(self, event: IncidentEvent, details: Sequence[str]) -> None:
        """Print the event and, below it, its details."""
        if _is_shown_twice(event):
            return
        self.note(incident_line(event))
        for line in details:
            self._print(f"              {line}")

    def ended(self, ending: Ending) -> None:
        """Print the last lines."""
        self._print(ending.headline)
        for line in ending.details:
            self._print(f"  {line}")

    def _print(self, line: str) -> None:
        print(clean(line), file=self._out, flush=True)


class Json:
    """One JSON object per line, each with ``event`` and ``time`` (seconds of the wall clock)."""

    def __init__(self, out: TextIO | None = None) -> None:
        self._out = out or sys.stdout
        self._shown_at = 0.0

    def note(self, line: str) -> None:
        """``{"event": "note", "text": …}``"""
        self._print("note", text=line)

    def started(self, job: str, facts: dict[str, Any], lines: Sequence[str]) -> None:
        """``{"event": "started", "job": …, …}``"""
        self._print("started", job=job, **facts)

    def tick(self, tick: Tick) -> None:
        """``{"event": "progress", …}``, once a second."""
        now = time.monotonic()
        if now - self._shown_at >= TICK_S:
            self._shown_at = now
            self._print("progress", **asdict(tick))

    def problem(self, event: ProblemEvent) -> None:
        """``{"event": "problem", "kind": "began", "what": "disk", "machines": […], "text": …}``"""
        self._print("problem", **asdict(event))

    def incident(self, event: IncidentEvent, details: Sequence[str]) -> None:
        """``{"event": "incident", "kind": "opened", …}``"""
        self._print("incident", kind=event.kind, details=list(details), **event.incident.model_dump())

    def ended(self, ending: Ending) -> None:
        """``{"event": "ended", "outcome": …, "exit_code": …}``"""
        self._print("ended", **asdict(ending))

    def _print(self, event: str, **values: Any) -> None:
        print(json.dumps({"event": event, "time": round(time.time(), 3)} | values), file=self._out, flush=True)


class Terminal:
    """Shows a bar that moves while the job steps, and lines above it.

    The bar does not show how much of the job is done, since only the script knows its number of steps.
    """

    def __init__(self) -> None:
        self._console = PlainConsole()
        self._wide = self._console.width >= WIDE
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", style="bold", markup=False),
            *([BarColumn(bar_width=BAR)] if self._wide else []),
            TextColumn("{task.fields[line]}", markup=False),
            console=self._console,
            transient=True,
            refresh_per_second=8,
        )
        self._task: TaskID | None = None

    def note(self, line: str) -> None:
        """Print one line above the bar."""
        self._show(f"{text.clock(time.time_ns())}  {line}")

    def started(self, job: str, facts: dict[str, Any], lines: Sequence[str]) -> None:
        """Print the lines, and then start the bar."""
        for line in lines:
            self._show(line)
        self._task = self._bar.add_task(job, total=None, line="")
        self._bar.start()

    def tick(self, tick: Tick) -> None:
        """Move the bar."""
        if self._task is not None:
            bar = BAR + 1 if self._wide else 0
            room = self._console.width - len(tick.job) - BESIDE_LINE - bar
            self._bar.update(self._task, line=clean_line(tick.within(room)))

    def problem(self, event: ProblemEvent) -> None:
        """Print a line above the bar."""
        self._show(f"{text.clock(time.time_ns())}  {event.line}", "yellow" if event.kind == "began" else "green")

    def incident(self, event: IncidentEvent, details: Sequence[str]) -> None:
        """Print lines above the bar, in a colour that shows their severity."""
        if _is_shown_twice(event):
            return
        style = {"recovered": "green", "parked": "red", "closed": "red"}.get(event.kind, "yellow")
        self._show(f"{text.clock(time.time_ns())}  {incident_line(event)}", style)
        for line in details:
            self._show(f"              {line}", "dim")

    def ended(self, ending: Ending) -> None:
        """Remove the bar, and print the ending."""
        self._bar.stop()
        style = {"finished": "bold green", "detached": "bold", "stopped": "bold"}.get(ending.outcome, "bold red")
        self._show(ending.headline, style)
        for line in ending.details:
            self._show(f"  {line}")

    def _show(self, line: str, style: str = "") -> None:
        # Soft wrap, since users copy links and commands, and a hard break would cut them.
        self._console.print(line, style=style, soft_wrap=True)


def display_for(*, as_json: bool) -> Display:
    """The display for a terminal, a pipe or a script."""
    if as_json:
        return Json()
    return Terminal() if sys.stdout.isatty() else Lines()
