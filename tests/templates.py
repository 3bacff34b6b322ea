"""One template for all agents of a test run. Fork servers are forked from it, so they need not import torch."""

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
"""The environment variable that tells all processes of the test run the folder of the shared template."""
IN_BACKGROUND = ["sh", "-c", 'trap "" INT; exec "$@"', "sh"]
"""The words before a command that make it ignore SIGINT, like a background command of a shell script."""


class Template:
    """A template process, with its socket in its own folder."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or Path(tempfile.mkdtemp(prefix="everstep-test-template-"))
        self.socket = socket_in(self.folder)
        with (self.folder / "log").open("wb") as log:
            command = [*IN_BACKGROUND, *template_command(self.socket)]
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def close(self) -> None:
        """End the template. Processes that were forked from it continue."""
        self.process.kill()
        self.process.wait()
        shutil.rmtree(self.folder)


def socket_in(folder: Path) -> Path:
    """Return the socket of the template in a folder."""
    return folder / "template.sock"


def offer() -> None:
    """Offer a template to the processes of this test run. The first process that needs the template starts it."""
    os.environ[FOLDER] = tempfile.mkdtemp(prefix="everstep-test-template-")


def shared() -> Path:
    """Return the socket of the test run's template. The first call starts the template."""
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
    """Return the process id of the test run's template. The first call starts the template."""
    shared()
    return _process(Path(os.environ[FOLDER])).pid


_started: list[Template] = []
"""The template that this process started. It is kept, since the template's process is a child of this process."""


def withdraw() -> None:
    """End the test run's template if it was started, and remove its folder."""
    folder = Path(os.environ.pop(FOLDER))
    if (folder / "process").exists():
        cluster_processes.send(_process(folder), signal.SIGKILL)
    while _started:
        _started.pop().process.wait()
    shutil.rmtree(folder)


def _process(folder: Path) -> cluster_processes.Process:
    pid, start = (folder / "process").read_text().split()
    return cluster_processes.Process(int(pid), int(start))
