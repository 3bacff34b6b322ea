"""Gradients that live across bodies, and their part in the state between two steps.

A body may end without an optimizer step (gradients are accumulated over several bodies) or with one. A gradient in
``.grad`` then is either *pending*: a later step will use it; or *used*: a step used it, and the script drops it when
the next body begins. Pending gradients are saved. Saving used gradients would be a waste, and the most common loop
leaves them behind (``zero_grad``, backward, ``step``), so they are left out, and the next step is checked: if it sees a
gradient in the very tensor that was left out, the script did not drop it. Then the saves without it are given up, and
from then on all gradients are saved.

A save says which gradients it leaves out. A run that restores it has placeholders for them, and ends with an error if
its first step uses a placeholder, instead of going on from half a state.

Which gradients are used is known from torch's hook behind ``optimizer.step``, and the version counters of the
gradients: whatever changes one after the step (a backward pass, ``zero_grad(set_to_none=False)``) makes it pending.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from everstep.errors import CheckpointError

USED = "_everstep_used"
"""Attribute of a gradient: its version when an optimizer had used it."""
LEFT = "_everstep_left"
"""Attribute of a gradient: the first save that left it out; ``PLACEHOLDER``: it replaces such a gradient."""
PLACEHOLDER = -1
WHAT_TO_DO = (
    "Let each body of run.steps() be a whole optimizer step, with the loop over its micro-batches inside, and count "
    "optimizer steps"
)


class Gradients:
    """The gradients of models and optimizers, from body to body.

    Args:
        things: The objects given to ``Run.checkpoint``, by name.
        give_up: Called with a number of completed steps: states after so many or more must not be restored.
    """

    def __init__(self, things: Mapping[str, Any], give_up: Callable[[int], None]) -> None:
        self._things = things
        self._give_up = give_up
        self._keep_all = False
        """Used gradients were used again: nothing is left out any more."""
        self._accumulates = False
        """A body ended with pending gradients."""
        self._left: set[int] = set()
        """Parameters whose gradients the last save left out, by id."""
        self._scales: dict[str, float] = {}
        """GradScaler → its scale after the last save, or when the loop began."""
        self._resumed_from = 0
        self._watched: list[RemovableHandle] = []
        # A compiled step calls hooks as they are.
        before = torch.compiler.disable(self._before_step)  # type: ignore[no-untyped-call]
        after = torch.compiler.disable(self._after_step)  # type: ignore[no-untyped-call]
        self._hooks = [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]

    def begin(self) -> None:
        """Begin the loop with the objects as they are now: a scaler whose scale falls from here on skipped a step."""
        self._scales = {name: scaler.get_scale() for name, scaler in self._scalers()}

    def close(self) -> None:
        """Remove all hooks."""
        for handle in (*self._hooks, *self._watched):
            handle.remove()

    def state_dict(self, completed_steps: int, tree: Mapping[str, Any]) -> dict[str, Any]:
        """The gradients that a save after so many steps has to contain; empty: none.

        Args:
            completed_steps: The label of the save.
            tree: The states of the objects.

        Raises:
            CheckpointError: gradients are pending that cannot be saved.
        """
        parameters = [(name, parameter, parameter.grad) for name, parameter in self._parameters()]
        present = [(name, parameter, grad) for name, parameter, grad in parameters if grad is not None]
        if self._left:
            # No step need have used what was left out, but a backward pass may have added to it.
            for _, parameter, grad in parameters:
                self._judge(parameter, grad is None or not _is_used(grad))
        skipped = self._step_was_skipped(tree) and not self._accumulates
        pending = [entry for entry in present if self._keep_all or not (skipped or _is_used(entry[2]))]
        self._refuse_unsaved(pending)
        self._accumulates |= bool(pending)
        saved = {id(parameter) for _, parameter, _ in pending}
        left = [(parameter, grad) for _, parameter, grad in present if id(parameter) not in saved]
        self._leave_out(left, completed_steps)
        state: dict[str, Any] = {"all": True} if self._keep_all else {}
        if pending:
            state["tensors"] = {name: grad for name, _, grad in pending}
            if strides := {name: turned for name, _, grad in pending if (turned := _turned(grad))}:
                state["strides"] = strides
        if left:
            state["left_out"] = bytes(id(parameter) in self._left for _, parameter, _ in parameters)
        return state

    def load_state_dict(self, state: Mapping[str, Any], completed_steps: int) -> None:
        """Set all gradients as they were after so many steps.

        Raises:
            CheckpointError: they do not fit the parameters.
        """
        tensors, strides = dict(state.get("tensors", {})), state.get("strides", {})
        left_out = state.get("left_out", b"")
        for number, (name, parameter) in enumerate(self._parameters()):
            grad = tensors.pop(name, None)
            try:
                parameter.grad = None if grad is None else _laid_out(grad, strides.get(name))
                if any(left_out[number : number + 1]):
                    parameter.grad = placeholder = torch.zeros_like(parameter, requires_grad=False)
                    setattr(placeholder, LEFT, PLACEHOLDER)
                    setattr(placeholder, USED, _version(placeholder))
            except Exception as error:
                raise CheckpointError(f"the saved gradient of {name} does not fit the parameter: {error}") from error
        if tensors:
            raise CheckpointError(
                f"the checkpoint holds a gradient of {next(iter(tensors))}, which the script does not have"
            )
        self._left = {id(parameter) for _, parameter in self._parameters() if hasattr(parameter.grad, LEFT)}
        self._accumulates, self._keep_all = bool(state.get("tensors")), bool(state.get("all"))
        self._resumed_from = completed_steps
        self.begin()

    def _leave_out(self, left: Sequence[tuple[Tensor, Tensor]], completed_steps: int) -> None:
        while self._watched:
            self._watched.pop().remove()
        self._left = {id(parameter) for parameter, _ in left}
        for parameter, grad in left:
            if not hasattr(grad, LEFT):
                setattr(grad, LEFT, completed_steps)
            if grad._is_view() and parameter.requires_grad:
                # A view of a bucket of DDP is the same tensor again after it was dropped: look before it is.
                self._watched.append(parameter.register_hook(self._looking_at(parameter)))  # type: ignore[no-untyped-call]

    def _looking_at(self, parameter: Tensor) -> Callable[[Tensor], None]:
        def before_accumulation(_: Tensor) -> None:
            if parameter.grad is None:
                self._judge(parameter, used=True)

        return before_accumulation

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Check whether a step uses gradients that were left out, unless its closure may drop them first."""
        if self._left and len(args) < 2 and not kwargs.get("closure"):
            self._judge_all(optimizer)

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._left:
            self._judge_all(optimizer)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                grad = parameter.grad
                if grad is not None:
                    setattr(grad, USED, _version(grad))

    def _judge_all(self, optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                self._judge(parameter, used=True)

    def _judge(self, parameter: Tensor, used: bool) -> None:
        """Check whether a gradient that was left out is still there and is used again."""
        if id(parameter) not in self._left:
            return
        since = getattr(parameter.grad, LEFT, None)
        if since is None:
            self._left.discard(id(parameter))
        elif used:
            self._used_again(since)

    def _used_again(self, since: int) -> None:
        """React to gradients that were left out and are used again."""
        if since == PLACEHOLDER:
            raise CheckpointError(
                f"the state after step {self._resumed_from}, from which this run went on, lacks gradients that the "
                "script uses again after optimizer.step(): start from an older step, or from the beginning"
            )
        self._left.clear()
        self._keep_all = True
        self._give_up(since)
        warnings.warn(
            "everstep: gradients that optimizer.step() had used were not dropped (set to None) before the next step. "
            f"States saved without them, from step {since} on, are not kept; from now on all gradients are saved. "
            "zero_grad() with set_to_none=True, which is the default, makes that unnecessary",
            RuntimeWarning,
            stacklevel=3,
        )

    def _step_was_skipped(self, tree: Mapping[str, Any]) -> bool:
        """Whether a GradScaler saw infinities since the last save, and so skipped the step."""
        before = self._scales
        self._scales = {name: tree[name]["scale"] for name, _ in self._scalers() if "scale" in tree[name]}
        return any(scale < before.get(name, scale) for name, scale in self._scales.items())

    def _scalers(self) -> Iterator[tuple[str, torch.amp.GradScaler]]:
        """GradScalers that are enabled; the state of a disabled one is empty."""
        for name, thing in self._things.items():
            if isinstance(thing, torch.amp.GradScaler) and thing.is_enabled():
                yield name, thing

    def _parameters(self) -> Iterator[tuple[str, Tensor]]:
        """All parameters of the models and optimizers, each once, by names that are the same in each run."""
        seen: set[int] = set()
        for thing_name, thing in self._things.items():
            for name, parameter in _parameters_of(thing):
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield f"{thing_name}.{name}", parameter

    def _refuse_unsaved(self, pending: Iterable[tuple[str, Tensor, Tensor]]) -> None:
        reason = next((f"{name} has {why}" for name, _, grad in pending if (why := _not_plain(grad))), "")
        if "torch.distributed.fsdp" in sys.modules and not reason:
            modules = [thing for thing in self._things.values() if isinstance(thing, torch.nn.Module)]
            reason = next((why for module in modules if (why := _kept_by_fsdp(module, bool(pending)))), "")
        if reason:
            raise CheckpointError(
                f"the body of a step ended with gradients that a later optimizer.step() will use and that cannot be "
                f"saved: {reason}. {WHAT_TO_DO}"
            )


def _is_used(grad: Tensor) -> bool:
    return getattr(grad, USED, None) == _version(grad)


def _version(grad: Tensor) -> int:
    """Grows with each change; FSDP2 changes the local shard, which has a counter of its own."""
    return grad._version if type(grad) is Tensor else grad._version + getattr(grad, "_local_tensor", grad)._version


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


def _not_plain(grad: Tensor) -> str:
    """Why a gradient cannot be saved; empty: it can."""
    local = getattr(grad, "_local_tensor", grad)
    if local.layout is not torch.strided or hasattr(type(local), "__tensor_flatten__"):
        return f"a gradient that is a {local.layout} {type(local).__name__}"
    return ""


def _kept_by_fsdp(model: torch.nn.Module, pending: bool) -> str:
    """Gradients that FSDP keeps where they cannot be restored, as a text; empty: none."""
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    for name, module in model.named_modules():
        if pending and isinstance(module, FullyShardedDataParallel):
            return "FSDP1 keeps gradients in a form of its own"
        if not isinstance(module, FSDPModule):
            continue
        state: Any = module._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
        for group in filter(None, groups):
            unsharded = any(_unsharded(parameter) for parameter in group.fsdp_params)
            if unsharded or getattr(group, "_partial_reduce_output", None) is not None:
                where = f" of {name}" if name else ""
                return f"FSDP2 has not reduced those{where} yet (set_requires_gradient_sync or set_requires_all_reduce)"
    return ""


def _unsharded(parameter: Any) -> bool:
    leaf = getattr(parameter, "_unsharded_param", None)
    accumulated = getattr(parameter, "unsharded_accumulated_grad", None)
    return accumulated is not None or getattr(leaf, "grad", None) is not None


def _turned(grad: Tensor) -> list[int]:
    """Strides of a gradient whose order in memory is not that of its shape; empty otherwise.

    The order in memory decides in which order torch sums the norm.
    """
    local = getattr(grad, "_local_tensor", grad)
    return [] if local.is_contiguous() else list(local.stride())


def _laid_out(grad: Tensor, strides: list[int] | None) -> Tensor:
    """The gradient in its former order in memory."""
    local = getattr(grad, "_local_tensor", grad)
    if strides is None:
        return grad
    turned = torch.empty_strided(local.shape, strides, dtype=local.dtype, device=local.device).copy_(local)
    if local is grad:
        return turned
    from torch.distributed.tensor import DTensor

    assert isinstance(grad, DTensor)
    return DTensor.from_local(
        turned, grad.device_mesh, grad.placements, run_check=False, shape=grad.shape, stride=grad.stride()
    )
