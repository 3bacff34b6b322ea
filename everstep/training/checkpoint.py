"""Saves the state of one rank after a step, in shared memory that outlives the rank, and restores it.

A save is one copy of the rank's own tensors into a slot (``everstep/slots/file.py``). Most of it is copied while the
next step runs (``saver.py``). Only the local shard of a DTensor is saved and loaded, so no rank gathers tensors.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch

from everstep.errors import CheckpointError, ConfigError, CorruptCheckpoint, EverstepError
from everstep.model.topology import Topology
from everstep.slots.file import Payload, SlotFile
from everstep.slots.tensor_table import TensorSpec
from everstep.training.copies.cuda import Cuda
from everstep.training.copies.restore_copy import RestoreCopy
from everstep.training.memory_check import check_room
from everstep.training.rng import RandomState
from everstep.training.save_signal import SaveSignal
from everstep.training.saver import Saver
from everstep.training.state.codec import decode
from everstep.training.state.digest import digest_of
from everstep.training.state.encoder import StateEncoder
from everstep.training.state.gradients import WHAT_TO_DO, Gradients
from everstep.training.state.layout import view_of
from everstep.training.state.optimizer_state import load_optimizer
from everstep.training.state.refusals import refuse_what_cannot_return
from everstep.training.state.unsaved_buffers import UnsavedBuffers

_RNG = "everstep.rng"
_STEP = "everstep.step"
_GRADIENTS = "everstep.gradients"


@runtime_checkable
class Stateful(Protocol):
    """An object with ``state_dict`` and ``load_state_dict``."""

    def state_dict(self) -> Any:
        """The state, as containers of tensors, numbers and strings."""

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Load a state."""


