"""How the inspections of an agent are set: periods, thresholds, what is off, what a site adds of its own.

The file is TOML; every table is optional::

    silence = ["clock-unsynced"]          # reason codes that are never reported

    [gpu]                                 # an inspection by its name: the fields of its limits
    interval_s = 10
    temperature_c = 88

    [packet-loss]
    off = true

    [[check]]                             # a program of the site's own: docs/concepts/inspections.md
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
    """Settings of a program of the site's own."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9-]*$")
    """In findings; small letters, digits and dashes."""
    command: list[str] = Field(min_length=1)
    """The program with its arguments; no shell is between."""
    interval_s: float = Field(default=60.0, gt=0)
    """From one run to the next, seconds."""
    deadline_s: float = Field(default=30.0, gt=0)
    """A run that takes longer is ended, seconds."""
    sure: bool = False
    """Its findings name this machine with high confidence."""


class MonitorSettings(BaseModel):
    """All settings of the monitor."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    off: bool = False
    """No inspection at all."""
    silence: list[str] = Field(default_factory=list)
    """Reason codes that are neither reported nor shown."""
    check: list[CheckLimits] = Field(default_factory=list)
    limits: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Inspection → fields of its limits."""

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
        """The settings of a file.

        Args:
            table: What the file says.
            known: Every inspection by its name, with the type of its limits.
            reasons: Every reason code that they can find.
            origin: For messages, e.g. the path of the file.

        Raises:
            ConfigError: there is no such inspection, setting or value; the message says where and what there is.
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
        if not settings.check and (odd := sorted(set(settings.silence) - set(reasons))):
            near = difflib.get_close_matches(odd[0], reasons, n=1)
            hint = f"did you mean {near[0]!r}?" if near else "docs/concepts/inspections.md lists them"
            raise ConfigError(f"{origin}: silence: no inspection finds {odd[0]!r}: {hint}")
        if taken := [check.name for check in settings.check if check.name in {*known, "monitor"}]:
            raise ConfigError(f"{origin}: {taken[0]!r} is the name of an inspection: give the check another one")
        return settings


def limits_of(settings: MonitorSettings, name: str, kind: type[Limits]) -> Limits:
    """The limits of one inspection."""
    return kind.model_validate(settings.limits.get(name, {}))


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
