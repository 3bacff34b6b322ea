"""Defines the ``Run`` of a rank in a drill, which meets the planned faults at certain points of a step."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import closing
from typing import Any

from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from everstep.model.topology import Topology
from everstep.rank.drill_faults import RankFaults
from everstep.rank.step_reports import Flops, ReportFile
from everstep.training.checkpoint import Checkpoint, Stateful
from everstep.training.run import Run
from everstep.training.torch_faults import ACTIONS


class DrilledRun(Run):
    """A ``Run`` whose rank meets the faults of a drill; ``join`` makes it only if a drill planned faults.

    A fault acts when a step begins, within the step, or when half of a save is copied. Within a step it acts in
    ``report`` or before ``optimizer.step``, whichever is first, or else at the end of the body.

    Args:
        topology: The topology of the job.
        rank: This rank.
        reports: The report file of this rank.
        flops: The cost of a token, as for ``Run``.
        faults: The faults that the drill planned for this rank.
    """

    def __init__(self, topology: Topology, rank: int, reports: ReportFile, flops: Flops, faults: RankFaults) -> None:
        super().__init__(topology, rank, reports, flops)
        self._faults = faults
        faults.actions |= ACTIONS
        register_optimizer_step_pre_hook(self._before_optimizer_step)

    def checkpoint(self, **things: Stateful) -> Checkpoint:
        """See ``Run.checkpoint``."""
        state = super().checkpoint(**things)
        state.call_midway(lambda completed_steps: self._faults.meet("save", completed_steps - 1))
        return state

    def steps(
        self,
        total: int,
        state: Checkpoint | None = None,
        *,
        start: int = 0,
        warm_up: Callable[[], object] | None = None,
    ) -> Generator[int, None, None]:
        """See ``Run.steps``."""
        with closing(super().steps(total, state, start=start, warm_up=warm_up)) as steps:
            for step in steps:
                self._faults.meet("begin", step)
                yield step
                self._faults.meet("step", step)

    def report(
        self,
        step: int,
        *,
        loss: float | Tensor | None = None,
        grad_norm: float | Tensor | None = None,
        tokens: int = 0,
    ) -> None:
        """See ``Run.report``."""
        self._faults.meet("step", step)
        super().report(step, loss=loss, grad_norm=grad_norm, tokens=tokens)

    def _before_optimizer_step(self, *_: Any) -> None:
        if self.step is not None:
            self._faults.meet("step", self.step)
