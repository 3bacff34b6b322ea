"""The lines about failing copies of state that are shown while a job is followed.

The agents say at every moment why a copy fails, with numbers that change from
try to try. One line says that it fails, and one that it is over.
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
from everstep.decisions.keep.drift import HELD_BACK

SETTLE_S = 2.0
"""A shorter failure is not shown: a peer that is launched later, a connection that is made anew."""
NAMED = 4
"""Machines that are named; the others are counted."""

MOST_SLOTS = 8
"""``CheckpointPolicy.slots`` takes no more."""
STEPS, BACKUP, DISK = "steps", "backup", "disk"
_NUMBER = re.compile(r"\d+(\.\d+)?")
_Key = tuple[str, str]
"""What is copied where to, and from which machine."""


@dataclass(frozen=True, slots=True)
class Copying:
    """How one machine's copies of one kind go."""

    what: str
    """``backup``, ``disk`` or ``remote storage``."""
    machine: str
    step: int
    """The newest that is there of all ranks of the machine; -1: none."""
    problem: str
    """Why they fail at the moment; empty: they do not."""


@dataclass(frozen=True, slots=True)
class ProblemEvent:
    """Copies began to fail on some machines, or are in order again."""

    kind: Literal["began", "ended"]
    what: str
    machines: tuple[str, ...]
    text: str = ""
    """The text of the first of the machines."""

    @property
    def line(self) -> str:
        """The event for a person."""
        where = f"checkpoints: {self.what} on {listed(self.machines, NAMED, noun='machines')}"
        return f"{where}: {self.text}" if self.kind == "began" else f"{where}: in order again"


def problems_of(rank: pb.RankProgress) -> dict[str, str]:
    """Why a rank's copies of each kind fail; empty texts where they do not."""
    disk, _, remote = rank.saved.disk_problem.partition(f"{REMOTE} ")  # the agent says both in one text
    return {
        STEPS: apart_text(rank.saved.apart) if rank.saved.apart else "",
        BACKUP: rank.saved.backup_problem,
        DISK: disk.removesuffix("; "),
        REMOTE: remote,
    }


def apart_text(steps: int) -> str:
    """What it means that ranks drift apart, and what helps."""
    enough = f", or slots = {steps + HELD_BACK}" if steps + HELD_BACK <= MOST_SLOTS else ""
    return (
        f"ranks drift up to {steps} steps apart, and their slots have no step in common by themselves. All of them "
        "keep named steps meanwhile, and a fault costs what came after the last one. What helps: ranks that meet more "
        f"often{enough}"
    )


def copying_of(ranks: Mapping[str, Iterable[pb.RankProgress]]) -> list[Copying]:
    """How the copies of the newest generation go; ``ranks``: machine → what its agent shows."""
    everyone = {machine: list(machine_ranks) for machine, machine_ranks in ranks.items()}
    newest = max((rank.generation for machine_ranks in everyone.values() for rank in machine_ranks), default=0)
    step_of: dict[str, Callable[[pb.SavedState], int]] = {
        STEPS: lambda saved: saved.own_step,
        BACKUP: lambda saved: saved.backup_step,
        DISK: lambda saved: saved.disk_step,
        REMOTE: lambda saved: saved.remote_step,
    }
    shown = []
    for machine, machine_ranks in sorted(everyone.items()):
        known = sorted((rank for rank in machine_ranks if rank.generation == newest), key=lambda rank: rank.rank)
        for what, step in step_of.items() if known else ():
            problem = next(filter(None, (problems_of(rank)[what] for rank in known)), "")
            shown.append(Copying(what, machine, min(step(rank.saved) for rank in known), problem))
    return shown


@dataclass(slots=True)
class ProblemTeller:
    """Finds the events between successive pictures of how the copies go."""

    _failing: dict[_Key, tuple[int, str]] = field(default_factory=dict)
    """The step that was there when copies failed last, and why they did; until another step is there."""
    _since: dict[tuple[str, str], float] = field(default_factory=dict)
    """What and why → when it was first seen, seconds."""
    _reported: dict[_Key, set[str]] = field(default_factory=dict)
    """Problems that were shown, without their numbers."""
    _over: dict[str, list[str]] = field(default_factory=dict)
    """What → machines where it is over, which is not shown yet."""
    _over_since: dict[str, float] = field(default_factory=dict)

    def changes(self, seen: Sequence[Copying], now_s: float) -> list[ProblemEvent]:
        """The events since the last call.

        A problem is over when another step is there: a restart, too, forgets
        why the last copy failed.
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
            if now_s - since >= SETTLE_S or not any(known == what for known, _ in self._reported):
                del self._over_since[what]
                yield ProblemEvent("ended", what, tuple(self._over.pop(what)))

    def _began(self, failing: Mapping[tuple[str, str], list[Copying]], now_s: float) -> Iterator[ProblemEvent]:
        known = {(what, _form(text)) for (what, _), (_, text) in self._failing.items()}
        self._since = {cause: since for cause, since in self._since.items() if cause in known}
        for (what, form), having in failing.items():
            new = [copying for copying in having if form not in self._reported.get((what, copying.machine), ())]
            if not new or now_s - self._since.setdefault((what, form), now_s) < SETTLE_S:
                continue
            for copying in new:
                self._reported.setdefault((what, copying.machine), set()).add(form)
            yield ProblemEvent("began", what, tuple(copying.machine for copying in new), new[0].problem)

    def left(self) -> list[ProblemEvent]:
        """What failed last and is not known to be over, shown before or not."""
        machines_of: dict[tuple[str, str], list[str]] = defaultdict(list)
        for (what, machine), (_, text) in sorted(self._failing.items()):
            machines_of[what, _form(text)].append(machine)
        return [
            ProblemEvent("began", what, tuple(machines), self._failing[what, machines[0]][1])
            for (what, _), machines in machines_of.items()
        ]


def _form(text: str) -> str:
    """A text without its numbers, which change from try to try and from machine to machine."""
    return _NUMBER.sub("#", text)
