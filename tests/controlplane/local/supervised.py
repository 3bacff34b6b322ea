"""A supervisor for one test, with simple programs in place of a cluster's processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from controlplane.local import cluster_processes
from controlplane.local.cluster import SHM_ROOT
from controlplane.local.plan import ClusterPlan, ProcessPlan, State

PYTHON = [sys.executable, "-P", "-c"]
SLEEP = "import time; time.sleep(600)"
PATIENCE_S = 30.0


class Trial:
    """A supervisor and its home folder."""

    def __init__(self, home: Path, cluster_id: str) -> None:
        self.home, self.cluster_id = home, cluster_id
        self.shm = SHM_ROOT / cluster_id

    def plan(self, *processes: ProcessPlan) -> None:
        ClusterPlan(self.cluster_id, str(self.shm), list(processes)).save(self.home)

    def start(self) -> int:
        with (self.home / "supervisor.log").open("ab") as log:
            return subprocess.run(
                [sys.executable, "-P", "-m", "controlplane.local.supervisor", str(self.home)],
                env=os.environ | {"EVERSTEP_CLUSTER": self.cluster_id},
                stdout=log,
                stderr=log,
                check=False,
            ).returncode

    @property
    def state(self) -> State:
        return State.load(self.home)

    def pid(self, name: str) -> int:
        return self.state.processes[name].pid

    def log(self) -> str:
        return (self.home / "supervisor.log").read_text()

    def stop(self) -> None:
        supervisor = self.state.supervisor
        if supervisor.pid and cluster_processes.alive(supervisor):
            cluster_processes.send(supervisor, signal.SIGTERM)
            assert not cluster_processes.wait_gone([supervisor], PATIENCE_S), self.log()


def worker(name: str = "worker-0", program: str = SLEEP) -> ProcessPlan:
    return ProcessPlan(name, "worker", [*PYTHON, program])
