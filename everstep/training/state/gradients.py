"""Decides which gradients are part of the state between two steps, and saves and restores them.

At the end of a body, a gradient in ``.grad`` is either *pending* or *used*. It is pending if a later ``optimizer.step``
will use it. It is used if a step has used it and the script will drop it in the next body. Pending gradients exist when
a script accumulates gradients over several bodies; they are saved. Used gradients remain after the most common loop
(``zero_grad``, backward, ``step``). Saving them would be a waste, so they are left out, and the next step is checked:
if it uses a tensor that was left out, the script did not drop it. Then the saves without it are given up, and all
gradients are saved from then on.

A save lists the gradients that it leaves out. A run that restores such a save has placeholders for these gradients. If
the first step of the run uses a placeholder, the run ends with an error, since the restored state was incomplete.

A hook after ``optimizer.step`` marks gradients as used, with their version counters. A change after the step, by a
backward pass or ``zero_grad(set_to_none=False)``, makes a gradient pending.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, compress, count, repeat
from operator import attrgetter, eq, gt, is_not, itemgetter, not_
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from everstep.errors import CheckpointError
from everstep.training.state.subclasses import parts_of

USED = "_everstep_used_"
"""Beginning of an attribute of a gradient: its version when an optimizer last used it. A number follows, so that the
hooks of two checkpoints do not take each other's marks for their own."""
_NUMBERS = count()
PLACEHOLDER = -1
"""In place of the number of a save: the gradient of a restored run that replaces one which was left out."""
_grad = attrgetter("grad")
_is_some = partial(is_not, None)
_consume = deque[Any](maxlen=0).extend
"""Runs an iterator to its end. Such loops run in C, since a model may have thousands of parameters."""
WHAT_TO_DO = (
    "Let each body of run.steps() be a complete optimizer step, with the loop over its micro-batches inside, and count "
    "optimizer steps"
)


