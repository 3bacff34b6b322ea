"""Drives ``run.steps`` from the callbacks of a trainer, which has a loop of its own."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

from everstep.errors import ConfigError
from everstep.rank import environment
from everstep.training.checkpoint import Checkpoint, Stateful
from everstep.training.launch_environment import from_environment, origin_of
from everstep.training.rng import RandomState
from everstep.training.run import Run


class DrivenLoop:
    """The steps of a trainer, which are numbered from 0 as in the trainer.

    A step is complete when the next step begins or the training ends. So a step includes the logs and evaluations that
    the trainer makes after it. Random states are restored when the first step begins, because trainers draw random
    numbers before it.

    Args:
        run: The run from ``everstep.join``.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self._steps: Generator[int, None, None] | None = None
        self._at: int | None = None
        """The current step; None: there is none."""
        self._random = RandomState()
        self._restored: dict[str, Any] | None = None
        """Random states of the restored step; None: there are none, or the first step has begun."""

    @property
    def agreed(self) -> int:
        """Completed steps of the state that will be restored; 0: there is none.

        Raises:
            ConfigError: the job starts from a checkpoint of other parallel sizes, which trainers do not support.
        """
        if not self.run.active:
            return 0
        step = from_environment(environment.RESUME_STEP, 0)
        if origin_of(step) is not None:
            raise ConfigError(
                "a trainer cannot start from a checkpoint of other parallel sizes: start the job with the sizes that "
                "it was saved with, or convert it to a checkpoint of the trainer's own"
            )
        return max(step, 0)

    @property
    def step(self) -> int | None:
        """The current step; None: there is none."""
        return self._at

    def begin(
        self, total: int, start: int = 0, warm_up: Callable[[], object] | None = None, /, **things: Stateful
    ) -> None:
        """Begin the first step, and restore the objects of the state if there is a state to restore.

        Args:
            total: Number of steps of the complete training.
            start: The first step, if the trainer has restored its own checkpoint.
            warm_up: The ``warm_up`` of ``run.steps``; None: none is needed.
            things: The objects of the state, as for ``run.checkpoint``.

        Raises:
            CheckpointError: the agreed state cannot be restored.
        """
        state: Checkpoint = self.run.checkpoint(**things)
        self._steps = self.run.steps(total, state, start=start, warm_up=warm_up)
        self._at = next(self._steps, None)
        if self.run.resumed_from is not None:
            self._restored = self._random.state_dict()

    def step_begins(self, step: int) -> None:
        """Begin a step; the steps before it are complete and are saved.

        Raises:
            CheckpointError: a state cannot be saved.
        """
        if self._restored is not None:
            self._random.load_state_dict(self._restored)
            self._restored = None
        while self._steps is not None and self._at is not None and self._at < step:
            self._at = next(self._steps, None)

    def end(self) -> None:
        """Complete the last step and leave the loop.

        Raises:
            CheckpointError: the last save failed.
        """
        if self._steps is not None and self._at is not None:
            self._at = next(self._steps, None)
        self.leave()

    def leave(self) -> None:
        """Leave the loop, at its end or within a step; a save that has begun is completed."""
        if self._steps is not None:
            self._steps.close()
        self._steps = self._at = None
