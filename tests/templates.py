"""One template for all agents that a test run starts, in all its processes: fork servers need not import torch each."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path

from controlplane.local import cluster_processes
from controlplane.local.commands import template_command

FOLDER = "EVERSTEP_TEST_TEMPLATE"
"""Environment variable with the folder of the shared template, for all processes of the test run."""
IN_BACKGROUND = ["sh", "-c", 'trap "" INT; exec "$@"', "sh"]
"""Starts a command as a script's background does, with SIGINT ignored."""


class Template:
    """A template process; its socket lies in a folder of its own."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or Path(tempfile.mkdtemp(prefix="everstep-test-template-"))
        self.socket = socket_in(self.folder)
        with (self.folder / "log").open("wb") as log:
            command = [*IN_BACKGROUND, *template_command(self.socket)]
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def close(self) -> None:
        """End it; what was forked from it lives on."""
        self.process.kill()
        self.process.wait()
        shutil.rmtree(self.folder)


def socket_in(folder: Path) -> Path:
    """Where the template of a folder listens."""
    return folder / "template.sock"


def offer() -> None:
    """Let the processes of this test run have a template; whoever asks first starts it."""
    os.environ[FOLDER] = tempfile.mkdtemp(prefix="everstep-test-template-")


def shared() -> Path:
    """Socket of the template of the test run, which is started when it is asked for first."""
    folder = Path(os.environ[FOLDER])
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "process").exists():
            _started.append(Template(folder))
            process = cluster_processes.identify(_started[0].process.pid)
            assert process
            (folder / "process").write_text(f"{process.pid} {process.start}")
    return socket_in(folder)


def shared_pid() -> int:
    """Its process."""
    shared()
    return _process(Path(os.environ[FOLDER])).pid


_started: list[Template] = []
"""Kept, as its process is this one's child."""


def withdraw() -> None:
    """End it, if it was started."""
    folder = Path(os.environ.pop(FOLDER))
    if (folder / "process").exists():
        cluster_processes.send(_process(folder), signal.SIGKILL)
    while _started:
        _started.pop().process.wait()
    shutil.rmtree(folder)


def _process(folder: Path) -> cluster_processes.Process:
    pid, start = (folder / "process").read_text().split()
    return cluster_processes.Process(int(pid), int(start))
