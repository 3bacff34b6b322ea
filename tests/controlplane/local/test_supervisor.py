"""The supervisor restarts processes that die, adopts processes that run, and stops everything at the end."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

from controlplane.local import cluster_processes
from controlplane.local.plan import ProcessPlan, hold, is_held, let_go
from controlplane.local.readiness import holds
from tests.controlplane.local.supervised import PATIENCE_S, PYTHON, SLEEP, Trial, worker


def test_a_killed_process_is_started_again(trial: Trial) -> None:
    trial.plan(worker("worker-0"), worker("worker-1", SLEEP + " "))
    assert trial.start() == 0
    first, other = trial.pid("worker-0"), trial.pid("worker-1")
    for count in (1, 2):
        os.kill(trial.pid("worker-0"), signal.SIGKILL)
        assert holds(lambda count=count: trial.state.processes["worker-0"].restarts == count, PATIENCE_S)  # type: ignore[misc]
    assert trial.pid("worker-0") != first
    assert trial.pid("worker-1") == other
    assert "killed by SIGKILL" in trial.log()
    assert "died quickly" not in trial.log()


def test_a_process_that_is_killed_again_and_again_has_to_wait(trial: Trial) -> None:
    """A lack of memory can cause such deaths. Restarts without a pause would take the rest of the machine's memory."""
    trial.plan(worker(program="import os; os.kill(os.getpid(), 9)"))
    assert trial.start() == 0
    assert holds(lambda: "died quickly 4 times in a row: restarting it in 0.4 s" in trial.log(), PATIENCE_S)


def test_a_signal_without_a_name_is_a_death_like_any_other(trial: Trial) -> None:
    trial.plan(worker(program="import os, signal; os.kill(os.getpid(), signal.SIGRTMIN + 3)"))
    assert trial.start() == 0
    assert holds(lambda: "restarting it in" in trial.log(), PATIENCE_S)
    assert f"killed by signal {signal.SIGRTMIN + 3}" in trial.log()


def test_a_process_that_ends_at_once_again_and_again_has_to_wait(trial: Trial) -> None:
    trial.plan(worker(program="raise SystemExit(3)"))
    assert trial.start() == 0
    assert holds(lambda: "died quickly 4 times in a row: restarting it in 0.4 s" in trial.log(), PATIENCE_S)
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
    cluster_processes.send(trial.state.supervisor, signal.SIGKILL)
    assert not cluster_processes.wait_gone([trial.state.supervisor], PATIENCE_S)
    os.kill(before["worker-1"], signal.SIGKILL)  # worker-1 dies while there is no supervisor
    assert trial.start() == 0
    assert trial.pid("worker-0") == before["worker-0"]
    assert holds(lambda: trial.pid("worker-1") != before["worker-1"], PATIENCE_S)
    os.kill(before["worker-0"], signal.SIGKILL)  # worker-0 is no child of the new supervisor
    assert holds(lambda: trial.state.processes["worker-0"].restarts == 1, PATIENCE_S)


def test_what_was_started_but_never_written_down_is_adopted(trial: Trial) -> None:
    """This happens if the supervisor is killed after it started a process and before it noted the pid."""
    plan = worker()
    trial.plan(plan, worker("worker-1"))  # the same command line, but it must not be taken for worker-0
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
    cluster_processes.send(trial.state.supervisor, signal.SIGHUP)
    assert holds(lambda: "worker-1" in trial.state.processes, PATIENCE_S)
    assert trial.pid("worker-0") == first


def test_a_process_that_shall_run_otherwise_is_started_anew_and_no_other(trial: Trial) -> None:
    """A changed variable restarts process a, and process b keeps running."""
    trial.plan(ProcessPlan("a", "worker", [*PYTHON, SLEEP]), ProcessPlan("b", "worker", [*PYTHON, SLEEP]))
    assert trial.start() == 0
    assert holds(lambda: {"a", "b"} <= trial.state.processes.keys(), PATIENCE_S)
    changed, same = trial.pid("a"), trial.pid("b")
    trial.plan(
        ProcessPlan("a", "worker", [*PYTHON, SLEEP], {"TEMPORAL_ADDRESS": "other:7233"}),
        ProcessPlan("b", "worker", [*PYTHON, SLEEP]),
    )
    cluster_processes.send(trial.state.supervisor, signal.SIGHUP)

    def started_anew() -> bool:
        pid = trial.pid("a")
        return pid != changed and b"TEMPORAL_ADDRESS=other:7233" in Path(f"/proc/{pid}/environ").read_bytes()

    assert holds(started_anew, PATIENCE_S), trial.log()
    assert trial.pid("b") == same


