"""This module has the settings of inspections: periods, thresholds, inspections that are off, programs of the site.

The file is TOML; every table is optional::

    silence = ["clock-unsynced"]          # reason codes that are never reported

    [gpu]                                 # the name of an inspection, and its settings
    interval_s = 10
    temperature_c = 88

    [packet-loss]
    off = true

    [[check]]                             # a program of the site: docs/guides/inspect-machines.md
    name = "site-health"
    command = ["/opt/site/health.sh", "--short"]
    interval_s = 60
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from agent.monitor.inspection import Limits
from everstep.errors import ConfigError

M = TypeVar("M", bound=BaseModel)


class CheckLimits(Limits):
    """Settings of a program of the site."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9-]*$")
    """Name in findings: lower-case letters, digits and dashes."""
    command: list[str] = Field(min_length=1)
    """The program and its arguments, which no shell interprets."""
    interval_s: float = Field(default=60.0, gt=0)
    """Period, seconds."""
    deadline_s: float = Field(default=30.0, gt=0)
    """A program that takes longer is killed, seconds."""
    sure: bool = False
    """Whether faults that it reports name this machine with high confidence."""


class MonitorSettings(BaseModel):
    """All settings of the monitor."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    off: bool = False
    """Turn all inspections off."""
    silence: list[str] = Field(default_factory=list)
    """Codes of reasons that are neither reported nor shown."""
    check: list[CheckLimits] = Field(default_factory=list)
    """Programs of the site."""
    limits: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Name of an inspection → its settings that differ from the defaults."""

    @field_validator("check")
    @classmethod
    def _names_differ(cls, checks: list[CheckLimits]) -> list[CheckLimits]:
        names = [check.name for check in checks]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"two checks are named {twice[0]!r}: give each its own name")
        return checks

    @classmethod
    def parse(
        cls, table: Mapping[str, Any], known: Mapping[str, type[Limits]], reasons: Collection[str], origin: str
    ) -> MonitorSettings:
        """Check the contents of a settings file.

        Args:
            table: The parsed file.
            known: Name of each inspection → the type of its settings.
            reasons: All reason codes of these inspections.
            origin: Beginning of error messages, e.g. the path of the file.

        Raises:
            ConfigError: an inspection, a setting or a value does not exist; the message lists the existing ones.
        """
        own = {"off", "silence", "check"}
        limits = {name: value for name, value in table.items() if name not in own}
        for name, fields in limits.items():
            if name not in known:
                raise ConfigError(f"{origin}: there is no inspection {name!r}; there are {', '.join(sorted(known))}")
            if not isinstance(fields, dict):
                raise ConfigError(f"{origin}: {name} must be a table: write [{name}] and its settings below")
            _checked(known[name], fields, f"{origin}: [{name}]")
        settings = _checked(cls, {name: table[name] for name in own & table.keys()} | {"limits": limits}, origin)
        if not settings.check and (unknown := sorted(set(settings.silence) - set(reasons))):
            near = difflib.get_close_matches(unknown[0], reasons, n=1)
            hint = f"did you mean {near[0]!r}?" if near else "docs/reference/inspections.md lists all codes"
            raise ConfigError(f"{origin}: silence: no inspection reports {unknown[0]!r}: {hint}")
        if taken := [check.name for check in settings.check if check.name in {*known, "monitor"}]:
            raise ConfigError(f"{origin}: {taken[0]!r} is the name of an inspection: give the check another one")
        return settings


def _checked(kind: type[M], fields: Mapping[str, Any], where: str) -> M:
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        if first["type"] == "extra_forbidden":
            raise ConfigError(
                f"{where}: there is no setting {place!r}; there are {', '.join(sorted(kind.model_fields))}"
            ) from None
        raise ConfigError(f"{where}: {place} is {first.get('input')!r}: {first['msg']}") from None
