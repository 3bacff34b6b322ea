"""The state of every random number generator that a training step may use."""

from __future__ import annotations

import random
from typing import Any

import numpy
import torch
import xxhash


class RandomState:
    """torch (CPU, and the current CUDA device once it is in use), numpy and ``random``, as one state dict."""

    def state_dict(self) -> dict[str, Any]:
        """The generators' states now."""
        version, words, gauss = random.getstate()
        state: dict[str, Any] = {
            "torch": torch.get_rng_state(),
            "numpy": numpy.random.get_state(legacy=False),
            # As an array: 625 separate integers would make up most of the structure.
            "python": (version, numpy.array(words, dtype=numpy.int64), gauss),
        }
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            state["cuda"] = torch.cuda.get_rng_state()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the generators."""
        torch.set_rng_state(state["torch"])
        numpy.random.set_state(state["numpy"])
        version, words, gauss = state["python"]
        random.setstate((version, tuple(words.tolist()), gauss))
        if "cuda" in state:
            torch.cuda.set_rng_state(state["cuda"])


def reseeded(state: dict[str, Any], rank: int) -> dict[str, Any]:
    """A state of generators that is another one for every rank, and the same each time.

    Args:
        state: From ``RandomState.state_dict``; it decides the seed along with ``rank``.
        rank: Of whom.
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
    return fresh
