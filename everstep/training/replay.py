"""A rank of a replay: it runs some steps of the script, keeps no checkpoints, and waits at the end to be stopped."""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress

from everstep.rank import environment
from everstep.training.launch_environment import from_environment

UNSTOPPED_S = 600.0
"""A rank that nobody stopped for so long ends itself."""


def steps_of_replay() -> int:
    """Steps that this process is to run; 0: it is no rank of a replay."""
    return from_environment(environment.REPLAY_STEPS, 0)


def wait_to_be_stopped() -> None:
    """Never return: what the script does after its loop, e.g. write its model, is not for a replay to do.

    The rank stays, for another one may still read what it sent.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    time.sleep(UNSTOPPED_S)
    os._exit(0)
