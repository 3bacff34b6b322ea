"""Notices that a module or an optimizer has the same tensors as before, in a time that hardly grows with their number.

``state_dict`` and the encoding of its result take some 20 us for each tensor of a model and its optimizer, in the
script's thread and at every save. Usually the tensors are the same from save to save, and only their contents change.
That is seen by comparing identities and addresses in loops that run in C. Only modules and optimizers whose
``state_dict`` is that of torch are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain, compress
from operator import attrgetter, is_, itemgetter, not_
from typing import Any

import torch
from torch import Tensor

_NUMBERS = {int, float, bool, str, type(None)}
_FSDP = "torch.distributed.fsdp._fully_shard."
_local = attrgetter("_local_tensor")
_parameters = itemgetter("params")


class Addresses:
    """The memory of some tensors."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        tensors = list(tensors)
        self.known = all(map(_is_plain, tensors))
        """Whether the memory of all tensors can be found quickly."""
        self._plain = [tensor for tensor in tensors if not hasattr(tensor, "_local_tensor")]
        self._sharded = [tensor for tensor in tensors if hasattr(tensor, "_local_tensor")]
        self._before = self._now() if self.known else []

    def same(self) -> bool:
        """Whether all tensors have the memory that they had."""
        return self._now() == self._before

    def _now(self) -> list[int]:
        return list(map(Tensor.data_ptr, chain(self._plain, map(_local, self._sharded))))


