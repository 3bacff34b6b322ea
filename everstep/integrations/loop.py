"""``run.steps`` for loops that are not the script's own: a trainer calls back, and the steps go along with it."""

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
    """The steps of a trainer, numbered as the trainer numbers them, from 0.

    A step is complete when the next step begins, or the training ends: work of the trainer in between (logs,
    evaluations) belongs to it. Random states are restored when the first step begins, because trainers draw from them
    while they get ready.

    Args:
        run: From ``everstep.join``.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self._steps: Generator[int, None, None] | None = None
        self._at: int | None = None
        """The current step; None: there is none."""
        self._random = RandomState()
        self._restored: dict[str, Any] | None = None
        """Random states of the restored step, until the first step begins."""

    @property
    def agreed(self) -> int:
        """Completed steps of the state that is going to be restored; 0: there is none.

        Raises:
            ConfigError: the job starts from a checkpoint of other parallel sizes, which a trainer cannot.
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
        """Everything is made: restore it, where there is something to restore.

        Args:
            total: Steps of the whole training.
            start: The first step, where the trainer has restored a checkpoint of its own.
            warm_up: As for ``run.steps``; None: nothing is to be set up before a state is restored.
            things: What makes up the state, as for ``run.checkpoint``.

        Raises:
            CheckpointError: the agreed state cannot be restored.
        """
        state: Checkpoint = self.run.checkpoint(**things)
        self._steps = self.run.steps(total, state, start=start, warm_up=warm_up)
        self._at = next(self._steps, None)
        if self.run.resumed_from is not None:
            self._restored = self._random.state_dict()

    def step_begins(self, step: int) -> None:
        """A step begins: those before it are complete, and saved.

        Raises:
            CheckpointError: a state cannot be saved.
        """
        if self._restored is not None:
            self._random.load_state_dict(self._restored)
            self._restored = None
        while self._steps is not None and self._at is not None and self._at < step:
            self._at = next(self._steps, None)

    def end(self) -> None:
        """The training is over: the last step is complete.

        Raises:
            CheckpointError: the last save failed.
        """
        if self._steps is not None and self._at is not None:
            self._at = next(self._steps, None)
        self.leave()

    def leave(self) -> None:
        """Leave the loop, at its end or in the middle of a step; what was begun to be saved is saved."""
        if self._steps is not None:
            self._steps.close()
        self._steps = self._at = None
