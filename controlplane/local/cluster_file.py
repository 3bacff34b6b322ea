"""The description of a local cluster, which is one JSON file in its home, and the lock for its changes."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pydantic import BaseModel, Field

from controlplane.local.ports import DEFAULT
from everstep.base.addresses import Ports
from everstep.errors import ClusterError
from everstep.model.job import JOB_NAME
from everstep.model.job_state import TASK_QUEUE
from everstep.model.machine import Machine
from everstep.rank import environment
from everstep.system import private_files as private


def everstep_home() -> Path:
    """The folder of all local clusters: ``EVERSTEP_HOME``, or ``everstep`` in the user's state folder."""
    if home := os.environ.get(environment.HOME):
        return Path(home)
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "everstep"


class ClusterFile(BaseModel):
    """A local cluster: its addresses, folders and machines."""

    name: str
    id: str = ""
    """Id in the environment of all its processes (``EVERSTEP_CLUSTER``) and in the path of its shared memory; it is
    unique on this computer."""
    home: Path
    """Folder of this cluster: ``<everstep home>/clusters/<name>``."""
    shm: Path
    """Folder in /dev/shm that holds all its shared memory."""
    temporal_address: str
    namespace: str = "everstep"
    task_queue: str = TASK_QUEUE
    """Task queue of its jobs; the default is for clusters that an earlier release started."""
    ui_url: str
    ledger_url: str
    token_file: Path | None = None
    """File with the token of its agents; None: an earlier release without tokens started it."""
    agents_ca: Path | None = None
    """Certificate of the authority of its agents' certificates; None: they have no TLS."""
    monitor: Path | None = None
    """File with the settings of its agents' inspections; None: the defaults."""
    notices: Path | None = None
    """File with the receivers of notices; None: no receivers."""
    machines: list[Machine]
    """All machines, the standbys last."""
    ports: str = ""
    """Range of the ports of its agents, and of their data ports; empty: agents use the default range, and the kernel
    chooses their data ports, which therefore take no port that another cluster has claimed."""
    standbys: int = Field(0, ge=0)
    at_most: int = Field(0, ge=0)
    """Upper limit to which the machine pool may grow the cluster; 0: it does not grow by itself."""
    workers: int = Field(2, ge=1)

    @property
    def port_range(self) -> Ports:
        """The range of its agents' ports."""
        return Ports.parse(self.ports) if self.ports else DEFAULT

    @property
    def versions_url(self) -> str:
        """URL of its store of code versions."""
        return str(self.home / "versions")

    @property
    def database(self) -> Path:
        """The database of its own Temporal server; a cluster with a configured server has none."""
        return self.home / "temporal.db"

    @classmethod
    def home_of(cls, name: str) -> Path:
        """The folder of a cluster.

        Raises:
            ClusterError: the name is invalid.
        """
        if not JOB_NAME.fullmatch(name):
            raise ClusterError(f"{name!r} is not a cluster name: use up to 30 of a-z, 0-9 and '-'")
        return everstep_home() / "clusters" / name

    @classmethod
    def path_of(cls, name: str) -> Path:
        """The path of a cluster's description."""
        return cls.home_of(name) / "cluster.json"

    @classmethod
    def load(cls, name: str) -> ClusterFile:
        """Read the description of a cluster.

        Raises:
            ClusterError: there is no such cluster, or its file is damaged.
        """
        path = cls.path_of(name)
        try:
            return cls.model_validate_json(path.read_text())
        except FileNotFoundError:
            raise ClusterError(
                f"no cluster {name!r} is up ({path} does not exist): start it with 'everstep up'"
            ) from None
        except ValueError as error:
            raise ClusterError(f"{path} is damaged ({error}): run 'everstep down' and 'everstep up'") from error

    def save(self) -> None:
        """Write the description atomically."""
        path = self.path_of(self.name)
        private.make_folder(path.parent)
        private.replace(path, self.model_dump_json(indent=2))


def kept_settings(name: str, option: str, given: Path | None, before: Path | None) -> Path | None:
    """The file with settings that a running cluster uses.

    Raises:
        ClusterError: the option names another file.
    """
    if given and given != before:
        has = f"with the settings of {before}" if before else "without such a file"
        raise ClusterError(f"{option} {given}: cluster {name!r} is running {has}. Take it down first: everstep down")
    return before


@contextmanager
def lock(home: Path) -> Iterator[None]:
    """Hold the lock of a cluster, so that at most one change of the cluster runs at a time.

    The lock file lies beside the cluster's folder, since the folder may be removed meanwhile.
    """
    with open(private.make_folder(home.parent) / f".{home.name}.lock", "w", opener=private.open_file) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
