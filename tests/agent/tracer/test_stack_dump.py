"""Dumps by py-spy of running and of stopped processes. A killed py-spy leaves no process stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.tracer.processes import STOPPED
from agent.tracer.stack_dump import dump, let_go, py_spy
from everstep.system.procfs import start_ticks, state_of
from tests.agent.tracer.ptraced import ATTACH_AND_HANG, STOP_AND_HANG

SLEEPS = (
    "import time\ndef waits_here():\n    print('up', flush=True)\n"
    "    while True:\n        time.sleep(0.01)\nwaits_here()"
)


@pytest.fixture
def target() -> Iterator[tuple[int, int]]:
    with subprocess.Popen([sys.executable, "-c", SLEEPS], stdout=subprocess.PIPE) as process:
        assert process.stdout
        process.stdout.readline()
        yield process.pid, start_ticks(process.pid)
        process.send_signal(signal.SIGCONT)
        process.kill()


def functions(found: bytes) -> list[str]:
    return [frame["name"] for thread in json.loads(found) for frame in thread["frames"]]


def installed() -> list[str]:
    program = py_spy()
    assert program
    return [program]


def test_a_dump_shows_the_function_of_a_running_process(target: tuple[int, int]) -> None:
    found = dump(*target, deadline=time.monotonic() + 20, program=installed())

    assert "waits_here" in functions(found.json), found.problem
    assert state_of(*target) != STOPPED


def test_a_stopped_process_is_dumped_and_stays_stopped(target: tuple[int, int]) -> None:
    os.kill(target[0], signal.SIGSTOP)
    while state_of(*target) != STOPPED:
        time.sleep(0.001)

    found = dump(*target, deadline=time.monotonic() + 20, program=installed())

    assert "waits_here" in functions(found.json), found.problem
    assert state_of(*target) == STOPPED


@pytest.mark.parametrize("tracer", [ATTACH_AND_HANG, STOP_AND_HANG])
def test_a_hanging_tracer_is_killed_and_its_process_continues(
    target: tuple[int, int], tracer: str, tmp_path: Path
) -> None:
    program = tmp_path / "tracer.py"
    program.write_text(tracer)

    found = dump(*target, deadline=time.monotonic() + 2, program=[sys.executable, str(program)])

    assert "did not end" in found.problem
    assert (program.with_suffix(".met")).exists(), "the tracer did not reach the point where it stops the process"
    assert state_of(*target) not in (STOPPED, "t")


def test_a_process_that_was_stopped_before_is_not_continued(target: tuple[int, int]) -> None:
    os.kill(target[0], signal.SIGSTOP)
    while state_of(*target) != STOPPED:
        time.sleep(0.001)
    let_go(*target, before=STOPPED)
    assert state_of(*target) == STOPPED


def test_a_process_without_python_and_an_ended_process_have_no_dump() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        found = dump(process.pid, start_ticks(process.pid), deadline=time.monotonic() + 20, program=installed())
        process.kill()
    assert (found.json, bool(found.problem)) == (b"", True)
    gone = dump(process.pid, 1, deadline=time.monotonic() + 20, program=installed())
    assert gone.problem == "it ended"
