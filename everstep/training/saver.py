"""Saves states while training continues: a thread copies during forward and backward, and ``optimizer.step`` waits.

The saves follow each other::

    script thread   | save n: small copies | forward, backward | wait | optimizer.step | save n + 1 …
    copying thread  |                      | large copies ------------| checksum, commit, signal

The memory of a new file is allocated slot by slot, by the copying thread: that of a slot before its first large copies,
and that of the other slots while no save copies. With a GPU, the thread that pins the other slots allocates them
(``copies/pinned_memory.py``). Only what the small copies need is allocated before training continues.

A save is given up if a tensor changes before it is copied. Then a warning names the tensor, and from then on everything
is copied before training continues.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

import torch

from everstep.errors import CheckpointError
from everstep.slots.file import SlotFile
from everstep.system.bulk_threads import yield_the_core
from everstep.training.copies.copier import Copier
from everstep.training.copies.copy_plan import HOST, CopyPlan, Pieces
from everstep.training.copies.cuda import Cuda, TorchCuda
from everstep.training.copies.overlap import Witness
from everstep.training.save_signal import SaveSignal
from everstep.training.state.codec import Encoded
from everstep.training.state.layout import SlotLayout

if TYPE_CHECKING:
    from everstep.training.copies.pinned_memory import PinnedMemory

DRAIN_S = 30.0
"""Longest wait for the last save of a script that leaves its loop early, seconds."""


@dataclass(slots=True)
class _Save:
    """A save that has begun."""

    completed_steps: int
    address: int
    plan: CopyPlan
    witness: Witness
    encoded: Encoded
    marks: Mapping[str, Any]
    """Device → when its copies can begin (``Copier.mark``)."""
    is_usual: bool
    """Whether later saves into its slot take as long: as much of the slot is pinned as ever will be."""
    copied: threading.Event = field(default_factory=threading.Event)
    """Set when the copies are done, or queued on the devices."""
    ended: threading.Event = field(default_factory=threading.Event)
    """Set when the save is committed or given up."""
    error: BaseException | None = None
    torn: str = ""
    """Name of a tensor that was changed too early; empty: none."""
    replaced: bool = False
    """Whether the optimizers had other tensors than the plan, so that nothing was copied."""
    committed: bool = False
    given_up: bool = False
    """Whether the save is incomplete and must not be kept."""
    stepped: bool = False
    """Whether an optimizer's step has begun since, which may change tensors."""


