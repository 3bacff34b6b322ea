"""Saves the state of a rank at its pace, and reports the distance between saves that it needs."""

from __future__ import annotations

import time

from everstep.decisions.keep.save_need import SaveNeed
from everstep.decisions.keep.save_pace import SaveSchedule
from everstep.rank.step_reports import ReportFile, SaveTimes
from everstep.training.checkpoint import Checkpoint


class PacedSaves:
    """The saves of one rank.

    Args:
        state: The state.
        reports: The report file of the rank, through which its agent asks it to move to another pace.
        total: Number of steps of the complete job. All ranks save after the last one.
        disk_every: All ranks save after the multiples of this number, which are due on disk; 0: there are none.
    """

    def __init__(self, state: Checkpoint, reports: ReportFile, *, total: int, disk_every: int = 0) -> None:
        self._state = state
        self._reports = reports
        self._total, self._disk_every = total, disk_every
        self._schedule = SaveSchedule(reports.pace())
        self._need = SaveNeed(reports.pace().every)
        self._saved = 0
        """Completed steps of the last save."""
        self._seen = 0
        """Completed steps of the last save whose time was noted."""
        self._began: float | None = None
        """When the body of this step began, seconds of the performance counter; None: not known."""
        self._waited_s = 0.0
        """Time for which training had waited for saves at that time, seconds."""

    def end_step(self, completed_steps: int) -> None:
        """Save the state if a save is due.

        Args:
            completed_steps: The completed steps of the rank.

        Raises:
            CheckpointError: the state cannot be saved, or the save before it failed.
        """
        if self._began is not None:
            waited_s = self._state.waited_s - self._waited_s
            self._need.observe_step(time.perf_counter() - self._began - waited_s)
        on_disk = self._disk_every > 0 and completed_steps % self._disk_every == 0
        always = on_disk or completed_steps == self._total
        turn = self._schedule.end_step(completed_steps, self._reports.asked_pace(), always=always)
        if turn.saves:
            self._state.save(completed_steps)
            self._saved = completed_steps
        if turn.waits:
            self._state.wait()
        if turn.saves:  # only now the rank has moved
            self._reports.set_pace(self._schedule.pace)
        step, save_s = self._state.last_save
        if step != self._seen:
            self._seen = step
            self._need.observe_save(save_s)
            self._reports.set_save_times(SaveTimes(self._need.wanted, save_s, self._need.step_s))
        self._began, self._waited_s = time.perf_counter(), self._state.waited_s

    def begin_wait(self, completed_steps: int) -> None:
        """Commit the state of a step at whose end all ranks wait to be stopped, whether or not a save was due.

        Raises:
            CheckpointError: the state cannot be saved, or the save before it failed.
        """
        if self._saved != completed_steps:
            self._state.save(completed_steps)
        self._state.wait()

    def end_wait(self, completed_steps: int) -> None:
        """Continue after such a wait. A state that was not due is discarded, since other ranks may not have it, and its
        slot is needed for one that they have."""
        if self._saved != completed_steps:
            self._state.give_up(completed_steps)
        self._began = None
