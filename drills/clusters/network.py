"""A cluster for drills in which each machine has a network of its own, with TLS and, if needed, PostgreSQL."""

from __future__ import annotations

import importlib.util
import json
import shlex
import shutil
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from controlplane.local import network, ports, postgres, temporal_server
from controlplane.local.certificates import Certificates
from controlplane.local.cluster_file import ClusterFile
from controlplane.local.commands import Commands, agent_command
from controlplane.local.network import CONTROL, FIRST_CARD, SECOND_CARD, Network
from controlplane.local.postgres import Postgres
from drills.clusters.local import DrillCluster
from everstep.errors import CannotInject, ClusterError, NoCluster
from everstep.model.machine import Machine

CONTROL_ADDRESS, FIRST_ADDRESS = "10.99.0.1", "10.99.0.11"
"""Addresses of the control host and of the first machine in their private network."""
LEDGER = "ledger"
"""Name of the ledger's database server among the cluster's processes."""


class NetworkCluster(DrillCluster):
    """A :class:`DrillCluster` whose machines and control host are network namespaces.

    While it is open, the thread that opened it is inside the control host's network, and so is every thread and process
    that this thread starts. Temporal's library keeps its threads for as long as a process lives, so a process can open
    only one such cluster.

    Args:
        with_postgres: Whether the cluster runs a PostgreSQL server for its ledger.
        options: Arguments of :class:`DrillCluster`.

    Raises:
        NoCluster: on entry, if the cluster does not come up.
    """

    def __init__(self, *, with_postgres: bool = False, **options: Any) -> None:
        super().__init__(**options)
        names = [f"m{index}" for index in range(self._machines + self._standbys)]
        self.addresses = {name: ports.machine_host(FIRST_ADDRESS, index) for index, name in enumerate(names)}
        self.network = Network(self.addresses, CONTROL_ADDRESS)
        self.prefix = f"{shlex.join(self.network.inside(CONTROL))} env "
        self._with_postgres = with_postgres
        self._postgres: Postgres | None = None
        self._kept = False
        self._open = ExitStack()

    async def __aenter__(self) -> Self:
        # Do this in this thread: another thread would be started before the network is entered, and stay outside.
        choice = temporal_server.find(self.say)  # inside the namespace nothing can be downloaded
        if choice.address:
            raise NoCluster(
                f"there is no cluster to drill on: the server {choice.address} cannot be reached from the machines' "
                "network: unset TEMPORAL_ADDRESS, or choose a profile without an address"
            )
        self._open.callback(self._remove_network)
        try:
            self._make()
            self._open.enter_context(self.network.entered())
            return await super().__aenter__()
        except BaseException as error:
            self._open.close()
            if isinstance(error, ClusterError) and not isinstance(error, NoCluster):
                raise NoCluster(f"there is no cluster to drill on: {error}") from error
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._kept = self.keep
        with self._open:
            await super().__aexit__(kind, error, trace)

    def bring_up(self) -> ClusterFile:
        """Start the cluster with TLS, and wait until all processes answer."""
        certificates = Certificates(self.folder / "certificates")
        certificates.make(self.addresses)
        ledger = self._postgres.command() if self._postgres else None

        settings = self.folder / "monitor.toml"
        settings.write_text(f"[link]\ninterfaces = {json.dumps([FIRST_CARD, SECOND_CARD])}\n")

        def agent(machine: Machine, state: Path, shm: Path) -> list[str]:
            command = [*agent_command(machine, state, shm), "--monitor", str(settings)]
            return [*self.network.inside(machine.name), *command, *certificates.options(machine.name)]

        return self.up(
            base_address=FIRST_ADDRESS,
            # A forked process is in the network of its template, so here each agent starts its fork servers itself.
            commands=Commands(agent=agent, template=None, ledger=ledger),
            agents_ca=certificates.authority,
            ledger_url=self._postgres.url() if self._postgres else "",
        )

    def _make(self) -> None:
        self.say(f"making a network of {len(self.addresses) + 1} hosts")
        self.network.make()
        self.network.let_ports_be_chosen()
        if self._with_postgres:
            self.say("making a PostgreSQL server for the ledger")
            self._postgres = Postgres()

    def _remove_network(self) -> None:
        if not self._kept:
            if self._postgres:
                self._postgres.remove()
            self.leaked += [f"process {pid} in the network after the cluster was down" for pid in self.network.remove()]


def network_of(cluster: DrillCluster, fault: str) -> Network:
    """Return the network of a cluster's machines.

    Raises:
        CannotInject: the machines have no network of their own.
    """
    if not isinstance(cluster, NetworkCluster):
        raise CannotInject(f"{fault}: the machines of this cluster have no network of their own")
    return cluster.network


def missing(*, with_postgres: bool = False) -> str:
    """Return the first thing that this computer lacks for such a cluster; empty: it lacks nothing."""
    if lacking := network.missing():
        return lacking
    if not shutil.which("openssl"):
        return "there is no program openssl"
    if with_postgres and postgres.programs() is None:
        return postgres.HOW_TO_INSTALL
    if with_postgres and importlib.util.find_spec("psycopg") is None:
        return "everstep was installed without the extra 'postgresql': pip install 'everstep[postgresql]'"
    return ""
