"""A process is never confused with a later process of the same pid, and all processes of a cluster are found."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from controlplane.local.cluster_processes import Process, identify, of_cluster, send, wait_gone

PYTHON = [sys.executable, "-P", "-c"]


def wait_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_a_zombie_is_not_alive() -> None:
    with subprocess.Popen([*PYTHON, "pass"]) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert identify(process.pid) is None


def test_a_signal_never_reaches_a_later_process_with_the_same_pid() -> None:
    with subprocess.Popen([*PYTHON, "import time; time.sleep(60)"]) as process:
        now = identify(process.pid)
        assert now is not None
        send(Process(now.pid, now.start - 1), signal.SIGKILL)  # a process that had the pid earlier
        assert wait_gone([now], 0.3) == {now}
        send(now, signal.SIGKILL)
        assert wait_gone([now], 10.0) == set()


def test_a_cluster_owns_forked_children_and_children_with_another_environment() -> None:
    program = """
import os, subprocess, sys, time
if os.fork() == 0:
    os.environ.clear()
    child = subprocess.Popen([sys.executable, "-P", "-c", "import time; time.sleep(60)"], env={})
    print(os.getpid(), child.pid, flush=True)
time.sleep(60)
"""
    env = os.environ | {"EVERSTEP_CLUSTER": "of-test"}
    with subprocess.Popen([*PYTHON, program], env=env, stdout=subprocess.PIPE, text=True) as process:
        forked, child = map(int, wait_line(process).split())
        try:
            assert of_cluster("of-test") == {process.pid, forked, child}
            assert of_cluster("of-tes") == set()
        finally:
            for pid in (child, forked, process.pid):
                os.kill(pid, signal.SIGKILL)


def test_the_caller_is_never_among_a_clusters_processes() -> None:
    program = "from controlplane.local.cluster_processes import of_cluster; print(of_cluster('own-test'))"
    env = os.environ | {"EVERSTEP_CLUSTER": "own-test"}
    shown = subprocess.run([*PYTHON, program], env=env, capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "set()"


def test_waiting_for_the_end_takes_no_longer_than_the_process() -> None:
    with subprocess.Popen([*PYTHON, "import time; time.sleep(0.2)"]) as process:
        identity = identify(process.pid)
        assert identity is not None
        began = time.monotonic()
        assert wait_gone([identity], 60.0) == set()
        assert time.monotonic() - began < 50
