"""A cluster of a drill whose machines have a network of their own, TLS and, where a drill needs it, PostgreSQL."""

from __future__ import annotations

import importlib.util
import shlex
import shutil
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from console.cluster_file import ClusterFile
from console.drill.cluster import DrillCluster
from console.local import cluster as local
from console.local import network, ports, postgres
from console.local.certificates import Certificates
from console.local.network import CONTROL, Network
from console.local.postgres import Postgres
from everstep.machine import Machine

CONTROL_ADDRESS, FIRST_ADDRESS = "10.99.0.1", "10.99.0.11"
"""Nobody else is in that network."""
LEDGER = "ledger"
"""Name of the ledger's server among the cluster's processes."""


class NetworkCluster(DrillCluster):
    """As :class:`DrillCluster`; each machine is a network namespace, and so is the control host.

    While it is open the thread that opened it, and all that it starts from then
    on, are on the control host.

    Args:
        with_postgres: The ledger is a PostgreSQL server of the cluster's own.
        given: As for :class:`DrillCluster`.

    Raises:
        NoCluster: on entry: it does not come up.
    """

    def __init__(self, *, with_postgres: bool = False, **given: Any) -> None:
        super().__init__(**given)
        names = [f"m{index}" for index in range(self._machines + self._standbys)]
        self.addresses = {name: ports.machine_host(FIRST_ADDRESS, index) for index, name in enumerate(names)}
        self.network = Network(self.addresses, CONTROL_ADDRESS)
        self.prefix = f"{shlex.join(self.network.inside(CONTROL))} env "
        self._with_postgres = with_postgres
        self._postgres: Postgres | None = None
        self._open = ExitStack()

    async def __aenter__(self) -> Self:
        self._open.callback(self._remove_network)
        try:
            self.network.make()
            self._open.enter_context(self.network.entered())
            return await super().__aenter__()
        except BaseException:
            self._open.close()
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._open:
            await super().__aexit__(kind, error, trace)

    def bring_up(self) -> ClusterFile:
        """Start everything; returns when it answers."""
        self.say(f"making a network of {len(self.addresses) + 1} hosts, and certificates")
        certificates = Certificates(self.folder / "certificates")
        certificates.make(self.addresses)
        ledger: list[str] | None = None
        if self._with_postgres:
            self.say("making a PostgreSQL server for the ledger")
            self._postgres = Postgres()
            ledger = self._postgres.command()

        def agent(machine: Machine, state: Path, shm: Path) -> list[str]:
            command = local.agent_command(machine, state, shm)
            return [*self.network.inside(machine.name), *command, *certificates.options(machine.name)]

        return local.up(
            self.name,
            machines=self._machines,
            standbys=self._standbys,
            workers=self._workers,
            progress=self.say,
            base_address=FIRST_ADDRESS,
            # What is forked from a template is in the network of the template: each agent starts its fork servers.
            commands=local.Commands(agent=agent, template=None, ledger=ledger),
            agents_ca=certificates.authority,
            ledger_url=self._postgres.url() if self._postgres else "",
        )

    def clear(self) -> None:
        """Remove the files once the cluster is down."""
        super().clear()
        if self._postgres:
            self._postgres.remove()

    def _remove_network(self) -> None:
        if not self.keep:
            self.leaked += [f"process {pid} in the network after the cluster was down" for pid in self.network.remove()]


def missing(*, with_postgres: bool = False) -> str:
    """What such a cluster lacks here; empty: nothing."""
    if not shutil.which("openssl"):
        return "there is no program openssl"
    if with_postgres and postgres.programs() is None:
        return postgres.HOW_TO_INSTALL
    if with_postgres and importlib.util.find_spec("psycopg") is None:
        return "everstep was installed without the extra 'postgresql': pip install 'everstep[postgresql]'"
    return network.missing()
