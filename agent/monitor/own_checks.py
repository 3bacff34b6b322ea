"""A site's own checks: a program that prints a verdict, or a class that is installed.

A program says its verdict by its exit code, as health checks of Nagios and of Slurm sites do: 0 healthy, 1 a warning,
2 faulty, 3 unknown; any other code is unknown too, for then the program itself failed. Its first line of output is the
text, the others are evidence. Names of lines that begin with ``everstep:`` are settings of the finding, e.g.
``everstep: reason=link-slow owner=network``.

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
"""Longest output of a program that is kept."""
FROM_SIGNAL = 128
"""A shell's exit code for a program that a signal ended: this and the signal's number."""
OK, WARNING, CRITICAL = 0, 1, 2
SETTING = "everstep:"
_MEANINGS = {
    WARNING: (Health.UNKNOWN, "a check of the site warns"),
    CRITICAL: (Health.FAULTY, "a check of the site failed"),
}


class OwnCheck(Inspection):
    """Runs a program of the site's own."""

    name: ClassVar[str] = "check"
    inspects: ClassVar[str] = "what a program of the site looks at"
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
            raise CannotInspect(f"{self.limits.command[0]} ended with {_said(code)}: {text or 'no output'}")
        verdict, means = _MEANINGS[code]
        reason = self._reason([line for line in lines if line.startswith(SETTING)], verdict, means)
        rest = [line for line in lines if not line.startswith(SETTING)][1:]
        return InspectionResult([self.finding(reason, "", *rest, text=f"{self.name}: {text or means}")])

    def _reason(self, settings: list[str], verdict: Health, means: str) -> Reason:
        words = [word for line in settings for word in line.removeprefix(SETTING).split()]
        given = dict(word.split("=", 1) for word in words if "=" in word)
        return Reason(
            given.get("reason", self.name),
            means,
            Owner(given.get("owner", Owner.MACHINE)),
            Remedy.WATCH if verdict is Health.UNKNOWN else Remedy.REPLACE,
            verdict,
            sure=self.limits.sure and verdict is Health.FAULTY,
        )


def _said(code: int) -> str:
    return f"signal {code - FROM_SIGNAL}" if code > FROM_SIGNAL else f"exit code {code}"


def from_entry_points() -> list[type[Inspection]]:
    """The classes that are installed.

    Raises:
        ConfigError: one cannot be loaded, or is no inspection.
    """
    found = []
    for entry in importlib.metadata.entry_points(group=ENTRY_POINTS):
        try:
            kind = entry.load()
        except Exception as error:
            raise ConfigError(f"the inspection {entry.name} ({entry.value}) cannot be loaded: {error}") from error
        if not (isinstance(kind, type) and issubclass(kind, Inspection)):
            raise ConfigError(f"the inspection {entry.name} ({entry.value}) is no subclass of {Inspection.__name__}")
        found.append(kind)
    return found