class Gradients:
    """The gradients of models and optimizers, from body to body.

    Args:
        things: The objects of ``Run.checkpoint``, by name.
        give_up: Called with a number of completed steps; states after this number or more must not be restored.
    """

    def __init__(self, things: Mapping[str, Any], give_up: Callable[[int], None]) -> None:
        self._things = things
        self._give_up = give_up
        self._mark = f"{USED}{next(_NUMBERS)}"
        self._keep_all = False
        """Whether all gradients are saved, since the script used a gradient again that was left out."""
        self._accumulates = False
        """Whether a body has ended with pending gradients."""
        self._names: list[str] = []
        self._every: list[Tensor] = []
        """All parameters as at the last save, with their names and ids."""
        self._ids: list[int] = []
        self._left: dict[int, int] = {}
        """Id of a parameter whose gradient the last save left out → the first save that left this gradient out, or
        ``PLACEHOLDER``."""
        self._scales: dict[str, float] = {}
        """GradScaler → its scale after the last save, or when the loop began."""
        self._resumed_from = 0
        self._watched: list[RemovableHandle] = []
        # A compiled step calls these hooks without compiling them.
        before = torch.compiler.disable(self._before_step)  # type: ignore[no-untyped-call]
        after = torch.compiler.disable(self._after_step)  # type: ignore[no-untyped-call]
        self._hooks = [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]

    def begin(self) -> None:
        """Begin the loop: remember the scales of the scalers, whose decrease shows that a step was skipped."""
        self._scales = {name: scaler.get_scale() for name, scaler in self._scalers()}

    def close(self) -> None:
        """Remove all hooks."""
        for handle in (*self._hooks, *self._watched):
            handle.remove()

    def state_dict(self, completed_steps: int, states: Mapping[str, Any], *, same_parameters: bool) -> dict[str, Any]:
        """The gradients of a save; empty: it needs none.

        Args:
            completed_steps: The completed steps of the save.
            states: The states of the objects that are neither modules nor optimizers, at least.
            same_parameters: Whether models and optimizers have the same parameters as at the last save.

        Raises:
            CheckpointError: there are pending gradients that cannot be saved.
        """
        if not same_parameters or not self._names:
            named = list(self._parameters())
            self._names, self._every = [name for name, _ in named], [parameter for _, parameter in named]
            self._ids = list(map(id, self._every))
        parameters, grads = self._every, list(map(_grad, self._every))
        used = self._are_used(grads)
        if self._left:
            # A backward pass may have added to a gradient that was left out, even if no step used it.
            self._judge(parameters, map(not_, used))
        if all(used) and not self._keep_all and not self._accumulates:  # the usual case, which has to be quick
            self._step_was_skipped(states)
            self._refuse_unsaved(False)
            self._leave_out(parameters, self._ids, grads, completed_steps)
            return {"left_out": b"\1" * len(grads)} if grads else {}
        present = list(map(_is_some, grads))
        skipped = self._step_was_skipped(states) and not self._accumulates
        if self._keep_all:
            saved = present
        elif skipped or present == used:
            saved = [False] * len(grads)
        else:
            saved = list(map(gt, present, used))
        pending = {self._names[number]: grads[number] for number in compress(count(), saved)}
        self._refuse_unsaved(bool(pending))
        self._accumulates |= bool(pending)
        left_out = list(map(gt, present, saved)) if pending else present
        self._leave_out(
            list(compress(parameters, left_out)),
            list(compress(self._ids, left_out)),
            list(compress(grads, left_out)),
            completed_steps,
        )
        state: dict[str, Any] = {"all": True} if self._keep_all else {}
        if pending:
            state["tensors"] = pending
        if self._left:
            state["left_out"] = bytes(left_out)
        return state

    def load_state_dict(self, state: Mapping[str, Any], completed_steps: int) -> None:
        """Set all gradients to those of a save after a number of completed steps.

        Raises:
            CheckpointError: they do not fit the parameters.
        """
        tensors = dict(state.get("tensors", {}))
        left_out = state.get("left_out", b"")
        left: dict[int, int] = {}
        for number, (name, parameter) in enumerate(self._parameters()):
            grad = tensors.pop(name, None)
            try:
                parameter.grad = grad
                if any(left_out[number : number + 1]):
                    parameter.grad = placeholder = _placeholder(parameter)
                    setattr(placeholder, self._mark, _version(placeholder))
                    left[id(parameter)] = PLACEHOLDER
            except Exception as error:
                raise CheckpointError(f"the saved gradient of {name} does not fit the parameter: {error}") from error
        if tensors:
            raise CheckpointError(
                f"the checkpoint has a gradient of {next(iter(tensors))}, which the script does not have"
            )
        self._left = left
        self._accumulates, self._keep_all = bool(state.get("tensors")), bool(state.get("all"))
        self._resumed_from = completed_steps
        self.begin()

    def _are_used(self, grads: Sequence[Any]) -> list[bool]:
        """For each gradient, whether it is as an optimizer's step has used it."""
        return list(map(eq, map(getattr, grads, repeat(self._mark), repeat(None)), _versions(grads)))

    def _leave_out(
        self, parameters: Sequence[Tensor], ids: Sequence[int], grads: Sequence[Any], completed_steps: int
    ) -> None:
        while self._watched:
            self._watched.pop().remove()
        before, self._left = self._left, dict.fromkeys(ids, completed_steps)
        self._left |= {key: since for key, since in before.items() if key in self._left}
        if not torch.distributed.is_initialized():
            return
        for parameter in compress(parameters, map(Tensor._is_view, grads)):
            if parameter.requires_grad:
                # After a drop, DDP sets the same view of its bucket again, so the drop has to be noticed before that.
                self._watched.append(parameter.register_hook(self._drop_noticer(parameter)))  # type: ignore[no-untyped-call]

    def _drop_noticer(self, parameter: Tensor) -> Callable[[Tensor], None]:
        def before_accumulation(_: Tensor) -> None:
            if parameter.grad is None:
                self._judge([parameter], [True])

        return before_accumulation

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Check whether a step uses gradients that were left out, unless its closure may drop them first."""
        if self._left and len(args) < 2 and not kwargs.get("closure"):
            self._judge(_trained(optimizer))

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        parameters = _trained(optimizer)
        if self._left:
            self._judge(parameters)
        grads = list(filter(_is_some, map(_grad, parameters)))
        _consume(map(setattr, grads, repeat(self._mark), _versions(grads)))

    def _judge(self, parameters: Sequence[Tensor], used: Iterable[bool] = repeat(True)) -> None:
        """React if gradients that were left out were not dropped and are used again."""
        marks = list(map(getattr, map(_grad, parameters), repeat(self._mark), repeat(None)))
        if not any(map(_is_some, marks)):  # all of them were dropped
            _consume(map(self._left.pop, map(id, parameters), repeat(0)))
            return
        for parameter, mark, is_used in zip(parameters, marks, used, strict=False):
            if id(parameter) in self._left:
                if mark is None:
                    del self._left[id(parameter)]
                elif is_used:
                    self._used_again(self._left[id(parameter)])

    def _used_again(self, since: int) -> None:
        """Give up the saves that lack gradients which are used again, from the save ``since`` on."""
        if since == PLACEHOLDER:
            raise CheckpointError(
                f"the state after step {self._resumed_from}, from which this run resumed, lacks gradients that the "
                "script uses again after optimizer.step(): start from an older step, or from the beginning"
            )
        self._left.clear()
        self._keep_all = True
        self._give_up(since)
        warnings.warn(
            "everstep: gradients that optimizer.step() had used were not dropped (set to None) before the next step. "
            f"States saved without them, from step {since} on, are not kept; from now on all gradients are saved. "
            "To avoid that, call zero_grad() with set_to_none=True, which is the default",
            RuntimeWarning,
            stacklevel=3,
        )

    def _step_was_skipped(self, states: Mapping[str, Any]) -> bool:
        """Whether a GradScaler saw infinities since the last save, and so skipped the step."""
        before = self._scales
        self._scales = {name: states[name]["scale"] for name, _ in self._scalers() if "scale" in states[name]}
        return any(scale < before.get(name, scale) for name, scale in self._scales.items())

    def _scalers(self) -> Iterator[tuple[str, torch.amp.GradScaler]]:
        """The enabled GradScalers; the state of a disabled one is empty."""
        for name, thing in self._things.items():
            if isinstance(thing, torch.amp.GradScaler) and thing.is_enabled():
                yield name, thing

    def _parameters(self) -> Iterator[tuple[str, Tensor]]:
        """All parameters of the models and optimizers, each once, with names that are equal in all runs."""
        seen: set[int] = set()
        for thing_name, thing in self._things.items():
            for name, parameter in _parameters_of(thing):
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield f"{thing_name}.{name}", parameter

    def _refuse_unsaved(self, pending: bool) -> None:
        if "torch.distributed.fsdp" not in sys.modules:
            return
        modules = [thing for thing in self._things.values() if isinstance(thing, torch.nn.Module)]
        if reason := next((why for module in modules if (why := _kept_by_fsdp(module, pending))), ""):
            raise CheckpointError(
                f"the body of a step ended with gradients that a later optimizer.step() will use, but they cannot be "
                f"saved: {reason}. {WHAT_TO_DO}"
            )


def _versions(grads: Sequence[Any]) -> list[int]:
    """Counters that grow with each change of a gradient; -1 where there is none."""
    if set(map(type, grads)) <= {Tensor}:
        return list(map(attrgetter("_version"), grads))
    return [-1 if grad is None else _version(grad) for grad in grads]


def _trained(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return list(chain.from_iterable(map(itemgetter("params"), optimizer.param_groups)))


def _version(grad: Tensor) -> int:
    """A counter that grows with each change of a gradient; FSDP2 changes the local shard, which has its own counter."""
    return grad._version if type(grad) is Tensor else grad._version + sum(part._version for part in parts_of(grad))


def _parameters_of(thing: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(thing, torch.nn.Module):
        for path, module in thing.named_modules():
            for key, parameter in module._parameters.items():
                if parameter is not None:
                    yield f"{path}.{key}" if path else key, parameter
    elif isinstance(thing, torch.optim.Optimizer):
        for number, group in enumerate(thing.param_groups):
            for index, parameter in enumerate(group["params"]):
                yield f"{number}.{index}", parameter


def _kept_by_fsdp(model: torch.nn.Module, pending: bool) -> str:
    """Why gradients that FSDP keeps cannot be saved; empty: they can be saved."""
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    for name, module in model.named_modules():
        if pending and isinstance(module, FullyShardedDataParallel):
            return "FSDP1 keeps gradients in its own form"
        if not isinstance(module, FSDPModule):
            continue
        state: Any = module._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
        for group in filter(None, groups):
            unsharded = any(_unsharded(parameter) for parameter in group.fsdp_params)
            if unsharded or getattr(group, "_partial_reduce_output", None) is not None:
                module_name = f" of {name}" if name else ""
                return (
                    f"FSDP2 has not reduced the gradients{module_name} yet (set_requires_gradient_sync or "
                    "set_requires_all_reduce)"
                )
    return ""


def _unsharded(parameter: Any) -> bool:
    leaf = getattr(parameter, "_unsharded_param", None)
    accumulated = getattr(parameter, "unsharded_accumulated_grad", None)
    return accumulated is not None or getattr(leaf, "grad", None) is not None


def _placeholder(parameter: Tensor) -> Tensor:
    """A gradient of NaN, so that a script which reads a gradient that was left out does not train on silently."""
    placeholder = torch.zeros_like(parameter, requires_grad=False)
    for part in parts_of(placeholder):
        if part.is_floating_point() or part.is_complex():
            part.fill_(math.nan)
    return placeholder
