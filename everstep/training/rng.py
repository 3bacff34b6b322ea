"""Saves and restores every random number generator that a training step may use."""

from __future__ import annotations

import random
from typing import Any

import numpy
import torch
import xxhash

from everstep.training.cuda import Cuda, TorchCuda


class RandomState:
    """The generators of torch (CPU, and each CUDA device in use), numpy and ``random``, as one state dict.

    Args:
        cuda: The calls to CUDA; None: those of torch.
    """

    def __init__(self, cuda: Cuda | None = None) -> None:
        self._cuda: Cuda = cuda or TorchCuda()

    def state_dict(self) -> dict[str, Any]:
        """The generators' states now."""
        version, words, gauss = random.getstate()
        state: dict[str, Any] = {
            "torch": torch.get_rng_state(),
            "numpy": numpy.random.get_state(legacy=False),
            # An array, since 625 separate integers would make up most of the structure.
            "python": (version, numpy.array(words, dtype=numpy.int64), gauss),
        }
        if devices := self._cuda.in_use():
            current = self._cuda.current_device()
            state["cuda"] = self._cuda.random_state(current)
            # A script that names its device in each call may use other devices than the current one.
            state["cuda_others"] = {index: self._cuda.random_state(index) for index in devices if index != current}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the generators."""
        torch.set_rng_state(state["torch"])
        numpy.random.set_state(state["numpy"])
        version, words, gauss = state["python"]
        random.setstate((version, tuple(words.tolist()), gauss))
        if "cuda" in state:
            self._cuda.set_random_state(self._cuda.current_device(), state["cuda"])
        for index, generator in state.get("cuda_others", {}).items():
            self._cuda.set_random_state(index, generator)


def reseeded(state: dict[str, Any], rank: int) -> dict[str, Any]:
    """States of generators that differ between ranks, and are the same for the same arguments.

    Args:
        state: The state from ``RandomState.state_dict`` that decides the seed, together with ``rank``.
        rank: The rank that gets the new state.
    """
    seed = xxhash.xxh3_64_intdigest(state["torch"].numpy(), seed=rank)
    version, words, gauss = random.Random(seed).getstate()
    fresh: dict[str, Any] = {
        "torch": torch.Generator().manual_seed(seed).get_state(),
        "numpy": numpy.random.RandomState(seed % 2**32).get_state(legacy=False),
        "python": (version, numpy.array(words, dtype=numpy.int64), gauss),
    }
    if "cuda" in state:
        fresh["cuda"] = torch.Generator("cuda").manual_seed(seed).get_state()
        fresh["cuda_others"] = dict.fromkeys(state.get("cuda_others", {}), fresh["cuda"])
    return fresh
