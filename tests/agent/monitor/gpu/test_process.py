"""The process that reads GPUs may be silent, crash, be killed and be replaced; the agent does not wait for it."""

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

from agent.monitor.gpu.process import GpuProcess, GpusSilent
from everstep.errors import CannotInspect
from everstep.system import procfs

PATIENCE_S = 60.0
SHORT_S = 0.05
AGENT = """
import fcntl, struct, sys, termios, time
from agent.monitor.gpu.process import GpuProcess

process = GpuProcess(["--fake", sys.argv[1]])
process._start()
pipe = process._process.stdin
pipe.write(b"\\n")
while struct.unpack("i", fcntl.ioctl(pipe, termios.FIONREAD, b"1234"))[0]:
    time.sleep(0.01)
print(process.pid, flush=True)
input()
"""
"""This program asks the process, sees that the question was taken, and waits."""
EMPTY = '{"reading": {"gpus": [], "later": 1}, "of a later release": true}'


@pytest.fixture
def made() -> Iterator[list[GpuProcess]]:
    started: list[GpuProcess] = []
    yield started
    for one in started:
        assert one.end()


def program(made: list[GpuProcess], code: str) -> GpuProcess:
    """Return a process that runs this code for each line that it gets; ``n`` is the number of earlier lines."""
    loop = f"import os, sys, time\nfor n, _ in enumerate(sys.stdin):\n {code}\n sys.stdout.flush()"
    made.append(GpuProcess(command=[sys.executable, "-S", "-c", loop]))
    return made[-1]


def read(process: GpuProcess, answer_s: float = PATIENCE_S) -> None:
    process.read(answer_s, PATIENCE_S)


def until_gone(pid: int, start: int) -> None:
    while procfs.is_alive(pid, start):
        time.sleep(0.01)


def started(process: GpuProcess) -> tuple[int, int]:
    found = procfs.process_of(process.pid)
    assert found
    return found.pid, found.start


def test_an_answer_of_another_release_is_read(made: list[GpuProcess]) -> None:
    process = program(made, f"print({EMPTY!r})")
    assert process.read(PATIENCE_S, PATIENCE_S).gpus == []
    pid = process.pid
    read(process)
    assert process.pid == pid, "the same process makes all readings"


def test_a_silent_process_is_killed_and_replaced(made: list[GpuProcess]) -> None:
    process = program(made, f"print({EMPTY!r}) if n == 0 else time.sleep(1000)")
    read(process)
    pid, start = started(process)
    with pytest.raises(GpusSilent, match=r"no answer within 0\.05 s; process") as raised:
        read(process, SHORT_S)
    assert not raised.value.stuck
    assert not procfs.is_alive(pid, start)
    read(process)
    assert process.pid not in (0, pid)


def test_the_first_answer_has_more_time(made: list[GpuProcess]) -> None:
    process = program(made, f"time.sleep({2 * SHORT_S}); print({EMPTY!r})")
    assert process.read(answer_s=SHORT_S, start_s=PATIENCE_S).gpus == []
    with pytest.raises(GpusSilent):
        process.read(answer_s=SHORT_S, start_s=PATIENCE_S)


def test_half_an_answer_is_none(made: list[GpuProcess]) -> None:
    process = program(made, "print('{', end='', flush=True); time.sleep(1000)")
    with pytest.raises(GpusSilent):
        process.read(SHORT_S, 0.3)


def test_no_second_process_beside_one_that_does_not_die(
    made: list[GpuProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process may wait in the driver. Here, killing it does nothing instead."""
    process = program(made, "time.sleep(1000)")
    with monkeypatch.context() as patched:
        patched.setattr("agent.monitor.gpu.process.DIES_S", 0.01)
        patched.setattr(subprocess.Popen, "kill", lambda self: None)
        with pytest.raises(GpusSilent) as first:
            process.read(SHORT_S, SHORT_S)
        pid, start = started(process)
        with pytest.raises(GpusSilent, match=f"process {pid} still waits in the driver") as second:
            read(process)
    assert (first.value.stuck, second.value.stuck) == (True, True)
    assert started(process) == (pid, start)
    assert process.end()


def test_a_crash_is_told_with_its_last_words_and_the_next_reading_works(made: list[GpuProcess], tmp_path: Path) -> None:
    mark = tmp_path / "crashed"
    crash = f"os.path.exists({str(mark)!r}) or (open({str(mark)!r}, 'w').close(), sys.exit('libnvidia: assertion'))"
    process = program(made, f"{crash}; print({EMPTY!r})")
    with pytest.raises(CannotInspect, match="the process that reads GPUs ended: libnvidia: assertion"):
        read(process)
    read(process)


def test_one_that_was_killed_meanwhile_is_replaced(made: list[GpuProcess]) -> None:
    process = program(made, f"print({EMPTY!r})")
    read(process)
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(CannotInspect, match="ended, and wrote nothing"):
        read(process)
    read(process)


@pytest.mark.parametrize("said", ["nonsense", "{}", '{"reading": {"gpus": [{"index": "first"}]}}'])
def test_an_answer_that_says_nothing_is_no_reading(made: list[GpuProcess], said: str) -> None:
    with pytest.raises(CannotInspect):
        read(program(made, f"print({said!r})"))


def test_a_program_that_is_not_there(made: list[GpuProcess]) -> None:
    made.append(GpuProcess(command=["/nowhere/python"]))
    with pytest.raises(CannotInspect, match="/nowhere/python cannot be started: No such file"):
        read(made[0])


def test_it_ends_when_nobody_asks_any_more(tmp_path: Path) -> None:
    """Its input ends when the agent ends in any way."""
    path = tmp_path / "gpus.json"
    path.write_text(json.dumps({"gpus": [{}]}))
    command = [sys.executable, "-P", "-m", "agent.monitor.gpu.child", "--fake", str(path)]
    done = subprocess.run(command, input="\n\n", capture_output=True, text=True, check=True, timeout=PATIENCE_S)
    assert [len(json.loads(line)["reading"]["gpus"]) for line in done.stdout.splitlines()] == [1, 1]


def test_it_dies_with_the_agent_also_in_a_call_that_hangs(tmp_path: Path) -> None:
    path = tmp_path / "gpus.json"
    path.write_text(json.dumps({"hang_s": 1000}))
    killed = subprocess.Popen(
        [sys.executable, "-P", "-c", AGENT, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert killed.stdin and killed.stdout
    pid = int(killed.stdout.readline())
    found = procfs.process_of(pid)
    assert found
    killed.kill()
    killed.communicate()
    until_gone(pid, found.start)
