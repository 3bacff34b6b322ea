"""Lines about failing copies of the state, for the display of a followed job.

Agents report repeatedly why copies fail, with numbers that change from attempt to attempt. The display gets one line
when copies begin to fail, and one line when they succeed again.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from agent.checkpoints.tiers.remote_copier import REMOTE
from agent.v1 import agent_pb2 as pb
from everstep.base.text import listed
from everstep.decisions.keep.drift import UNSAFE_SLOTS

SETTLE_S = 2.0
"""Shorter failures are not shown, e.g. while a peer starts or reconnects, seconds."""
NAMED = 4
"""At most this many machines are named; the rest are counted."""

MOST_SLOTS = 8
"""Upper limit of ``CheckpointPolicy.slots``."""
STEPS, BACKUP, DISK = "steps", "backup", "disk"
_NUMBER = re.compile(r"\d+(\.\d+)?")
_Key = tuple[str, str]
"""The kind of copy, and the machine whose state is copied."""


@dataclass(frozen=True, slots=True)
class Copying:
    """The progress of one machine's copies of one kind."""

    what: str
    """``backup``, ``disk`` or ``remote storage``."""
    machine: str
    step: int
    """The newest step that all ranks of the machine have copied; -1: none."""
    problem: str
    """Why copies fail at present; empty: they do not fail."""


@dataclass(frozen=True, slots=True)
class ProblemEvent:
    """Copies on some machines began to fail, or succeed again."""

    kind: Literal["began", "ended"]
    what: str
    machines: tuple[str, ...]
    text: str = ""
    """The problem of the first machine."""

    @property
    def line(self) -> str:
        """The event as one line of text."""
        where = f"checkpoints: {self.what} on {listed(self.machines, NAMED, noun='machines')}"
        return f"{where}: {self.text}" if self.kind == "began" else f"{where}: copies succeed again"


def problems_of(rank: pb.RankProgress) -> dict[str, str]:
    """Kind of copy → why a rank's copies fail; an empty text: they do not fail."""
    disk, _, remote = rank.saved.disk_problem.partition(f"{REMOTE} ")  # the agent reports both in one text
    return {
        STEPS: apart_text(rank.saved.apart) if rank.saved.apart else "",
        BACKUP: rank.saved.backup_problem,
        DISK: disk.removesuffix("; "),
        REMOTE: remote,
    }


def apart_text(steps: int) -> str:
    """A message about ranks that drift apart, with a remedy."""
    more_slots = f", or set slots = {steps + UNSAFE_SLOTS}" if steps + UNSAFE_SLOTS <= MOST_SLOTS else ""
    return (
        f"ranks drift up to {steps} steps apart, so that their slots may have no common step. Meanwhile all ranks keep "
        "named steps, and a fault loses the steps after the last named step. Let the ranks communicate more "
        f"often{more_slots}"
    )


def copying_of(ranks: Mapping[str, Iterable[pb.RankProgress]]) -> list[Copying]:
    """The progress of the newest generation's copies; ``ranks``: machine → progress of its ranks."""
    ranks_of = {machine: list(machine_ranks) for machine, machine_ranks in ranks.items()}
    newest = max((rank.generation for machine_ranks in ranks_of.values() for rank in machine_ranks), default=0)
    step_of: dict[str, Callable[[pb.SavedState], int]] = {
        STEPS: lambda saved: saved.own_step,
        BACKUP: lambda saved: saved.backup_step,
        DISK: lambda saved: saved.disk_step,
        REMOTE: lambda saved: saved.remote_step,
    }
    shown = []
    for machine, machine_ranks in sorted(ranks_of.items()):
        current = sorted((rank for rank in machine_ranks if rank.generation == newest), key=lambda rank: rank.rank)
        for what, step in step_of.items() if current else ():
            problem = next(filter(None, (problems_of(rank)[what] for rank in current)), "")
            shown.append(Copying(what, machine, min(step(rank.saved) for rank in current), problem))
    return shown


@dataclass(slots=True)
class ProblemTracker:
    """Derives events from successive states of the copies."""

    _failing: dict[_Key, tuple[int, str]] = field(default_factory=dict)
    """The newest copied step at the last failure, and the reason of the failure; kept until another step is copied."""
    _since: dict[tuple[str, str], float] = field(default_factory=dict)
    """Kind and reason → the time when the problem was first seen, seconds."""
    _reported: dict[_Key, set[str]] = field(default_factory=dict)
    """The texts of problems that were shown, without numbers."""
    _over: dict[str, list[str]] = field(default_factory=dict)
    """Kind → machines where copies succeed again, as far as this was not shown yet."""
    _over_since: dict[str, float] = field(default_factory=dict)

    def changes(self, seen: Sequence[Copying], now_s: float) -> list[ProblemEvent]:
        """The events since the last call.

        A problem ends only when another step is copied: after a restart, agents report no problem until a copy fails
        again.
        """
        failing: dict[tuple[str, str], list[Copying]] = defaultdict(list)
        for copying in seen:
            key = (copying.what, copying.machine)
            if copying.problem:
                self._failing[key] = (copying.step, copying.problem)
                failing[copying.what, _form(copying.problem)].append(copying)
            elif key in self._failing and copying.step >= 0 and copying.step != self._failing[key][0]:
                del self._failing[key]
                if self._reported.pop(key, None):
                    self._over.setdefault(copying.what, []).append(copying.machine)
                    self._over_since.setdefault(copying.what, now_s)
        return [*self._ended(now_s), *self._began(failing, now_s)]

    def _ended(self, now_s: float) -> Iterator[ProblemEvent]:
        for what, since in list(self._over_since.items()):
            if now_s - since >= SETTLE_S or not any(kind == what for kind, _ in self._reported):
                del self._over_since[what]
                yield ProblemEvent("ended", what, tuple(self._over.pop(what)))

    def _began(self, failing: Mapping[tuple[str, str], list[Copying]], now_s: float) -> Iterator[ProblemEvent]:
        active = {(what, _form(text)) for (what, _), (_, text) in self._failing.items()}
        self._since = {cause: since for cause, since in self._since.items() if cause in active}
        for (what, form), machines in failing.items():
            new = [copying for copying in machines if form not in self._reported.get((what, copying.machine), ())]
            if not new or now_s - self._since.setdefault((what, form), now_s) < SETTLE_S:
                continue
            for copying in new:
                self._reported.setdefault((what, copying.machine), set()).add(form)
            yield ProblemEvent("began", what, tuple(copying.machine for copying in new), new[0].problem)

    def left(self) -> list[ProblemEvent]:
        """The problems that have not ended, whether they were shown or not."""
        machines_of: dict[tuple[str, str], list[str]] = defaultdict(list)
        for (what, machine), (_, text) in sorted(self._failing.items()):
            machines_of[what, _form(text)].append(machine)
        return [
            ProblemEvent("began", what, tuple(machines), self._failing[what, machines[0]][1])
            for (what, _), machines in machines_of.items()
        ]


def _form(text: str) -> str:
    """A text without its numbers, which differ between attempts and between machines."""
    return _NUMBER.sub("#", text)