class SameModule:
    """Compares a module with what it was.

    Args:
        module: A module for which ``can_compare`` is true.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        modules = list(module.modules())
        self._tables: list[dict[str, Any]] = [
            table for one in modules for table in (one._parameters, one._buffers, one._modules)
        ]
        self._hooks = [(hook, one) for one in modules for hook in one._state_dict_pre_hooks.values()]
        self._entries = list(chain.from_iterable(map(dict.values, self._tables)))
        self._filled = list(filter(None, self._tables))
        self._addresses = Addresses(entry for entry in self._entries if isinstance(entry, Tensor))
        self.known = self._addresses.known

    @staticmethod
    def can_compare(module: torch.nn.Module) -> bool:
        """Whether the state dict of a module is that of torch, from its parameters and buffers alone."""
        plain = torch.nn.Module
        return all(
            type(one).state_dict is plain.state_dict
            and type(one)._save_to_state_dict is plain._save_to_state_dict
            and type(one).get_extra_state is plain.get_extra_state
            and not one._state_dict_hooks
            and all(
                str(getattr(hook, "__module__", "")).startswith(_FSDP) for hook in one._state_dict_pre_hooks.values()
            )
            for one in module.modules()
        )

    def same(self) -> list[Any] | None:
        """None: the module has other tensors than it had. Otherwise, its values that are not tensors: none."""
        for hook, module in self._hooks:
            hook(module, "", False)
        if sum(map(len, self._tables)) != len(self._entries):
            return None
        now = chain.from_iterable(map(dict.values, self._filled))
        return [] if all(map(is_, now, self._entries)) and self._addresses.same() else None

    def same_state(self) -> bool:
        """Whether the rest is the same, which need not be known before the copy; a module has no such rest."""
        return True

    def replaced(self, state: Any, leaf: Callable[[], Any]) -> Any:
        """The state dict, in which the results of ``leaf`` stand for the values of ``same``, in their order."""
        return state


class SameOptimizer:
    """Compares an optimizer with what it was.

    Its groups are compared in the script's thread. Its state has more tensors than the model, and only its steps change
    it, which wait for the copies. So the copying thread may compare it (``same_state``).

    Args:
        optimizer: An optimizer for which ``can_compare`` is true.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._trained = self._parameters()
        self._keys = list(optimizer.state)
        self._state = self._values()
        self._numbers = [type(value) in _NUMBERS for value in self._state]
        self._has_numbers = any(self._numbers)
        options = self._options()
        self._tensors = [isinstance(value, Tensor) for value in options]
        self._addresses = Addresses(value for value in self._state if isinstance(value, Tensor))
        self._of_options = Addresses(compress(options, self._tensors))
        self._rates = list(compress(options, self._tensors))
        kinds = all(
            isinstance(value, Tensor) or number for value, number in zip(self._state, self._numbers, strict=True)
        )
        self.known = self._addresses.known and self._of_options.known and kinds and self.same() is not None

    @staticmethod
    def can_compare(optimizer: torch.optim.Optimizer) -> bool:
        """Whether the state dict of an optimizer is that of torch, with tensors and numbers for each parameter."""
        kind: Any = type(optimizer)
        hooks = optimizer._optimizer_state_dict_pre_hooks or optimizer._optimizer_state_dict_post_hooks
        return (
            kind.state_dict is torch.optim.Optimizer.state_dict
            and not hooks
            and all(type(state) is dict for state in optimizer.state.values())
        )

    def same(self) -> list[Any] | None:
        """The numbers and texts of the optimizer, e.g. learning rates. None: its groups have other tensors."""
        options, trained = self._options(), self._parameters()
        alike = (
            len(self._optimizer.state) == len(self._keys)
            and len(options) == len(self._tensors)
            and len(trained) == len(self._trained)
            and all(map(is_, trained, self._trained))
            and all(map(is_, compress(options, self._tensors), self._rates))
            and self._of_options.same()
        )
        leaves = list(compress(options, map(not_, self._tensors)))
        kinds = set(map(type, leaves))
        if tuple in kinds:
            kinds |= set(map(type, chain.from_iterable(leaf for leaf in leaves if type(leaf) is tuple)))
        if not alike or not kinds - {tuple} <= _NUMBERS:
            return None
        if self._has_numbers:
            state = self._values()
            numbers = list(compress(state, self._numbers))
            if len(state) != len(self._state) or not set(map(type, numbers)) <= _NUMBERS:
                return None
            leaves = numbers + leaves
        return leaves

    def same_state(self) -> bool:
        """Whether the state has the tensors that it had, at the same addresses."""
        state = self._values() if self._has_numbers else None
        now = compress(state, map(not_, self._numbers)) if state is not None else self._chained()
        before = compress(self._state, map(not_, self._numbers)) if self._has_numbers else self._state
        count = sum(map(len, self._optimizer.state.values()))
        return (
            count == len(self._state)
            and all(map(is_, self._optimizer.state, self._keys))
            and all(map(is_, now, before))
            and self._addresses.same()
        )

    def replaced(self, state: Any, leaf: Callable[[], Any]) -> Any:
        """The state dict, in which the results of ``leaf`` stand for the values of ``same``, in their order."""

        def put(values: dict[str, Any]) -> dict[str, Any]:
            return {
                key: value if isinstance(value, Tensor) or key == "params" else leaf() for key, value in values.items()
            }

        return state | {
            "state": {key: put(values) for key, values in state["state"].items()},
            "param_groups": [put(group) for group in state["param_groups"]],
        }

    def _parameters(self) -> list[Tensor]:
        return list(chain.from_iterable(map(_parameters, self._optimizer.param_groups)))

    def _chained(self) -> Iterator[Any]:
        return chain.from_iterable(map(dict.values, self._optimizer.state.values()))

    def _values(self) -> list[Any]:
        """The values of the state, in the order of the state dict."""
        return list(self._chained())

    def _options(self) -> list[Any]:
        """The values of the groups, in the order of the state dict."""
        return [value for group in self._optimizer.param_groups for key, value in group.items() if key != "params"]


Same = SameModule | SameOptimizer


def comparison(thing: Any) -> Same | None:
    """A comparison of an object of ``Run.checkpoint``; None: it cannot be compared quickly."""
    same: Same | None = None
    if isinstance(thing, torch.nn.Module) and SameModule.can_compare(thing):
        same = SameModule(thing)
    elif isinstance(thing, torch.optim.Optimizer) and SameOptimizer.can_compare(thing):
        same = SameOptimizer(thing)
    return same if same is not None and same.known else None


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor has memory itself, or is a DTensor with a local shard that has it."""
    local = getattr(tensor, "_local_tensor", tensor)
    kind = type(local)
    return (kind is Tensor or kind is torch.nn.Parameter) and local.layout is torch.strided and not local.is_nested
