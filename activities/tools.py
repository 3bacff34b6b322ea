"""What a worker has for its activities."""

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
    """What the launching worker reports to its own watcher, so that it need not wait for the next listing."""

    def ensure(self, spec: JobSpec, machines: list[Machine], *, generation: int) -> None:
        """Watch a job, of which this generation is about to run on these machines."""


@dataclass(frozen=True, slots=True)
class Tools:
    """What activities work with."""

    agents: AgentClients
    """Clients of the agents, by address."""
    ledger: Ledger
    watcher: JobHint | None = None
    """None: no watcher learns of jobs that are launched here."""
    cluster: Cluster | None = None
    """Lists the machines; None: the pool knows those that jobs name."""
    notices: NoticeSettings | None = None
    """The receivers of notices; None: there are none."""
    versions: VersionStore | None = None
    """The store of versions of jobs' code; None: jobs run in place only."""
