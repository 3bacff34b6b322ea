"""Loads the state of an optimizer as it was saved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer


def load_optimizer(optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    """Load the state of an optimizer, whose tensors keep the types and devices that they were saved with.

    ``Optimizer.load_state_dict`` of torch converts tensors to the type of their parameter, e.g. float32 moments of
    bfloat16 parameters to bfloat16, and loses precision silently. Optimizers with a method or hooks of their own are
    left alone.

    Args:
        optimizer: The optimizer.
        saved: Its ``state_dict``, whose tensors it may keep.
    """
    optimizer.load_state_dict(dict(saved))
    kind: Any = type(optimizer)
    hooks = optimizer._optimizer_load_state_dict_pre_hooks or optimizer._optimizer_load_state_dict_post_hooks
    if kind.load_state_dict is not Optimizer.load_state_dict or hooks:
        return
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, parameter in zip(numbers, parameters, strict=True):
        if number in saved["state"]:
            optimizer.state[parameter] = _as_saved(optimizer.state[parameter], saved["state"][number])


def _as_saved(loaded: Any, saved: Any) -> Any:
    """A loaded value, in which tensors of another type or device than the saved ones are replaced by those."""
    if isinstance(saved, Tensor):
        same = isinstance(loaded, Tensor) and (loaded.dtype, loaded.device.type) == (saved.dtype, saved.device.type)
        return loaded if same else saved
    if isinstance(saved, dict) and isinstance(loaded, dict):
        loaded.update({key: _as_saved(loaded[key], value) for key, value in saved.items() if key in loaded})
        return loaded
    if type(saved) in {list, tuple} and isinstance(loaded, Sequence) and len(loaded) == len(saved):
        return type(saved)(_as_saved(one, other) for one, other in zip(loaded, saved, strict=True))
    return loaded
