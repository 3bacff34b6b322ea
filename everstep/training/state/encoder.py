"""Encodes the state of a script's objects at every save, and does it again only for what may have changed.

The tree of a state has two parts. The *kept* part has the modules and optimizers that are compared from save to save
(``same_tensors.py``). While they have the same tensors, their pickle, the table and the list of their ranges are used
again. The *fresh* part has all other objects, and the numbers of the optimizers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import Tensor

from everstep.training.state.codec import Encoded, FreshValue, pack_tree, pickle_tree
from everstep.training.state.layout import SlotLayout, StateTensors, storage_of
from everstep.training.state.same_tensors import Same, comparison


@dataclass(frozen=True, slots=True)
class _Kept:
    """What is used again."""

    number: int
    """Number of the encoding from which it is."""
    layout: SlotLayout
    pickled: bytes
    ranges: list[Tensor]
    """The ranges of the kept part."""
    of_modules: int
    """Number of ranges of modules, at the beginning."""
    tensors: int
    """Number of tensors of the kept part."""
    storages: frozenset[tuple[Any, int]]
    """The memory of these tensors."""


class StateEncoder:
    """Encodes the state of the objects of ``Run.checkpoint``.

    Args:
        things: The objects, by name.
    """

    def __init__(self, things: Mapping[str, Any]) -> None:
        self._things = things
        self._same: dict[str, Same] = {}
        """The objects of the kept part → their comparison."""
        self._leaves: list[Any] = []
        """The numbers and texts of the kept part."""
        self._number = 0
        self._kept: dict[bool, _Kept] = {}
        """Whether the state has gradients → what is used again for such states."""
        self.states: dict[str, Any] = {}
        """State dicts of the objects that are not in the kept part."""

    def look(self, *, completely: bool) -> bool:
        """Compare the objects with what they were; returns whether those of the kept part have the same tensors.

        Args:
            completely: Compare the state of optimizers too. Otherwise ``Encoded.same_state`` has to be asked.
        """
        same = self._compare() and not (completely and not self._same_state())
        if not same:
            self._same = {}
        self.states = {name: thing.state_dict() for name, thing in self._things.items() if name not in self._same}
        return same

    def encode(self, more: Mapping[str, Any], *, gradients: bool) -> Encoded:
        """Encode the state, after ``look``.

        Args:
            more: Further entries of the state, beside the objects.
            gradients: Whether they have gradients.

        Raises:
            CheckpointError: the state has an object that cannot be saved.
        """
        kept = self._kept.get(gradients)
        if self._same and kept is not None and kept.number == self._number:
            encoded = self._again(kept, self.states | dict(more))
            if encoded is not None:
                return encoded
        if not self._same:
            self._keep()
        return self._anew(more, gradients)

    def _compare(self) -> bool:
        self._leaves = []
        for same in self._same.values():
            values = same.same()
            if values is None:
                return False
            self._leaves += values
        return bool(self._same)

    def _same_state(self) -> bool:
        return all(same.same_state() for same in self._same.values())

    def _keep(self) -> None:
        """Choose the objects of the kept part."""
        self._number += 1
        modules_first = sorted(self._things.items(), key=lambda item: not isinstance(item[1], torch.nn.Module))
        self._same = {name: same for name, thing in modules_first if (same := comparison(thing)) is not None}
        if self._same and not self._compare():
            self._same = {}

    def _again(self, kept: _Kept, fresh: dict[str, Any]) -> Encoded | None:
        """Encode the fresh part only; None: its tensors have other forms, or share memory with the kept part."""
        state = StateTensors(kept.tensors)
        pickled = pickle_tree((fresh, self._leaves), state, fresh)
        fits = kept.layout.fits_from(kept.tensors, len(kept.ranges), state)
        if not fits or not kept.storages.isdisjoint(map(storage_of, state.tensors)):
            return None
        trees = pack_tree(kept.pickled, pickled)
        ranges = [*kept.ranges, *state.tensors]
        counts = len(kept.ranges), kept.of_modules
        return Encoded(ranges, kept.layout, trees, *counts, same=True, same_state=self._same_state)

    def _anew(self, more: Mapping[str, Any], gradients: bool) -> Encoded:
        tree = {
            name: self.states[name] if name in self.states else thing.state_dict()
            for name, thing in self._things.items()
        }
        numbers = count()
        kept = {name: same.replaced(tree[name], lambda: FreshValue(next(numbers))) for name, same in self._same.items()}
        fresh = {name: state for name, state in tree.items() if name not in kept} | dict(more)
        state = StateTensors()
        modules = {name: part for name, part in kept.items() if isinstance(self._things[name], torch.nn.Module)}
        pickle_tree(modules, first := StateTensors())
        pickled = pickle_tree(kept, state)
        tensors = len(state.tensors)
        trees = pack_tree(pickled, pickle_tree((fresh, self._leaves), state, fresh))
        last = self._kept.get(gradients)
        layout = last.layout if last is not None and last.layout.fits(state) else SlotLayout(state)
        ranges = layout.ranges(state.tensors)
        own, of_modules = layout.ranges_before(tensors), layout.ranges_before(len(first.tensors))
        storages = frozenset(map(storage_of, state.tensors[:tensors]))
        self._kept[gradients] = _Kept(self._number, layout, pickled, ranges[:own], of_modules, tensors, storages)
        return Encoded(ranges, layout, trees, own, of_modules)
