"""Every-step checkpoints of one rank in shared memory that outlives it.

A save is one copy of the rank's own tensors into a slot (``everstep/slots.py``):
memmove for contiguous CPU tensors, which releases the GIL and is twice as fast
as ``copy_``. DTensors save and load their local shard, so no rank ever gathers
anything.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import torch

from everstep.errors import CheckpointError, ConfigError, CorruptCheckpoint, EverstepError
from everstep.faults import RankFaults
from everstep.slots import SlotFile
from everstep.training.codec import Layout, decode, encode
from everstep.training.rng import RandomState

_RNG = "everstep.rng"
_STEP = "everstep.step"


@runtime_checkable
class Stateful(Protocol):
    """Anything with ``state_dict`` and ``load_state_dict``."""

    def state_dict(self) -> Any:
        """The state, as containers of tensors, numbers and strings."""

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Take over a state."""


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
        self, things: Mapping[str, Stateful], file: SlotFile | None, *, faults: RankFaults | None = None
    ) -> None:
        for name, thing in things.items():
            if not isinstance(thing, Stateful):
                raise ConfigError(
                    f"checkpoint({name}=…) got a {type(thing).__name__}, which has no state_dict and load_state_dict"
                )
        self._things = dict(things)
        self._file = file
        self._faults = faults
        self._layout: Layout | None = None

    @property
    def active(self) -> bool:
        """Whether saves happen: under everstep only."""
        return self._file is not None

    @property
    def things(self) -> Mapping[str, Stateful]:
        """What was given to ``Run.checkpoint``, by name."""
        return self._things

    def save(self, completed_steps: int) -> None:
        """Save the state after so many completed steps; returns when the slot is committed.

        Raises:
            CheckpointError: no room in shared memory, or a state that cannot be saved.
        """
        if self._file is None:
            return
        tree = {name: thing.state_dict() for name, thing in self._things.items()}
        tree |= {_RNG: RandomState().state_dict(), _STEP: completed_steps}
        encoded = encode(tree, self._layout)
        self._layout = encoded.layout
        base = self._file.begin(encoded.structure, encoded.layout.total_bytes)
        half = encoded.layout.total_bytes // 2 if self._faults else -1
        for tensor, spec in zip(encoded.tensors, encoded.layout.specs, strict=True):
            if tensor.is_cpu and tensor.is_contiguous():
                ctypes.memmove(base + spec.offset, tensor.data_ptr(), spec.nbytes)
            else:
                self._copy(tensor, base + spec.offset, spec.nbytes)
            if self._faults and 0 <= half <= spec.offset + spec.nbytes:
                half = -1
                self._faults.meet("save", completed_steps - 1)
        self._file.commit(completed_steps)

    def restore(self, completed_steps: int) -> None:
        """Load the state after so many completed steps and forget later ones.

        Raises:
            CheckpointError: this rank does not hold that step, or the state does not fit the given objects.
            CorruptCheckpoint: the slot is damaged.
        """
        if self._file is None:
            return
        payload = self._file.load(completed_steps)
        try:
            tree = decode(payload.structure, payload.tensors, self._meshes())
        except EverstepError:
            raise
        except Exception as error:
            raise CorruptCheckpoint(f"{self._file.path}: the state's structure cannot be read: {error}") from error
        rng, inside = tree.pop(_RNG, None), tree.pop(_STEP, None)
        if inside != completed_steps:
            raise CorruptCheckpoint(
                f"{self._file.path}: what is labelled as the state after step {completed_steps} says it is the one "
                f"after step {inside}. Start from another step, or from the beginning"
            )
        if tree.keys() != self._things.keys():
            raise CheckpointError(
                f"the checkpoint holds {', '.join(tree) or 'nothing'}, the script gives {', '.join(self._things)}: "
                "checkpoint() must get the same names as when it was saved"
            )
        for name, thing in self._things.items():
            self._load(name, thing, tree.pop(name))
        if rng is not None:
            RandomState().load_state_dict(rng)
        self._file.discard_after(completed_steps)

    def discard(self) -> None:
        """Forget every slot: the job starts from the beginning."""
        if self._file is not None:
            self._file.discard_after(-1)

    def drop_gradients(self) -> None:
        """Forget the gradients of the given models and optimizers."""
        for thing in self._things.values():
            if isinstance(thing, torch.nn.Module | torch.optim.Optimizer):
                thing.zero_grad(set_to_none=True)

    def close(self) -> None:
        """Give the mapping back; the file stays for the next generation."""
        if self._file is not None:
            self._file.close()

    def _load(self, name: str, thing: Stateful, state: Any) -> None:
        # Module.load_state_dict copies. Others, optimizers first of all, keep the given
        # tensors: given views of the slot, the next step would write into the checkpoint.
        if type(thing).load_state_dict is not torch.nn.Module.load_state_dict:
            state = _clone(state)
        try:
            thing.load_state_dict(state)
        except EverstepError:
            raise
        except Exception as error:
            raise CheckpointError(
                f"the saved state of {name!r} does not fit the script's {type(thing).__name__}: {error}"
            ) from error

    def _meshes(self) -> dict[Any, Any]:
        """Device meshes that the given models and optimizers use."""
        if "torch.distributed.tensor" not in sys.modules:
            return {}
        from everstep.training.dtensors import meshes_of

        tensors: list[torch.Tensor] = []
        for thing in self._things.values():
            if isinstance(thing, torch.nn.Module):
                tensors += [*thing.parameters(), *thing.buffers()]
            elif isinstance(thing, torch.optim.Optimizer):
                tensors += [parameter for group in thing.param_groups for parameter in group["params"]]
        return dict(meshes_of(tensors))

    @staticmethod
    def _copy(tensor: torch.Tensor, address: int, nbytes: int) -> None:
        """Copy a tensor that is not contiguous or not on the CPU into the slot."""
        if not nbytes:
            return
        raw = (ctypes.c_char * nbytes).from_address(address)
        view = torch.frombuffer(raw, dtype=torch.uint8).view(tensor.dtype).view(tensor.shape)
        view.copy_(tensor.detach())


def _clone(tree: Any) -> Any:
    """The same tree with tensors of its own."""
    if isinstance(tree, torch.Tensor):
        return tree.detach().clone()
    if isinstance(tree, dict):
        for key in tree:
            tree[key] = _clone(tree[key])
        return tree
    if isinstance(tree, list):
        return [_clone(item) for item in tree]
    if type(tree) is tuple:
        return tuple(_clone(item) for item in tree)
    return tree
