"""Names of jobs and incidents, as users write them and as commands show them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from everstep.errors import ConfigError


@dataclass(frozen=True, slots=True)
class JobRun:
    """The newest run of a job, as Temporal lists it."""

    name: str
    status: str
    """Status of the workflow: ``running``, ``completed``, ``failed``, ``terminated``, …"""
    started: datetime
    closed: datetime | None

    @property
    def running(self) -> bool:
        """Whether the run's workflow is open."""
        return self.status == "running"


def parse_incident(reference: str) -> tuple[str, int | None]:
    """Parse a reference to an incident into its job and number: ``incident/gpt/0002``, ``gpt/2`` or ``gpt``.

    Raises:
        ConfigError: it has none of these forms.
    """
    job, _, number = reference.removeprefix("incident/").removeprefix("job/").partition("/")
    if not job or (number and not number.isdecimal()):
        raise ConfigError(f"{reference!r} names neither a job nor an incident: write gpt, gpt/2 or incident/gpt/0002")
    return job, int(number) if number else None


def option_of(cluster_name: str) -> str:
    """The option that names a cluster in a suggested command; "" for the default cluster."""
    return "" if cluster_name == "default" else f" --cluster {cluster_name}"
