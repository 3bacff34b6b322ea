"""Every-step checkpoints of one rank in shared memory that outlives it.

A save is one copy of the rank's own tensors into a slot (``everstep/slots/file.py``), most of it while training goes on
(``saver.py``). DTensors save and load their local shard, so no rank ever gathers anything.
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
from everstep.training.codec import decode, encode
from everstep.training.cuda import Cuda
from everstep.training.digest import digest_of
from everstep.training.gradients import WHAT_TO_DO, Gradients
from everstep.training.layout import SlotLayout, view_of
from everstep.training.memory_check import check_room
from everstep.training.restore_copy import RestoreCopy
from everstep.training.rng import RandomState
from everstep.training.save_signal import SaveSignal
from everstep.training.saver import Saver

_RNG = "everstep.rng"
_STEP = "everstep.step"
_GRADIENTS = "everstep.gradients"


@runtime_checkable
class Stateful(Protocol):
    """Anything with ``state_dict`` and ``load_state_dict``."""

    def state_dict(self) -> Any:
        """The state, as containers of tensors, numbers and strings."""

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Restore a state."""


class Checkpoint:
    """The state of this rank, saved after every step by ``Run.steps``.

    Made by ``Run.checkpoint``; outside everstep it does nothing. The states of
    the random number generators of torch, numpy and ``random`` are part of it.

    What to know for a resume that is equal bit for bit:

    * The state is restored when the loop over ``Run.steps`` is entered. Call
      ``iter(loader)`` before: a DataLoader draws its base seed from torch's
      generator, and that draw must not come after the restore.
    * Save the position of the data: give the sampler's state, or choose the
      batch by the step number.
    * DDP reduces in other buckets from its second iteration on; with three
      ranks or more that changes bits. Give ``Run.steps`` a ``warm_up``.
    * FSDP1 and whatever else gathers in ``state_dict`` works but is slow; FSDP2
      and tensor parallel modules give DTensors, whose local shards are saved.
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
        self._layouts: dict[bool, SlotLayout] = {}
        """Whether a state has gradients → the layout of such states."""
        self._gradients: Gradients | None = None
        self._groups: dict[str, list[int]] | None = None
        """Optimizer → parameters in each of its groups when the loop began; None: the script was warned of a change."""
        self._saver: Saver | None = None
        self._random = RandomState(cuda)
        if file is not None:
            self._saver = Saver(file, overlap=overlap, save_signal=save_signal, cuda=cuda)
            self._gradients = Gradients(self._things, self._saver.give_up)

    @property
    def active(self) -> bool:
        """Whether saves happen: under everstep only."""
        return self._file is not None

    @property
    def things(self) -> Mapping[str, Stateful]:
        """The objects of ``Run.checkpoint``, by name."""
        return self._things

    def save(self, completed_steps: int) -> None:
        """Save the state after a number of completed steps, and return as soon as training may continue.

        With overlap, parameters and optimizer state are copied meanwhile, and
        the next ``optimizer.step`` waits for that.

        Raises:
            CheckpointError: no room in shared memory, a state that cannot be saved, or the save before failed.
        """
        if self._saver is None or self._gradients is None:
            return
        self._warn_of_new_parameters()
        tree = {name: thing.state_dict() for name, thing in self._things.items()}
        gradients = self._gradients.state_dict(completed_steps, tree)
        tree |= {_RNG: self._random.state_dict(), _STEP: completed_steps}
        if gradients:
            tree[_GRADIENTS] = gradients
        accumulated = "tensors" in gradients
        encoded = encode(tree, self._layouts.get(accumulated))
        self._layouts[accumulated] = encoded.layout
        self._saver.save(self._things, encoded, completed_steps)

    def digest(self) -> str:
        """A digest of the state of this rank now; it is equal in two runs that are equal bit for bit.

        Random generators are left out: a generator that a script never uses differs from run to run.
        """
        return digest_of({name: thing.state_dict() for name, thing in self._things.items()})

    def wait(self) -> None:
        """Return when the last save is committed.

        Raises:
            CheckpointError: it failed.
        """
        if self._saver is not None:
            self._saver.wait()

    def drain(self) -> None:
        """Like ``wait`` for a script that is leaving: for a limited time, and without raising the error of the save."""
        if self._saver is not None:
            self._saver.drain()

    def restore(self, completed_steps: int) -> None:
        """Load the state after a number of completed steps and forget later states.

        Raises:
            CheckpointError: this rank does not hold that step, or the state does not fit the given objects.
            CorruptCheckpoint: the slot is damaged.
        """
        if self._file is None or self._saver is None:
            return
        file = self._file
        payload = file.load(completed_steps, verify=False)
        restore_copy = RestoreCopy(payload.tensors, lambda ends: file.verify(completed_steps, ends))
        devices = {tensor.device for tensor in self._tensors()}
        try:
            place = self._placing(payload, restore_copy)
            with self._saver.on(devices):
                tree = decode(payload.structure, payload.tensors, self._meshes(), place=place)
        except Exception as error:
            file.verify(completed_steps)  # damage explains more than what it leads to
            if isinstance(error, EverstepError):
                raise
            raise CorruptCheckpoint(f"{file.path}: the state's structure cannot be read: {error}") from error
        restore_copy.start()
        self._saver.pin(payload.tensors, devices)
        restore_copy.finish()
        self._take_over(tree, completed_steps, str(file.path))
        file.discard_after(completed_steps)

    def restore_resharded(self, folder: Path, topology: Topology, rank: int) -> int:
        """Load a checkpoint on disk that was saved with other parallel sizes, and save it as this rank's own.

        Args:
            folder: A ``step-…`` folder with the files of all ranks of the old job.
            topology: Sizes now.
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
                f"{folder} was saved while gradients were accumulated, which go on with the same sizes only: start "
                f"from a step after which the optimizer had stepped. {WHAT_TO_DO}"
            )
        self._take_over(tree, completed_steps, str(folder))
        self.discard()
        self.save(completed_steps)
        self.wait()
        return completed_steps

    def call_midway(self, midway: Callable[[int], None]) -> None:
        """Have a function called whenever about half of a save is copied, with its completed steps; for drills."""
        if self._saver is not None:
            self._saver.midway = midway

    def discard(self) -> None:
        """Forget every slot: the job starts from the beginning."""
        self._groups = self._sizes()
        if self._gradients is not None:
            self._gradients.begin()
        if self._file is not None:
            self._file.discard_after(-1)

    def check_room(self, *, ranks: int, backup_slots: int, where: str) -> None:
        """Refuse to begin when the slots of this machine's ranks will not fit; see ``memory_check.py``.

        Raises:
            CheckpointError: they will not.
        """
        if self._file is not None:
            check_room(self._things.values(), self._file, ranks=ranks, backup_slots=backup_slots, where=where)

    def drop_gradients(self) -> None:
        """Set the gradients of the models and optimizers to None."""
        for thing in self._things.values():
            if isinstance(thing, torch.nn.Module | torch.optim.Optimizer):
                thing.zero_grad(set_to_none=True)

    def close(self) -> None:
        """End saving and give the mapping back; the file stays for the next generation."""
        if self._gradients is not None:
            self._gradients.close()
        if self._saver is not None:
            self._saver.close()

    def _placing(self, payload: Payload, restore_copy: RestoreCopy) -> Callable[[TensorSpec], torch.Tensor | None]:
        """Where the tensors of a slot are restored to.

        Modules copy loaded tensors into their parameters and buffers, unless they load in a way of their own: these are
        filled directly, so that nothing is left to copy. Other objects, optimizers above all, keep the loaded tensors:
        with views of the slot, the next step would write into the checkpoint.
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
            # The table is not verified yet: what it says of the bytes must not reach beyond the tensor.
            if alike and local.nbytes == spec.nbytes and local.is_cpu and local.is_contiguous():
                restore_copy.fill(spec, local.data_ptr())
                return local
            return view_of(payload.tensors, spec)

        return place

    def _take_over(self, tree: Any, completed_steps: int, origin: str) -> None:
        """Load the state into the script's objects."""
        rng, saved_step, gradients = tree.pop(_RNG, None), tree.pop(_STEP, None), tree.pop(_GRADIENTS, {})
        if saved_step != completed_steps:
            raise CorruptCheckpoint(
                f"{origin}: what is labelled as the state after step {completed_steps} says it is the one "
                f"after step {saved_step}. Start from another step, or from the beginning"
            )
        if tree.keys() != self._things.keys():
            raise CheckpointError(
                f"the checkpoint holds {', '.join(tree) or 'nothing'}, the script gives {', '.join(self._things)}: "
                "checkpoint() must get the same names as when it was saved"
            )
        for name, thing in self._things.items():
            try:
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
        """Warn once of an optimizer that is no longer what a restart will find when it restores: before any body."""
        if self._groups is None:
            return
        before = self._groups
        name = next((name for name, groups in self._sizes().items() if groups != before.get(name)), "")
        if not name:
            return
        self._groups = None
        warnings.warn(
            f"everstep: the parameters of {name!r} are others than when the loop began. A restart loads its state "
            "before the first body, and it will not fit. Give the optimizer all parameters before run.steps(), and "
            "keep those that do not train yet from having gradients (requires_grad_(False))",
            RuntimeWarning,
            stacklevel=4,
        )

    def _meshes(self) -> dict[Any, Any]:
        """Device meshes that the models and optimizers use."""
        if "torch.distributed.tensor" not in sys.modules:
            return {}
        from everstep.training.dtensors import meshes_of

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
    """Return whether a hook before loading may exchange or transform tensors; then they must not be the module's own.

    The hook of FSDP2 only ensures that the parameters are shards.
    """
    known = "torch.distributed.fsdp._fully_shard."
    hooks = module._load_state_dict_pre_hooks.values()
    return not all(str(getattr(hook, "__module__", "")).startswith(known) for hook in hooks)
