"""This module has the inspections that a site adds: programs that end with a verdict, and installed Python classes.

The exit code of a program is its verdict, as for health checks of Nagios and of Slurm sites: 0 healthy, 1 a warning
(unknown), 2 faulty. Every other code is unknown, because the check itself failed. The first line of the output is the
text of the finding, and further lines are evidence. A line that begins with ``everstep:`` sets fields of the finding,
e.g. ``everstep: reason=link-slow owner=network``.

A class is a subclass of ``agent.monitor.inspection.Inspection``, named as an entry point of the group
``everstep.inspections``.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from typing import Any, ClassVar

from agent.monitor import programs
from agent.monitor.inspection import Inspection, InspectionResult, Site
from agent.monitor.settings import CheckLimits
from everstep.errors import CannotInspect, ConfigError
from everstep.model.finding import Health, Owner, Reason, Remedy
from everstep.rank import environment

ENTRY_POINTS = "everstep.inspections"
OUTPUT_CHARACTERS = 64 << 10
"""Largest part of a program's output that is used."""
FROM_SIGNAL = 128
"""If a signal ended a program, the shell's exit code is this plus the number of the signal."""
OK, WARNING, CRITICAL = 0, 1, 2
SETTING = "everstep:"
_MEANINGS = {
    WARNING: (Health.UNKNOWN, "a check of the site warns"),
    CRITICAL: (Health.FAULTY, "a check of the site failed"),
}


class OwnCheck(Inspection):
    """Runs a program of the site."""

    name: ClassVar[str] = "check"
    inspects: ClassVar[str] = "the part of the machine that a program of the site inspects"
    reasons: ClassVar[tuple[Reason, ...]] = ()
    limits_type = CheckLimits

    def __init__(self, site: Site, limits: CheckLimits, kept: Mapping[str, Any], *, same_boot: bool) -> None:
        super().__init__(site, limits, kept, same_boot=same_boot)
        self.name = limits.name  # type: ignore[misc]  # each program is an inspection of its own

    def inspect(self) -> InspectionResult:
        """Run the program."""
        ran = programs.run(self.limits.command, self.limits.deadline_s, {environment.MACHINE: self.site.machine})
        code, output = ran.code, ran.output[:OUTPUT_CHARACTERS]
        lines = [line.strip() for line in output.splitlines() if line.strip()]
        text = next((line for line in lines if not line.startswith(SETTING)), "")
        if code == OK:
            return InspectionResult(note=text)
        if code not in _MEANINGS:
            raise CannotInspect(f"{self.limits.command[0]} ended with {_end_of(code)}: {text or 'no output'}")
        verdict, means = _MEANINGS[code]
        reason = self._reason([line for line in lines if line.startswith(SETTING)], verdict, means)
        rest = [line for line in lines if not line.startswith(SETTING)][1:]
        return InspectionResult([self.finding(reason, "", *rest, text=f"{self.name}: {text or means}")])

    def _reason(self, settings: list[str], verdict: Health, means: str) -> Reason:
        words = [word for line in settings for word in line.removeprefix(SETTING).split()]
        fields = dict(word.split("=", 1) for word in words if "=" in word)
        return Reason(
            fields.get("reason", self.name),
            means,
            Owner(fields.get("owner", Owner.MACHINE)),
            Remedy.WATCH if verdict is Health.UNKNOWN else Remedy.REPLACE,
            verdict,
            sure=self.limits.sure and verdict is Health.FAULTY,
        )


def _end_of(code: int) -> str:
    return f"signal {code - FROM_SIGNAL}" if code > FROM_SIGNAL else f"exit code {code}"


def from_entry_points() -> list[type[Inspection]]:
    """Return the inspection classes that a site has installed as entry points.

    Raises:
        ConfigError: an entry point cannot be loaded, or is not an inspection.
    """
    kinds = []
    for entry in importlib.metadata.entry_points(group=ENTRY_POINTS):
        try:
            kind = entry.load()
        except Exception as error:
            raise ConfigError(f"the inspection {entry.name} ({entry.value}) cannot be loaded: {error}") from error
        if not (isinstance(kind, type) and issubclass(kind, Inspection)):
            raise ConfigError(f"the inspection {entry.name} ({entry.value}) is no subclass of {Inspection.__name__}")
        kinds.append(kind)
    return kinds
