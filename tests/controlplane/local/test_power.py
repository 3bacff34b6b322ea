"""A machine loses its power: all its processes die at once, stay off, and start later without their data."""

from __future__ import annotations

import os
import signal
import sys

import psutil
import pytest

from controlplane.local import cluster_processes, power
from controlplane.local.cluster_file import ClusterFile
from controlplane.local.plan import ProcessPlan
from controlplane.local.readiness import holds
from everstep.errors import ClusterError
from everstep.model.machine import Machine
from tests.controlplane.local.supervised import PATIENCE_S, PYTHON, SLEEP, Trial

AGENT = """
import os, subprocess, sys, time
state = sys.argv[1]
program = "import time; time.sleep(600)"
subprocess.Popen([sys.executable, "-P", "-c", program, state + "/fork-servers/x.sock"], start_new_session=True)
unmarked = os.environ.copy()
unmarked.pop("EVERSTEP_MACHINE", None)
if not os.fork():  # a fork server whose agent died: only its socket shows its machine
    os.setsid()
    socket = sys.argv[3] + "/_agent/fork-servers/x.sock"
    os.execve(sys.executable, [sys.executable, "-P", "-c", program, socket], unmarked)
marked = os.environ | {"EVERSTEP_MACHINE": sys.argv[2]}
subprocess.Popen([sys.executable, "-P", "-c", program], start_new_session=True, env=marked)
if not os.fork():  # an orphan that took another session
    os.setsid()
    time.sleep(600)
open(state + "/up", "w").close()
time.sleep(600)
"""
"""A program that acts as an agent. It starts processes that stand for fork servers and for a rank's data loaders."""


@pytest.fixture
def cluster(trial: Trial) -> ClusterFile:
    machines = [Machine(name=name, address="127.0.0.1:1") for name in ("m1", "m2", "m10")]
    described = ClusterFile(
        name="trial",
        id=trial.cluster_id,
        home=trial.home,
        shm=trial.shm,
        temporal_address="",
        ui_url="",
        ledger_url="",
        machines=machines,
    )
    processes = []
    for machine in machines:
        state = power.state_folder(described, machine.name)
        state.mkdir(parents=True)
        argv = [sys.executable, "-P", "-c", AGENT, str(state), machine.name, str(trial.shm / machine.name)]
        processes.append(ProcessPlan(f"agent-{machine.name}", "agent", argv))
    trial.plan(*processes)
    assert trial.start() == 0
    for machine in machines:
        assert holds(lambda name=machine.name: is_up(described, name), PATIENCE_S)  # type: ignore[misc]
        (trial.shm / machine.name / "job").mkdir(parents=True)
        (trial.shm / machine.name / "job" / "checkpoint-0").write_bytes(b"state")
    return described


def is_up(cluster: ClusterFile, name: str) -> bool:
    return (power.state_folder(cluster, name) / "up").exists() and len(of(cluster, name)) == 5


def of(cluster: ClusterFile, name: str) -> set[int]:
    return cluster_processes.of_machine(cluster.id, name, power.state_folder(cluster, name), cluster.shm / name)


def test_all_processes_of_a_machine_die_and_no_others(trial: Trial, cluster: ClusterFile) -> None:
    before = {name: of(cluster, name) for name in ("m1", "m2", "m10")}
    assert not before["m1"] & before["m10"]
    with power.powered_off(cluster, ["m1", "m2"]) as killed_ns:
        assert killed_ns > 0
        assert not any(cluster_processes.identify(pid) for pid in before["m1"] | before["m2"])
        assert holds(lambda: trial.log().count("is held down") == 2, PATIENCE_S)
        assert of(cluster, "m1") == set()
        power.empty_memory(cluster, "m1")
        power.empty_disk(cluster, "m1")
        assert list((trial.shm / "m1").iterdir()) == []
        assert list(power.state_folder(cluster, "m1").iterdir()) == []
        power.empty_memory(cluster, "m2")
    assert holds(lambda: is_up(cluster, "m1"), PATIENCE_S)
    assert power.state_folder(cluster, "m2").joinpath("up").exists()  # the disk of m2 was not emptied
    assert of(cluster, "m10") == before["m10"]
    assert (trial.shm / "m10" / "job" / "checkpoint-0").exists()


def test_the_condition_still_holds_when_the_machine_loses_power(cluster: ClusterFile) -> None:
    """If ``when`` is true, the machine's processes are suspended, and ``when`` is called again.

    If ``when`` is false then, the processes continue.
    """
    answers, seen = iter([False, True, False, True, True]), []

    def when() -> bool:
        seen.append({psutil.Process(pid).status() == psutil.STATUS_STOPPED for pid in of(cluster, "m1")})
        return next(answers)

    with power.powered_off(cluster, ["m1"], when=when):
        assert seen == [{False}, {False}, {True}, {False}, {True}]


def test_the_power_comes_back_after_an_exception(trial: Trial, cluster: ClusterFile) -> None:
    first = trial.pid("agent-m1")
    with pytest.raises(KeyboardInterrupt), power.powered_off(cluster, ["m1"]):
        raise KeyboardInterrupt
    assert holds(lambda: trial.pid("agent-m1") != first, PATIENCE_S)


def test_a_machine_that_does_not_exist_is_named(trial: Trial, cluster: ClusterFile) -> None:
    with pytest.raises(ClusterError, match="has no machine m7"), power.powered_off(cluster, ["m1", "m7"]):
        pass
    assert "held" not in trial.log()


def test_an_unrelated_process_with_the_machines_name_lives(cluster: ClusterFile) -> None:
    env = os.environ | {"EVERSTEP_MACHINE": "m1", "EVERSTEP_CLUSTER": "another"}
    stranger = os.posix_spawn(PYTHON[0], [*PYTHON, SLEEP], env, setsid=True)
    try:
        with power.powered_off(cluster, ["m1"]):
            assert cluster_processes.identify(stranger)
    finally:
        os.kill(stranger, signal.SIGKILL)
        os.waitpid(stranger, 0)
