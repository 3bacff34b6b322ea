"""The supervisor starts again what dies, adopts what runs, and stops everything."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from console.local import procfs, stopping
from console.local.plan import Plan, ProcessPlan, State
from console.local.readiness import holds

PYTHON = [sys.executable, "-P", "-c"]
SLEEP = "import time; time.sleep(600)"
PATIENCE_S = 30.0


class Trial:
    """A supervisor and its home."""

    def __init__(self, home: Path, cluster_id: str) -> None:
        self.home, self.cluster_id = home, cluster_id
        self.shm = Path("/dev/shm/everstep") / cluster_id

    def plan(self, *processes: ProcessPlan) -> None:
        Plan(self.cluster_id, str(self.shm), list(processes)).save(self.home)

    def start(self) -> int:
        with (self.home / "supervisor.log").open("ab") as log:
            return subprocess.run(
                [sys.executable, "-P", "-m", "console.local.supervisor", str(self.home)],
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
        if supervisor.pid and procfs.alive(supervisor):
            procfs.send(supervisor, signal.SIGTERM)
            assert not procfs.wait_gone([supervisor], PATIENCE_S), self.log()


@pytest.fixture
def trial(tmp_path: Path) -> Iterator[Trial]:
    trial = Trial(tmp_path, f"supervisor-test-{os.getpid()}")
    yield trial
    trial.stop()
    stopping.kill_all(trial.cluster_id, set())
    stopping.remove_shared_memory(trial.shm)


def worker(name: str = "worker-0", program: str = SLEEP) -> ProcessPlan:
    return ProcessPlan(name, "worker", [*PYTHON, program])


def test_a_killed_process_is_started_again(trial: Trial) -> None:
    trial.plan(worker("worker-0"), worker("worker-1", SLEEP + " "))
    assert trial.start() == 0
    first, other = trial.pid("worker-0"), trial.pid("worker-1")
    for count in (1, 2, 3, 4, 5):
        os.kill(trial.pid("worker-0"), signal.SIGKILL)
        assert holds(lambda count=count: trial.state.processes["worker-0"].restarts == count, PATIENCE_S)  # type: ignore[misc]
    assert trial.pid("worker-0") != first
    assert trial.pid("worker-1") == other
    assert "killed by SIGKILL" in trial.log()
    assert "died quickly" not in trial.log()  # somebody else's kills are no reason to wait


def test_a_process_that_ends_at_once_again_and_again_has_to_wait(trial: Trial) -> None:
    trial.plan(worker(program="raise SystemExit(3)"))
    assert trial.start() == 0
    assert holds(lambda: "died quickly 4 times in a row: started again in 0.4 s" in trial.log(), PATIENCE_S)
    assert "exited with code 3" in trial.log()


def test_a_program_that_does_not_exist_is_named(trial: Trial) -> None:
    trial.plan(ProcessPlan("temporal", "temporal", ["/nowhere/temporal"]), worker())
    assert trial.start() == 0
    assert holds(lambda: "worker-0 started" in trial.log(), PATIENCE_S)
    assert "temporal cannot be started: /nowhere/temporal" in trial.log()


def test_a_second_supervisor_does_not_start(trial: Trial) -> None:
    trial.plan(worker())
    assert trial.start() == 0
    assert trial.start() == 3
    assert trial.log().count("worker-0 started") == 1


def test_a_new_supervisor_adopts_what_runs(trial: Trial) -> None:
    trial.plan(worker("worker-0"), worker("worker-1", SLEEP + " "))
    assert trial.start() == 0
    before = {name: running.pid for name, running in trial.state.processes.items()}
    procfs.send(trial.state.supervisor, signal.SIGKILL)
    assert not procfs.wait_gone([trial.state.supervisor], PATIENCE_S)
    os.kill(before["worker-1"], signal.SIGKILL)  # dies while nobody looks
    assert trial.start() == 0
    assert trial.pid("worker-0") == before["worker-0"]
    assert holds(lambda: trial.pid("worker-1") != before["worker-1"], PATIENCE_S)
    os.kill(before["worker-0"], signal.SIGKILL)  # no child of the new supervisor
    assert holds(lambda: trial.state.processes["worker-0"].restarts == 1, PATIENCE_S)


def test_what_was_started_but_never_written_down_is_adopted(trial: Trial) -> None:
    """As when the supervisor is killed between starting a process and noting its pid."""
    plan = worker()
    trial.plan(plan, worker("worker-1"))  # the same command line: it must not pass for the other
    env = os.environ | {"EVERSTEP_CLUSTER": trial.cluster_id}
    with subprocess.Popen(plan.argv, env=env, start_new_session=True) as process:
        assert trial.start() == 0
        assert trial.pid("worker-0") == process.pid
        assert trial.pid("worker-1") != process.pid
        trial.stop()


def test_a_new_plan_is_taken_up(trial: Trial) -> None:
    trial.plan(worker())
    assert trial.start() == 0
    first = trial.pid("worker-0")
    trial.plan(worker(), worker("worker-1", SLEEP + " "))
    procfs.send(trial.state.supervisor, signal.SIGHUP)
    assert holds(lambda: "worker-1" in trial.state.processes, PATIENCE_S)
    assert trial.pid("worker-0") == first


def test_a_process_that_shall_run_otherwise_is_started_anew_and_no_other(trial: Trial) -> None:
    trial.plan(ProcessPlan("a", "worker", [*PYTHON, SLEEP]), ProcessPlan("b", "worker", [*PYTHON, SLEEP]))
    assert trial.start() == 0
    assert holds(lambda: {"a", "b"} <= trial.state.processes.keys(), PATIENCE_S)
    changed, same = trial.pid("a"), trial.pid("b")
    trial.plan(
        ProcessPlan("a", "worker", [*PYTHON, SLEEP], {"TEMPORAL_ADDRESS": "other:7233"}),
        ProcessPlan("b", "worker", [*PYTHON, SLEEP]),
    )
    procfs.send(trial.state.supervisor, signal.SIGHUP)

    def started_anew() -> bool:
        pid = trial.pid("a")
        return pid != changed and b"TEMPORAL_ADDRESS=other:7233" in Path(f"/proc/{pid}/environ").read_bytes()

    assert holds(started_anew, PATIENCE_S), trial.log()
    assert trial.pid("b") == same


def test_a_damaged_plan_stops_nothing(trial: Trial) -> None:
    trial.plan(worker())
    assert trial.start() == 0
    (trial.home / "plan.json").write_text("{")
    procfs.send(trial.state.supervisor, signal.SIGHUP)
    assert holds(lambda: "going on with the old plan" in trial.log(), PATIENCE_S)
    assert procfs.identify(trial.pid("worker-0"))


def test_the_end_takes_orphans_and_the_stubborn_and_nobody_else(trial: Trial, tmp_path: Path) -> None:
    """An agent that was killed leaves a fork server of its own session; another worker ignores SIGTERM."""
    orphan = tmp_path / "orphan"
    agent = (
        "import os, pathlib, subprocess, sys, time\n"
        f"p = subprocess.Popen([sys.executable, '-P', '-c', {SLEEP!r}], start_new_session=True)\n"
        f"pathlib.Path({str(orphan)!r}).write_text(str(p.pid))\n"
        f"{SLEEP}"
    )
    stubborn = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); {SLEEP}"
    trial.plan(ProcessPlan("agent-m0", "agent", [*PYTHON, agent]), worker(program=stubborn))
    with subprocess.Popen([*PYTHON, SLEEP], env=os.environ | {"EVERSTEP_CLUSTER": "another"}) as stranger:
        assert trial.start() == 0
        (trial.shm / "m0").mkdir()
        assert holds(lambda: orphan.exists() and orphan.read_text() != "", PATIENCE_S)
        assert holds(lambda: "deaf" in (tmp_path / "logs" / "worker-0.log").read_text(), PATIENCE_S)
        os.kill(trial.pid("agent-m0"), signal.SIGKILL)
        mine = procfs.of_cluster(trial.cluster_id)
        assert int(orphan.read_text()) in mine
        trial.stop()
        assert not procfs.of_cluster(trial.cluster_id)
        assert not any(procfs.identify(pid) for pid in mine)
        assert stranger.poll() is None
        stranger.kill()
    assert not trial.shm.exists()


def test_a_dead_agents_orphans_leave_no_zombie(trial: Trial, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    agent = (
        "import os, pathlib, subprocess, sys, time\n"
        "p = subprocess.Popen([sys.executable, '-P', '-c', 'import time; time.sleep(1)'], start_new_session=True)\n"
        f"pathlib.Path({str(pids)!r}).write_text(str(p.pid))\n"
        f"{SLEEP}"
    )
    trial.plan(ProcessPlan("agent-m0", "agent", [*PYTHON, agent]))
    assert trial.start() == 0
    assert holds(lambda: pids.exists() and pids.read_text() != "", PATIENCE_S)
    orphan = int(pids.read_text())
    os.kill(trial.pid("agent-m0"), signal.SIGKILL)
    assert holds(lambda: not Path(f"/proc/{orphan}").exists(), PATIENCE_S)