class Checkpoint:
    """The state of this rank, saved by ``Run.steps`` after every step, or after every k-th if saves are slower.

    ``Run.checkpoint`` makes it; outside everstep it does nothing. The states of the random number generators of torch,
    numpy and ``random`` are part of it.

    For a resume that is equal bit for bit:

    * Call ``iter(loader)`` before the loop over ``Run.steps``, which restores the state when it is entered. A
      DataLoader draws its base seed from torch's generator, and must do so before the restore.
    * Save the position in the data: name an object with the sampler's state, or choose the batch by the step number.
    * Pass a ``warm_up`` to ``Run.steps`` if the script uses DDP with three ranks or more: from its second iteration on,
      DDP adds gradients in another order.

    FSDP2 and tensor parallel modules have DTensors, whose local shards are saved. Modules that gather tensors in
    ``state_dict``, as FSDP1 does, work but are slow.
    """

    def __init__(
        self,
        things: Mapping[str, Stateful],
        file: SlotFile | None,
        *,
        overlap: bool = False,
        save_signal: SaveSignal | None = None,
        cuda: Cuda | None = None,
    ) -> None:
        for name, thing in things.items():
            if not isinstance(thing, Stateful):
                raise ConfigError(
                    f"checkpoint({name}=…) got a {type(thing).__name__}, which has no state_dict and load_state_dict"
                )
        self._things = dict(things)
        self._file = file
        self._encoder = StateEncoder(self._things)
        self._gradients: Gradients | None = None
        self._groups: dict[str, list[int]] | None = None
        """Optimizer → number of parameters in each of its groups when the loop began; None: a change was reported."""
        self._checked = False
        """Whether the first save has shown that the state of all objects can be restored."""
        self._unsaved_buffers = UnsavedBuffers(self._things)
        self._saver: Saver | None = None
        self._random = RandomState(cuda)
        if file is not None:
            self._saver = Saver(file, overlap=overlap, save_signal=save_signal, cuda=cuda)
            self._gradients = Gradients(self._things, self._saver.give_up)

    @property
    def active(self) -> bool:
        """Whether the state is saved; it is saved only under everstep."""
        return self._file is not None

    @property
    def things(self) -> Mapping[str, Stateful]:
        """The objects of ``Run.checkpoint``, by name."""
        return self._things

    @property
    def last_save(self) -> tuple[int, float]:
        """Completed steps of the last committed save, and the time that it took, seconds; (0, 0): there is none."""
        return self._saver.last if self._saver is not None else (0, 0.0)

    @property
    def waited_s(self) -> float:
        """Time for which training has waited for saves, seconds."""
        return self._saver.waited_s if self._saver is not None else 0.0

    def save(self, completed_steps: int) -> None:
        """Save the state after a number of completed steps, and return as soon as training may continue.

        With overlap, parameters and optimizer state are copied after that; the next ``optimizer.step`` waits until they
        are copied.

        Raises:
            CheckpointError: there is no room in shared memory, the state cannot be saved, or the save before it failed.
        """
        if self._saver is None or self._gradients is None:
            return
        self._warn_of_new_parameters()
        self._unsaved_buffers.look()
        same = self._encoder.look(completely=not self._saver.trusts_state)
        if not self._checked:
            for name, state in self._encoder.states.items():
                refuse_what_cannot_return(name, self._things[name], state)
        self._checked = True
        gradients = self._gradients.state_dict(completed_steps, self._encoder.states, same_parameters=same)
        more = {_RNG: self._random.state_dict(), _STEP: completed_steps}
        if gradients:
            more[_GRADIENTS] = gradients
        encoded = self._encoder.encode(more, gradients="tensors" in gradients)
        self._saver.save(self._things, encoded, completed_steps)

    def digest(self) -> str:
        """A digest of the state of this rank now; it is equal in two runs that are equal bit for bit.

        Random generators are left out: a generator that a script never uses differs from run to run.
        """
        return digest_of({name: thing.state_dict() for name, thing in self._things.items()})

    def wait(self) -> None:
        """Return when the last save is committed.

        Raises:
            CheckpointError: the save failed.
        """
        if self._saver is not None:
            self._saver.wait()

    def give_up(self, completed_steps: int) -> None:
        """Discard the states after ``completed_steps`` steps or more."""
        if self._saver is not None:
            self._saver.give_up(completed_steps)

    def drain(self) -> None:
        """Wait a limited time for the last save, without raising its error, since the script already leaves its
        loop."""
        if self._saver is not None:
            self._saver.drain()

    def restore(self, completed_steps: int) -> None:
        """Load the state after a number of completed steps and forget later states.

        Raises:
            CheckpointError: this rank does not have that step, or the state does not fit the script's objects.
            CorruptCheckpoint: the slot is damaged.
        """
        if self._file is None or self._saver is None:
            return
        file = self._file
        payload = file.load(completed_steps, verify=False)
        restore_copy = RestoreCopy(payload.tensors, lambda ends: file.verify(completed_steps, ends))
        devices = {tensor.device for tensor in self._tensors()}
        self._saver.pin(payload.tensors, devices)  # before tensors are copied to a GPU
        try:
            place = self._placing(payload, restore_copy)
            with self._saver.on(devices):
                tree = decode(payload.structure, payload.tensors, self._meshes(), place=place)
        except Exception as error:
            file.verify(completed_steps)  # if the slot is damaged, the error of verify explains more
            if isinstance(error, EverstepError):
                raise
            raise CorruptCheckpoint(f"{file.path}: the state's structure cannot be read: {error}") from error
        restore_copy.start()
        restore_copy.finish()
        self._load(tree, completed_steps, str(file.path))
        file.discard_after(completed_steps)

    def restore_resharded(self, folder: Path, topology: Topology, rank: int) -> int:
        """Load a checkpoint on disk that was saved with other parallel sizes, and save it in this rank's slots.

        Args:
            folder: A ``step-…`` folder with the files of all ranks of the old job.
            topology: The topology of the current job.
            rank: This rank.

        Returns:
            Completed steps of the state.

        Raises:
            CheckpointError: a file is missing, or the state cannot be mapped to these sizes.
            CorruptCheckpoint: a file that is needed is damaged.
        """
        from everstep.training.reshard import read_resharded

        completed_steps, tree = read_resharded(folder, topology, rank, self._meshes())
        if "tensors" in tree.get(_GRADIENTS, {}):
            raise CheckpointError(
                f"{folder} was saved while gradients were accumulated, and so can be read with the same sizes only: "
                f"start from a step at whose end the optimizer had stepped. {WHAT_TO_DO}"
            )
        self._load(tree, completed_steps, str(folder))
        self.discard()
        self.save(completed_steps)
        self.wait()
        return completed_steps

    def call_midway(self, midway: Callable[[int], None]) -> None:
        """Call a function whenever about half of a save is copied, with the save's completed steps; for drills."""
        if self._saver is not None:
            self._saver.midway = midway

    def discard(self) -> None:
        """Forget every slot, since the job starts from the beginning."""
        self._groups = self._sizes()
        if self._gradients is not None:
            self._gradients.begin()
        if self._file is not None and self._saver is not None:
            self._file.discard_after(-1)
            self._saver.expect({tensor.device for tensor in self._tensors()})

    def check_room(self, *, ranks: int, backup_slots: int, where: str) -> None:
        """Check that the slots of this machine's ranks will fit into its memory; see ``memory_check.py``.

        Raises:
            CheckpointError: they will not fit.
        """
        if self._file is not None:
            check_room(self._things.values(), self._file, ranks=ranks, backup_slots=backup_slots, where=where)

    def drop_gradients(self) -> None:
        """Set the gradients of the models and optimizers to None."""
        for thing in self._things.values():
            if isinstance(thing, torch.nn.Module | torch.optim.Optimizer):
                thing.zero_grad(set_to_none=True)

    def close(self) -> None:
        """End saving and unmap the file, which is kept for the next generation."""
        if self._gradients is not None:
            self._gradients.close()
        if self._saver is not None:
            self._saver.close()

    def _placing(self, payload: Payload, restore_copy: RestoreCopy) -> Callable[[TensorSpec], torch.Tensor | None]:
        """A function that gives the tensor into which a tensor of the slot is restored.

        Usual modules copy loaded tensors into their parameters and buffers. So the parameters and buffers are filled
        directly, which saves a copy. Other objects, e.g. optimizers, keep the loaded tensors. So these must not be
        views of the slot, since the next step would write into the checkpoint.
        """
        plain = torch.nn.Module
        targets = {
            ".".join(filter(None, (name, path, key))): tensor
            for name, thing in self._things.items()
            if isinstance(thing, plain) and type(thing).load_state_dict is plain.load_state_dict
            if not any(map(_may_exchange, thing.modules()))
            for path, module in thing.named_modules(remove_duplicate=False)
            if type(module)._load_from_state_dict is plain._load_from_state_dict
            for key, tensor in (*module._parameters.items(), *module._buffers.items())
            if tensor is not None
        }

        def place(spec: TensorSpec) -> torch.Tensor | None:
            target = targets.get(spec.name)
            if target is None:
                return restore_copy.tensor(spec) if spec.device == "cpu" else None
            local: torch.Tensor = getattr(target, "_local_tensor", target)
            alike = str(local.dtype) == f"torch.{spec.dtype}" and tuple(local.shape) == spec.shape
            # The table is not verified yet, so its sizes are checked: a copy must not reach beyond the tensor.
            if alike and local.nbytes == spec.nbytes and local.is_cpu and local.is_contiguous():
                restore_copy.fill(spec, local.data_ptr())
                return local
            return view_of(payload.tensors, spec)

        return place

    def _load(self, tree: Any, completed_steps: int, origin: str) -> None:
        """Load a state into the script's objects."""
        rng, saved_step, gradients = tree.pop(_RNG, None), tree.pop(_STEP, None), tree.pop(_GRADIENTS, {})
        if saved_step != completed_steps:
            raise CorruptCheckpoint(
                f"{origin}: the state that is labelled with step {completed_steps} is that after step {saved_step}. "
                "Start from another step, or from the beginning"
            )
        if tree.keys() != self._things.keys():
            raise CheckpointError(
                f"the checkpoint has {', '.join(tree) or 'nothing'}, but the script names {', '.join(self._things)}: "
                "call checkpoint() with the same names as when it was saved"
            )
        for name, thing in self._things.items():
            try:
                if isinstance(thing, torch.optim.Optimizer):
                    load_optimizer(thing, tree.pop(name))
                else:
                    thing.load_state_dict(tree.pop(name))
            except EverstepError:
                raise
            except Exception as error:
                raise CheckpointError(
                    f"the saved state of {name!r} does not fit the script's {type(thing).__name__}: {error}"
                ) from error
        self._groups = self._sizes()
        if self._gradients is not None:
            self._gradients.load_state_dict(gradients, completed_steps)
        if rng is not None:
            self._random.load_state_dict(rng)

    def _sizes(self) -> dict[str, list[int]]:
        return {
            name: [len(group["params"]) for group in thing.param_groups]
            for name, thing in self._things.items()
            if isinstance(thing, torch.optim.Optimizer)
        }

    def _warn_of_new_parameters(self) -> None:
        """Warn once if an optimizer got other parameters in the loop, since a restart restores before the first
        body."""
        if self._groups is None:
            return
        before = self._groups
        name = next((name for name, groups in self._sizes().items() if groups != before.get(name)), "")
        if not name:
            return
        self._groups = None
        warnings.warn(
            f"everstep: {name!r} has other parameters than when the loop began. A restart loads its state before the "
            "first body, and the state will not fit then. Give the optimizer all parameters before run.steps(), and "
            "freeze those that do not train yet (requires_grad_(False))",
            RuntimeWarning,
            stacklevel=4,
        )

    def _meshes(self) -> dict[Any, Any]:
        """Device meshes that the models and optimizers use."""
        if "torch.distributed.tensor" not in sys.modules:
            return {}
        from everstep.training.state.dtensors import meshes_of

        return dict(meshes_of(self._tensors()))

    def _tensors(self) -> list[torch.Tensor]:
        """Parameters and buffers of the models, and parameters of the optimizers."""
        tensors: list[torch.Tensor] = []
        for thing in self._things.values():
            if isinstance(thing, torch.nn.Module):
                tensors += [*thing.parameters(), *thing.buffers()]
            elif isinstance(thing, torch.optim.Optimizer):
                tensors += [parameter for group in thing.param_groups for parameter in group["params"]]
        return tensors


def _may_exchange(module: torch.nn.Module) -> bool:
    """Whether a hook of a module may exchange or transform the tensors that are loaded.

    If so, the module's own tensors must not be filled directly. The hook of FSDP2 only checks that the parameters are
    shards.
    """
    harmless = "torch.distributed.fsdp._fully_shard."
    hooks = module._load_state_dict_pre_hooks.values()
    return not all(str(getattr(hook, "__module__", "")).startswith(harmless) for hook in hooks)
