"""Defines a rank's handle on its job: its coordinate in the mesh, its loop over steps, its reports.

Outside everstep (``EVERSTEP_REPORT_FILE`` is not set) all calls work, but nothing is saved. So the same script also
runs under torchrun and plain python.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from everstep.errors import ConfigError
from everstep.model.topology import Coordinate, Topology
from everstep.rank import environment
from everstep.rank.step_reports import Flops, ReportFile
from everstep.slots.checksum import hashing_threads
from everstep.slots.file import SlotFile
from everstep.slots.owner import SlotOwner
from everstep.training.checkpoint import Checkpoint, Stateful
from everstep.training.deferred_reports import PendingReport, number, on_device, plain
from everstep.training.launch_environment import from_environment, origin_of
from everstep.training.paced_saves import PacedSaves
from everstep.training.save_signal import SaveSignal

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh

UNKNOWN = Flops()
ALIGN_POLL_S = 0.005
"""Time between two checks of whether a rank still has to wait, seconds."""
REPLAY_WAIT_S = 600.0
"""A rank of a replay that was not stopped within this time ends itself, seconds."""


class Run:
    """This rank's handle on its job; made by ``join``."""

    def __init__(self, topology: Topology, rank: int, reports: ReportFile | None, flops: Flops = UNKNOWN) -> None:
        self.topology = topology
        self.rank = rank
        self.world_size = topology.world_size
        self.local_rank = from_environment("LOCAL_RANK", rank % topology.ranks_per_machine)
        self.coordinate: Coordinate = topology.coordinate(rank)
        self.resumed_from: int | None = None
        """Completed steps of the restored state; None before the loop, and when the job starts from the beginning."""
        self._reports = reports
        self._flops = flops
        self.step: int | None = None
        """The current step of ``steps``; None outside of a step."""
        self.reported = 0
        """Number of calls of ``report``."""
        self._state: Checkpoint | None = None
        self._saves: PacedSaves | None = None
        self._entered = False
        self._pending: list[PendingReport] = []

    @property
    def active(self) -> bool:
        """Whether everstep runs this rank."""
        return self._reports is not None

    def mesh_shape(self) -> tuple[int, ...]:
        """Sizes of the mesh in the topology's order, as ``init_device_mesh`` expects them."""
        return self.topology.mesh_shape()

    def device_mesh(self, device_type: str) -> DeviceMesh:
        """The job's device mesh, with the names of the topology's axes. All ranks have to call this together."""
        from torch.distributed.device_mesh import init_device_mesh

        return init_device_mesh(device_type, self.mesh_shape(), mesh_dim_names=self.topology.axes)

    def checkpoint(self, **things: Stateful) -> Checkpoint:
        """Name the objects that make up the state of training; pass the result to ``steps``.

        Args:
            things: Objects with ``state_dict`` and ``load_state_dict``, by name: model, optimizer, scheduler, sampler.
                They are loaded in this order. Random number generators are always included.

        Raises:
            ConfigError: an object has no ``state_dict``, or a number in the environment makes no sense.
            CheckpointError: the checkpoint file cannot be opened.
        """
        name = os.environ.get(environment.CHECKPOINT_FILE)
        self._report_flops(things)
        if not self.active or not name or steps_of_replay():
            return Checkpoint(things, None)
        file = SlotFile(
            Path(name),
            slots=from_environment(environment.CHECKPOINT_SLOTS, 3),  # agents always set it
            owner=SlotOwner(os.environ.get(environment.JOB, ""), os.environ.get(environment.RUN, ""), self.rank),
            generation=from_environment(environment.GENERATION, 0),
            threads=hashing_threads(self.topology.ranks_per_machine),
        )
        # With two slots, a rank that is a step ahead could overwrite the last step that all other ranks have saved.
        overlap = from_environment(environment.CHECKPOINT_OVERLAP, 1) != 0 and file.slots > 2
        path = os.environ.get(environment.SAVE_SIGNAL)
        save_signal = SaveSignal(Path(path) if path else None)
        return Checkpoint(things, file, overlap=overlap, save_signal=save_signal)

    def steps(
        self,
        total: int,
        state: Checkpoint | None = None,
        *,
        start: int = 0,
        warm_up: Callable[[], object] | None = None,
    ) -> Generator[int, None, None]:
        """The steps of training: ``for step in run.steps(total, state)``. Enter it once.

        At entry the state of the step on which all ranks agreed is restored. After each body its save begins; if saves
        take longer than steps, only after every k-th body (docs/concepts/saves.md). The saved state is the state
        *between* steps, so a body that was interrupted runs again.

        Every step needs an operation in which all ranks wait for each other, e.g. an all-reduce of the loss, so that no
        rank is more than one step ahead of another.

        Parameters and optimizer state are copied while the next body runs, until it calls ``optimizer.step``;
        docs/concepts/saves.md describes what a script must not do meanwhile.

        Args:
            total: Number of steps of the complete job.
            state: The state from ``checkpoint``; None: steps are only counted, and nothing is saved or restored.
            start: The first step if no state is restored, for a script that restores its own checkpoints.
            warm_up: Runs one forward and backward pass without an optimizer step. It is called twice before a state is
                restored, and its gradients are dropped. After that, torch has made what it makes in its first
                iterations (DDP's buckets), as in the run that is resumed.

        Raises:
            CheckpointError: the agreed state cannot be restored, a state cannot be saved, or there is no room for the
                slots and backups on this machine.
        """
        if self._entered:
            raise ConfigError("run.steps() was entered twice: use one loop and count its steps over all epochs")
        self._entered = True
        self._state = state
        replayed = steps_of_replay() if self.active else 0
        first = self._restore(state, start, warm_up)
        if state is not None and self._reports is not None:
            disk_every = from_environment(environment.DISK_EVERY_STEPS, 0)
            self._saves = PacedSaves(state, self._reports, total=total, disk_every=disk_every)
        total = min(total, first + replayed) if replayed else total
        process = os.getpid()
        if state is not None:
            # A variable or a progress bar may keep this generator alive after an exception, until the process ends.
            atexit.register(state.drain)
        try:
            for step in range(first, total):
                self.step = step
                yield step
                self._complete(step, first)
            if self._reports is not None:
                self._reports.mark("first_step")  # for a rank that was restored at the job's last step
            if state is not None and from_environment(environment.STATE_DIGEST, 0):
                print(f"--- everstep: state after step {total}: {state.digest()}", file=sys.stderr, flush=True)
            self.finish()
            if replayed:
                wait_to_be_stopped()
        except GeneratorExit:  # the script left the loop by ``break``
            if self._reports is not None and os.getpid() == process:  # not in a child that was forked within the loop
                self._reports.mark("loop_left")
            raise
        finally:  # even if the body raises an error or leaves the loop, the step before it is complete and is kept
            if state is not None:
                state.drain()
                atexit.unregister(state.drain)

    def report(
        self,
        step: int,
        *,
        loss: float | Tensor | None = None,
        grad_norm: float | Tensor | None = None,
        tokens: int = 0,
    ) -> None:
        """Report the numbers of a step. This is a store into mapped memory, which never waits.

        Args:
            step: The step, from ``steps``.
            loss: A number, or a tensor or array of one element. A value on a GPU is copied without waiting, and
                published once it has arrived. A DTensor that is spread over ranks is refused, since a report never asks
                other ranks: pass its ``full_tensor()``. None: this rank has no loss, as in all stages of a pipeline
                except the last. A loss of NaN opens an incident.
            grad_norm: Norm of the gradient, in the same forms; None: not known. A DTensor that is spread over ranks
                counts as not known, with a warning.
            tokens: Number of tokens on which this rank trained in this step.

        Raises:
            ConfigError: the loss or the norm has another form.
        """
        loss = None if loss is None else plain("loss", loss)
        grad_norm = None if grad_norm is None else plain("grad_norm", grad_norm)
        if self._reports is None:
            return
        self.reported += 1
        if on_device(loss) or on_device(grad_norm):
            self._publish_pending(wait=True)
            self._pending.append(PendingReport(step, loss, grad_norm, tokens))
        else:
            self._reports.report(step, number(loss), number(grad_norm), tokens)

    def finish(self) -> None:
        """Report that training is over, as ``steps`` does at its end.

        A script that leaves its loop by ``break`` may call it. The report counts if the exit status of a rank is lost.

        Raises:
            CheckpointError: the last save failed.
        """
        self.step = None
        if self._state is not None:
            self._state.wait()
            self._state.close()
        if self._reports is not None:
            self._publish_pending(wait=True)
            self._reports.finish()

    def _complete(self, step: int, first: int) -> None:
        """Report that the body of a step is done, and save the state if that is due."""
        if self._reports is None:
            return
        self._reports.complete(step + 1)
        if self._saves is not None:
            self._saves.end_step(step + 1)
        if self._pending:
            self._publish_pending(wait=False)
        if step == first:
            self._reports.mark("first_step")
        if 0 < self._reports.align_step() <= step + 1:
            self._align(step + 1)

    def _align(self, completed_steps: int) -> None:
        """Wait at the end of a step until this rank is stopped, or no longer has to wait."""
        assert self._reports is not None
        if not self._reports.alignment().is_asked(completed_steps):
            return
        if self._saves is not None:
            self._saves.begin_wait(completed_steps)
        self._publish_pending(wait=True)
        wait_aligned(self._reports, completed_steps)
        if self._saves is not None:
            self._saves.end_wait(completed_steps)
        print(
            f"everstep: waited after step {completed_steps}, was not stopped and continues", file=sys.stderr, flush=True
        )

    def _restore(self, state: Checkpoint | None, start: int, warm_up: Callable[[], object] | None) -> int:
        """Restore the agreed state; returns the first step to run."""
        if self._reports is None:
            return start
        self._reports.mark("loop_entered")
        self._reports.can_align()
        first = start
        if state is not None and state.active:
            agreed = from_environment(environment.RESUME_STEP, 0)
            state.check_room(
                ranks=self.topology.ranks_per_machine,
                # A job that is restored does not end if there is no room for backups: it continues and reports the
                # problem.
                backup_slots=from_environment(environment.BACKUP_SLOTS, 0) if agreed <= 0 else 0,
                where=os.environ.get(environment.MACHINE) or "this machine",
            )
            origin = origin_of(agreed)
            if agreed > 0 or origin is not None:
                if warm_up is not None:
                    for _ in range(2):
                        warm_up()
                    state.drop_gradients()
                if origin is not None:
                    agreed = state.restore_resharded(origin, self.topology, self.rank)
                else:
                    state.restore(agreed)
                first = self.resumed_from = agreed
            else:
                state.discard()
        self._reports.complete(first)
        self._reports.mark("restored")
        return first

    def _report_flops(self, things: Mapping[str, Stateful]) -> None:
        """Report the cost of a token: the number from the script, or else the number for the models."""
        if self._reports is None:
            return
        from everstep.training.flops import with_defaults

        self._flops = with_defaults(self._flops, things.values(), self.topology)
        self._reports.set_flops(self._flops)

    def _publish_pending(self, *, wait: bool) -> None:
        assert self._reports is not None
        while self._pending and (wait or self._pending[0].arrived()):
            self._reports.report(*self._pending.pop(0).values())


def wait_aligned(reports: ReportFile, completed_steps: int) -> None:
    """Report that this rank waits, and wait as long as it is asked to.

    Args:
        reports: The rank's report file.
        completed_steps: Completed steps of the rank, whose state is saved.
    """
    reports.set_aligned(completed_steps)
    try:
        while reports.alignment().is_asked(completed_steps):
            time.sleep(ALIGN_POLL_S)
    finally:
        reports.set_aligned(0)


def steps_of_replay() -> int:
    """Number of steps that this process has to run as a rank of a replay; 0: it is not a rank of a replay."""
    return from_environment(environment.REPLAY_STEPS, 0)


def wait_to_be_stopped() -> NoReturn:
    """Wait at the end of a replay, so that its script does not continue after the loop, e.g. to write its model.

    The rank does not end by itself, because another rank may still read data that this rank sent.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    time.sleep(REPLAY_WAIT_S)
    os._exit(0)
