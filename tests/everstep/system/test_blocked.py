"""For what a process waits, as its current system call shows."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from everstep.system.blocked import BlockedIn, blocked_in

SLEEPS = "import time; print(flush=True); time.sleep(60)"
POLLS = "import select, os; read, _ = os.pipe(); print(flush=True); select.select([read], [], [])"
RECEIVES = "import socket; one, two = socket.socketpair(); print(flush=True); one.recv(1)"
READS_A_SOCKET = "import os, socket; one, two = socket.socketpair(); print(flush=True); os.read(one.fileno(), 1)"
READS_A_PIPE = "import os; read, _ = os.pipe(); print(flush=True); os.read(read, 1)"
WAITS_FOR_A_PROGRAM = "import subprocess; p = subprocess.Popen(['sleep', '60']); print(flush=True); p.wait()"
LOCKS_A_FILE = (
    "import fcntl, sys; a, b = open(sys.argv[0]), open(sys.argv[0]); "
    "fcntl.flock(a, fcntl.LOCK_EX); print(flush=True); fcntl.flock(b, fcntl.LOCK_EX)"
)
WAITS_FOR_A_LOCK = "import threading; l = threading.Lock(); l.acquire(); print(flush=True); l.acquire()"
COMPUTES = "print(flush=True)\nwhile True: pass"


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        (SLEEPS, BlockedIn.SLEEP),
        (POLLS, BlockedIn.POLL),
        (RECEIVES, BlockedIn.SOCKET),
        (READS_A_SOCKET, BlockedIn.SOCKET),
        (WAITS_FOR_A_PROGRAM, BlockedIn.PROGRAM),
        (LOCKS_A_FILE, BlockedIn.FILE_LOCK),
        (READS_A_PIPE, None),
        (WAITS_FOR_A_LOCK, None),
        (COMPUTES, None),
    ],
)
def test_a_real_process(script: str, expected: BlockedIn | None, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(script)
    process = subprocess.Popen([sys.executable, tmp_path / "script.py"], stdout=subprocess.PIPE, process_group=0)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        until = time.monotonic() + 20
        while (found := blocked_in(process.pid)) is not expected and time.monotonic() < until:
            time.sleep(0.01)
        assert found is expected
        time.sleep(0.2)
        assert blocked_in(process.pid) is expected, "the process still waits for the same thing"
    finally:
        subprocess.run(["pkill", "-KILL", "-g", str(process.pid)], check=False)
        process.communicate()


@pytest.mark.parametrize(
    ("line", "machine", "expected"),
    [
        ("115 0x0 0x0 0x7ffe", "aarch64", BlockedIn.SLEEP),
        ("115 0x0 0x0 0x7ffe", "x86_64", None),
        ("230 0x0 0x0 0x7ffe", "riscv64", None),
        ("running", "x86_64", None),
        ("-1 0x7ffe 0x7f", "x86_64", None),
        ("0 0x5 0x0", "x86_64", None),
        ("", "x86_64", None),
    ],
)
def test_other_architectures_and_what_cannot_be_read(
    line: str, machine: str, expected: BlockedIn | None, tmp_path: Path
) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "syscall").write_text(line)
    assert blocked_in(7, tmp_path, machine) is expected
    assert blocked_in(8, tmp_path, machine) is None