class Saver:
    """Saves encoded states into a slot file.

    Args:
        file: The slot file.
        overlap: True: tensors that only optimizers change are copied while training continues. False: ``save`` returns
            when the save is committed.
        save_signal: Notifies the agent of each commit; None: it is not notified.
        cuda: The calls to CUDA; None: those of torch.
    """

    def __init__(
        self,
        file: SlotFile,
        *,
        overlap: bool = False,
        save_signal: SaveSignal | None = None,
        cuda: Cuda | None = None,
    ) -> None:
        self._file = file
        self._cuda: Cuda = cuda or TorchCuda()
        self._overlap = overlap
        self._save_signal = save_signal or SaveSignal(None)
        self.midway: Callable[[int], None] | None = None
        """Called when about half of a save is copied, with its completed steps; for drills."""
        self._trusting = overlap
        """Whether tensors are copied while training continues; False after the first unexpected change."""
        self.trusts_state = overlap
        """Whether it is only noticed by the copying thread that optimizers have other tensors in their state, which
        costs that save. False after the first time."""
        self.last: tuple[int, float] = (0, 0.0)
        """Completed steps of the last committed save, and its time from its begin to its commit, seconds. The time in
        which its slot was allocated is left out, and so is a save into a slot that is not pinned yet, since later saves
        into that slot are faster."""
        self.waited_s = 0.0
        """Time for which training has waited for copies and commits, seconds."""
        self._plans: dict[SlotLayout, CopyPlan] = {}
        """Plans of states with and without gradients, which alternate in a script that accumulates gradients."""
        self._save: _Save | None = None
        self._copiers: dict[str, Copier] = {}
        self._pinned: PinnedMemory | None = None
        self._lock = threading.Lock()
        self._orders: SimpleQueue[_Save | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._process = os.getpid()
        self._unhook: Callable[[], None] | None = None
        if overlap:
            from torch.optim.optimizer import register_optimizer_step_pre_hook

            # A compiled step calls this hook without compiling it.
            hook = torch.compiler.disable(self._before_step)  # type: ignore[no-untyped-call]
            self._unhook = register_optimizer_step_pre_hook(hook).remove

    def save(self, things: Mapping[str, Any], encoded: Encoded, completed_steps: int) -> None:
        """Save a state; returns when training may continue.

        Args:
            things: The objects of ``Run.checkpoint``, by name.
            encoded: The state.
            completed_steps: Completed steps of the state.

        Raises:
            CheckpointError: there is no room in shared memory, or the save before this one failed.
        """
        self.wait()
        if self._pinned is not None:
            self._pinned.pause()
        try:
            plan = self._planned(things, encoded)
            now = plan.now(encoded)
            parts = (part for _, batch in now for part in batch.parts()) if plan.later else None
            address = self._file.begin(encoded.pieces, encoded.layout.total_bytes, parts=parts)
            plan.follow(self._file.mapping)
            for device in plan.devices:
                self._copiers[device].follow()
            if not plan.later:
                self._file.make_present()
            marks = {device: self._copiers[device].mark() for device in plan.devices}
            is_usual = self._pinned is None or self._pinned.is_done(address, encoded.layout.total_bytes)
            self._copy(now, address, None if plan.later else completed_steps)
            for device, _ in now:
                self._copiers[device].pause()
            save = _Save(completed_steps, address, plan, plan.witness(), encoded, marks, is_usual)
            if self._overlap:
                self._hand_over(save)
                return
            self._finish(save)
        except BaseException:
            self._file.abort()
            raise

    def expect(self, devices: set[torch.device]) -> None:
        """Prepare for tensors on some devices, before the first step; otherwise the first save does it."""
        self._make_copiers({str(device) for device in devices if device.type == "cuda"})

    def pin(self, tensors: memoryview, devices: set[torch.device]) -> None:
        """Pin a slot from which tensors are restored to a GPU; without tensors on a GPU nothing happens.

        Args:
            tensors: The tensors of the slot.
            devices: The devices of the tensors.
        """
        self.expect(devices)
        if self._pinned is not None and len(tensors):
            self._pinned.pin_slot(ctypes.addressof(ctypes.c_char.from_buffer(tensors)))

    def on(self, devices: set[torch.device]) -> AbstractContextManager[Any]:
        """A context in which the GPU of a state is the current device, if there is exactly one.

        It is needed because a saved tensor records only the kind of its device, not the index.
        """
        gpus = [device for device in devices if device.type == "cuda"]
        return self._cuda.on(gpus[0]) if len(gpus) == 1 else contextlib.nullcontext()

    def wait(self) -> None:
        """Return when the last save is committed.

        Raises:
            CheckpointError: the save failed.
        """
        save = self._save
        if save is None or os.getpid() != self._process:
            return
        self._wait_for(save.ended)
        self._save = None
        self._let_step(save)

    def give_up(self, completed_steps: int) -> None:
        """Discard the states after ``completed_steps`` steps or more, whether they are committed or not."""
        if os.getpid() != self._process:
            return
        with self._lock:
            save = self._save
            if save is not None and save.completed_steps >= completed_steps:
                save.given_up = True
            self._file.discard_after(completed_steps - 1)

    def drain(self) -> None:
        """Wait for the last save for at most ``DRAIN_S``, without raising its error, since the script leaves its
        loop."""
        save = self._save
        if save is not None and os.getpid() == self._process:
            save.ended.wait(DRAIN_S)

    def close(self) -> None:
        """End the threads and close the file, which is kept. What is pinned of it stays mapped."""
        with contextlib.suppress(CheckpointError):
            self.wait()
        if self._unhook is not None:
            self._unhook()
            self._unhook = None
        if self._thread is not None and os.getpid() == self._process:
            self._orders.put(None)
            self._thread.join()
        self._thread = None
        if self._pinned is not None:
            self._pinned.close()
        for copier in self._copiers.values():
            copier.close()
        self._copiers.clear()
        self._plans.clear()
        self._file.close()
        self._save_signal.close()

    # The script's thread.

    def _planned(self, things: Mapping[str, Any], encoded: Encoded) -> CopyPlan:
        plan = self._plans.get(encoded.layout)
        if plan is None or not plan.fits(encoded):
            parts = 2 if self.midway else 1
            plan = CopyPlan(things.values(), encoded, overlap=self._trusting, parts=parts)
            if len(self._plans) > 1 or encoded.layout in self._plans:
                self._plans.clear()  # plans keep tensors alive that the script may have replaced
            self._plans[encoded.layout] = plan
            self._make_copiers(plan.devices)
        return plan

    def _wait_for(self, event: threading.Event) -> None:
        began = time.perf_counter()
        event.wait()
        self.waited_s += time.perf_counter() - began

    def _hand_over(self, save: _Save) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="everstep saves", daemon=True)
            self._thread.start()
        self._save = save
        self._orders.put(save)

    def _before_step(self, *_: Any) -> None:
        """Let an optimizer's step wait for the copies; torch calls this before every step of every optimizer."""
        save = self._save
        if save is None or save.stepped or os.getpid() != self._process:
            return
        self._wait_for(save.copied)
        copiers = [self._copiers[device] for device in {device for device, _ in save.plan.later}]
        if not all(copier.can_pause() for copier in copiers):
            self._wait_for(save.ended)
        else:
            for copier in copiers:
                copier.pause()
        self._let_step(save)

    def _let_step(self, save: _Save) -> None:
        """Check that no tensor has changed so far; from now on tensors may change."""
        with self._lock:
            if not save.stepped:
                save.stepped = True
                save.torn = save.torn or save.witness.changed()
                if save.torn and save.committed:
                    # The copy was probably complete before the change, but that is not certain.
                    self._file.forget(save.completed_steps)
        if save.replaced:
            self.trusts_state = False
        if save.error is not None:
            raise CheckpointError(
                f"the state after step {save.completed_steps} could not be saved: {save.error}"
            ) from save.error
        if save.torn and self._trusting:
            self._trusting, self._plans = False, {}
            warnings.warn(
                f"everstep: {save.torn!r} was changed outside of optimizer.step() while it was saved. The state "
                f"after step {save.completed_steps} is not kept, and from now on training waits for every copy. Change "
                "parameters within the step, after optimizer.step(), or set EVERSTEP_CHECKPOINT_OVERLAP=0",
                RuntimeWarning,
                stacklevel=3,
            )

    # The copying thread.

    def _serve(self) -> None:
        yield_the_core()
        for copier in tuple(self._copiers.values()):
            copier.enter_thread()
        while (save := self._next()) is not None:
            try:
                self._finish(save)
            except BaseException as error:
                save.error = error
                self._file.abort()
            finally:
                save.copied.set()
                save.ended.set()

    def _next(self) -> _Save | None:
        """The next save; None: the thread has to end. Until a save begins, unused slots are allocated in pieces; with a
        GPU, another thread does it."""
        while True:
            try:
                return self._orders.get_nowait()
            except Empty:
                if self._pinned is not None or not self._file.prepare():
                    return self._orders.get()

    def _finish(self, save: _Save) -> None:
        """Copy the remaining tensors, and commit the save."""
        if save.encoded.same and self.trusts_state and not save.encoded.same_state():
            save.replaced = True
            self._file.abort()
            return
        began = time.perf_counter()
        if save.plan.later:
            self._file.make_present()  # before the large copies
        ready_s = time.perf_counter() - began
        self._copy(save.plan.later, save.address, save.completed_steps)
        save.copied.set()
        copy_s = max((self._copiers[device].wait(mark) for device, mark in save.marks.items()), default=0.0)
        copied = time.perf_counter()
        if self._pinned is not None:
            self._pinned.resume()
        with self._lock:
            if not save.stepped:
                save.torn = save.witness.changed()
            save.torn = save.torn or save.witness.missed(save.address)
        if save.torn:
            self._file.abort()
            return
        self._file.commit(save.completed_steps)
        if save.is_usual:
            self.last = save.completed_steps, max(copy_s - ready_s, 0.0) + time.perf_counter() - copied
        with self._lock:
            save.committed = True
            if save.torn or save.given_up:
                self._file.forget(save.completed_steps)
                return
        self._save_signal.send()

    def _copy(self, pieces: Pieces, address: int, midway: int | None) -> None:
        for index, (device, batch) in enumerate(pieces):
            self._copiers[device].copy(batch, address)
            if self.midway is not None and midway is not None and index == (len(pieces) - 1) // 2:
                self.midway(midway)

    def _make_copiers(self, devices: set[str]) -> None:
        for device in devices - self._copiers.keys():
            if device == HOST:
                self._copiers[device] = Copier()
            else:
                from everstep.training.copies.cuda_copier import DeviceCopier
                from everstep.training.copies.pinned_memory import PinnedMemory

                gpu = torch.device(device)
                if self._pinned is None:
                    self._pinned = PinnedMemory(self._cuda, gpu, self._file)
                self._copiers[device] = DeviceCopier(self._cuda, gpu, self._pinned)
