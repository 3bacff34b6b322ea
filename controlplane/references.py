"""How a person names a job or an incident, and what is said of one that does not exist."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from everstep.errors import ConfigError

if TYPE_CHECKING:  # SQLAlchemy: no command waits for it that needs no ledger
    pass


@dataclass(frozen=True, slots=True)
class JobRun:
    """The newest run of a job, as Temporal lists it."""

    name: str
    status: str
    """``running``, ``completed``, ``failed``, ``terminated``, … of the workflow."""
    started: datetime
    closed: datetime | None

    @property
    def running(self) -> bool:
        """Whether its workflow is open."""
        return self.status == "running"


def parse_incident(reference: str) -> tuple[str, int | None]:
    """Job and number of an incident as people write it: ``incident/gpt/0002``, ``gpt/2`` or ``gpt``.

    Raises:
        ConfigError: it is none of these.
    """
    job, _, number = reference.removeprefix("incident/").removeprefix("job/").partition("/")
    if not job or (number and not number.isdecimal()):
        raise ConfigError(f"{reference!r} names neither a job nor an incident: write gpt, gpt/2 or incident/gpt/0002")
    return job, int(number) if number else None


def option_of(cluster_name: str) -> str:
    """The option that names a cluster in a command that we suggest; "" for the default one."""
    return "" if cluster_name == "default" else f" --cluster {cluster_name}"
