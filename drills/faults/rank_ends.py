"""Faults that end a rank: by a signal, by an exit of its own, or by an exception."""

from __future__ import annotations

from random import Random
from typing import Any, Literal, get_args

from pydantic import Field, field_validator

from drills.faults.fault import RankFault
from drills.spec.fault import Entry, OnRanks
from everstep.decisions.blame.classify.first_cause import classification
from everstep.decisions.blame.repeated_errors import OF_HARDWARE, REPEATS
from everstep.model.job import JobSpec
from everstep.model.topology import Topology
from everstep.rank.drill_faults import exception_named

Signal = Literal["KILL", "SEGV", "ABRT"]
CODES = (0, 1, 3)
"""Exit codes that a soak draws."""
EXCEPTIONS = ("ValueError", "RuntimeError", "IndexError")
"""Exceptions that a soak draws."""


class KillRank(OnRanks, RankFault):
    """One or several ranks are killed at once."""

    name = "kill-rank"
    summary = "a rank gets the signal; several at once"
    line = "SIG{signal} to {ranks}"
    action = "kill-rank"
    meets = "opening"

    signal: Signal = Field("KILL", description="The signal.")

    @field_validator("signal", mode="before")
    @classmethod
    def _without_prefix(cls, value: Any) -> Any:
        return value.upper().removeprefix("SIG") if isinstance(value, str) else value

    def details(self, spec: JobSpec) -> Entry:
        return {"signal": self.signal}

    @classmethod
    def draw(cls, rng: Random, topology: Topology, *, alone: bool) -> dict[str, Any]:
        """Draw one or two ranks, and a signal."""
        count = min(rng.choice((1, 1, 2)), topology.world_size)
        return {"ranks": sorted(rng.sample(range(topology.world_size), count)), "signal": rng.choice(get_args(Signal))}


class ExitRank(OnRanks, RankFault):
    """A rank exits in the middle of a step."""

    name = "exit-rank"
    summary = "os._exit(C) in the middle of a step, 0 included"
    line = "{ranks} leaves with code {code}"
    drawn = {"code": CODES}
    action = "exit-rank"
    meets = "opening"

    code: int = Field(1, ge=0, le=255, description="The exit code.", json_schema_extra={"metavar": "C"})

    def details(self, spec: JobSpec) -> Entry:
        return {"code": self.code}


class RaiseException(OnRanks, RankFault):
    """A rank raises an exception in user code."""

    name = "raise"
    summary = "a Python exception in user code"
    line = "{ranks} raises {exception}"
    drawn = {"exception": EXCEPTIONS}
    action = "raise"
    meets = "opening"

    exception: str = Field("RuntimeError", description="A built-in exception.", json_schema_extra={"metavar": "NAME"})
    message: str = Field(
        "",
        description="Its text, e.g. that of a GPU error; by default a text about the drill.",
        json_schema_extra={"metavar": "TEXT"},
    )

    @field_validator("exception")
    @classmethod
    def _built_in(cls, value: str) -> str:
        exception_named(value)
        return value

    def details(self, spec: JobSpec) -> Entry:
        return {"exception": self.exception} | ({"message": self.message} if self.message else {})

    def leaving(self, spec: JobSpec) -> list[str]:
        """Return the machine of the first rank if the text names a fault of hardware, and is raised often enough."""
        owner = classification(f"{self.exception}: {self.message}", "", 1).owner
        return [self.struck_machine(spec)] if owner in OF_HARDWARE and self.times >= REPEATS else []


class KillDuringSave(OnRanks, RankFault):
    """A rank is killed when a slot of its checkpoint is half written."""

    name = "kill-during-save"
    summary = "SIGKILL in the middle of a checkpoint write"
    line = "SIGKILL to {ranks} in the middle of a save"
    action = "kill-during-save"
    point = "save"
    meets = "opening"
