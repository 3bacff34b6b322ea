"""A rank that waits at the end of a step until it is stopped: its state is saved, so that nothing is lost.

It is asked by its agent, in the mapped report file, for an update of the job's code that is wanted now.
"""

from __future__ import annotations

import time

from everstep.rank.step_reports import ReportFile

UNASKED_S = 120.0
"""A rank that was not asked for so long goes on: whoever wanted it to wait is gone."""
LOOK_S = 0.005
"""Between two looks; whoever waits here is killed, so nobody waits for this."""


def is_asked(reports: ReportFile, completed_steps: int) -> bool:
    """Whether a rank that has completed so many steps is to wait."""
    wanted = reports.alignment()
    return 0 < wanted.step <= completed_steps and time.monotonic_ns() - wanted.asked_ns <= UNASKED_S * 1e9


def wait_here(reports: ReportFile, completed_steps: int) -> None:
    """Wait as long as the rank is asked to.

    Args:
        reports: Of the rank.
        completed_steps: Whose state is saved.
    """
    reports.set_aligned(completed_steps)
    try:
        while is_asked(reports, completed_steps):
            time.sleep(LOOK_S)
    finally:
        reports.set_aligned(0)