def test_a_damaged_plan_stops_nothing(trial: Trial) -> None:
    trial.plan(worker())
    assert trial.start() == 0
    (trial.home / "plan.json").write_text("{")
    cluster_processes.send(trial.state.supervisor, signal.SIGHUP)
    assert holds(lambda: "keeping the old plan" in trial.log(), PATIENCE_S)
    assert cluster_processes.identify(trial.pid("worker-0"))


def test_the_end_takes_orphans_and_the_stubborn_and_nobody_else(trial: Trial, tmp_path: Path) -> None:
    """The orphan is a fork server with its own session, left by a killed agent. The stubborn worker ignores SIGTERM."""
    orphan = tmp_path / "orphan"
    agent = (
        "import os, pathlib, subprocess, sys, time\n"
        f"p = subprocess.Popen([sys.executable, '-P', '-c', {SLEEP!r}], start_new_session=True)\n"
        f"pathlib.Path({str(orphan)!r}).write_text(str(p.pid))\n"
        f"{SLEEP}"
    )
    stubborn = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); {SLEEP}"
    trial.plan(ProcessPlan("agent-m0", "agent", [*PYTHON, agent]), worker(program=stubborn))
    stranger = subprocess.Popen([*PYTHON, SLEEP], env=os.environ | {"EVERSTEP_CLUSTER": "another"})
    try:
        assert trial.start() == 0
        (trial.shm / "m0").mkdir()
        assert holds(lambda: orphan.exists() and orphan.read_text() != "", PATIENCE_S)
        assert holds(lambda: "deaf" in (tmp_path / "logs" / "worker-0.log").read_text(), PATIENCE_S)
        os.kill(trial.pid("agent-m0"), signal.SIGKILL)
        # For a moment after its exec, a process has an empty environment.
        assert holds(lambda: int(orphan.read_text()) in cluster_processes.of_cluster(trial.cluster_id), PATIENCE_S)
        mine = cluster_processes.of_cluster(trial.cluster_id)
        trial.stop()
        assert not cluster_processes.of_cluster(trial.cluster_id)
        assert not any(cluster_processes.identify(pid) for pid in mine)
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()
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


def test_what_is_held_stays_down_until_it_is_let_go(trial: Trial) -> None:
    """A test or a drill can hold a process, which is then not restarted."""
    trial.plan(worker("worker-0"), worker("worker-1", SLEEP + " "))
    assert trial.start() == 0
    first = trial.pid("worker-0")
    hold(trial.home, "worker-0")
    assert cluster_processes.identify(first)  # a hold does not end a running process
    os.kill(first, signal.SIGKILL)
    assert holds(lambda: "worker-0 is held down" in trial.log(), PATIENCE_S)
    os.kill(trial.pid("worker-1"), signal.SIGKILL)  # worker-1 is not held
    assert holds(lambda: trial.state.processes["worker-1"].restarts == 1, PATIENCE_S)
    assert trial.pid("worker-0") == first
    let_go(trial.home, "worker-0")
    assert holds(lambda: trial.pid("worker-0") != first, PATIENCE_S)
    assert trial.log().count("is held down") == 1


def test_who_holds_and_dies_holds_no_more(trial: Trial) -> None:
    """A hold ends when the process that made it dies."""
    trial.plan(worker())
    assert trial.start() == 0
    holder = (
        f"import pathlib; from controlplane.local.plan import hold; hold(pathlib.Path({str(trial.home)!r}), 'worker-0')"
    )
    with subprocess.Popen([*PYTHON, f"{holder}; {SLEEP}"], cwd=Path(__file__).parents[3]) as process:
        assert holds(lambda: is_held(trial.home, "worker-0"), PATIENCE_S)
        os.kill(trial.pid("worker-0"), signal.SIGKILL)
        assert holds(lambda: "worker-0 is held down" in trial.log(), PATIENCE_S)
        process.kill()
        process.wait()
        assert holds(lambda: trial.state.processes["worker-0"].restarts == 1, PATIENCE_S)
