"""One template for all agents that a process of the test run starts: their fork servers need not import torch each."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

from controlplane.local.commands import template_command

IN_BACKGROUND = ["sh", "-c", 'trap "" INT; exec "$@"', "sh"]
"""Starts a command as a script's background does, with SIGINT ignored."""


class Template:
    """A template process; its socket lies in a folder of its own."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="everstep-test-template-"))
        self.socket = self.folder / "template.sock"
        self.log = self.folder / "log"
        with self.log.open("wb") as log:
            command = [*IN_BACKGROUND, *template_command(self.socket)]
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def close(self) -> None:
        """End it; what was forked from it lives on."""
        self.process.kill()
        self.process.wait()
        shutil.rmtree(self.folder)


_shared: list[Template] = []


def shared() -> Template:
    """The template of this process, which is started when it is asked for first."""
    if not _shared:
        _shared.append(Template())
    return _shared[0]


def close_shared() -> None:
    """End it, if it was started."""
    while _shared:
        _shared.pop().close()
