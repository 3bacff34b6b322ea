"""The clients and stores of a worker that its activities use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from activities.clusters.cluster import Cluster
from activities.ledger.ledger import Ledger
from activities.notices.settings import NoticeSettings
from activities.versions.store import VersionStore
from agent.client import AgentClients
from everstep.model.job import JobSpec
from everstep.model.machine import Machine


class JobHint(Protocol):
    """Tells this worker's watcher about a job that the worker launches. So the watcher need not wait until it lists the
    running jobs again."""

    def ensure(self, spec: JobSpec, machines: list[Machine], *, generation: int) -> None:
        """Watch a job; this generation is about to run on these machines."""


@dataclass(frozen=True, slots=True)
class Tools:
    """The clients and stores that activities use."""

    agents: AgentClients
    """The clients of the agents, by address."""
    ledger: Ledger
    watcher: JobHint | None = None
    """The worker's watcher; None: it is not informed about jobs that are launched here."""
    cluster: Cluster | None = None
    """The source of machines; None: the pool knows only the machines that jobs name."""
    notices: NoticeSettings | None = None
    """The receivers of notices; None: there are none."""
    versions: VersionStore | None = None
    """The store of code versions; None: jobs run in place only."""
