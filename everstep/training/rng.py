"""Saves and restores every random number generator that a training step may use."""

from __future__ import annotations

import ctypes
import random
import struct
from collections.abc import Callable
from typing import Any

import numpy
import torch
import xxhash

from everstep.training.copies.cuda import Cuda, TorchCuda

_WORDS = struct.Struct("<625I")
"""The words of a state of ``random``; separate integers would make up most of the structure."""
_MT19937_BYTES = 625 * 4
"""Bytes of the memory of numpy's usual generator: its words, and its position in them."""


class RandomState:
    """The generators of torch (CPU, and each CUDA device in use), numpy and ``random``, as one state dict.

    Args:
        cuda: The calls to CUDA; None: those of torch.
    """

    def __init__(self, cuda: Cuda | None = None) -> None:
        self._cuda: Cuda = cuda or TorchCuda()
        self._last: dict[str, tuple[Any, Any]] = {}
        """Generator → its memory at the last call, and its state then."""

    def state_dict(self) -> dict[str, Any]:
        """The generators' states now."""
        state: dict[str, Any] = {
            "torch": torch.get_rng_state(),
            "numpy": self._same_or("numpy", _numpy_memory(), _numpy_state),
            "python": self._same_or("python", _python_memory(), lambda: _packed(random.getstate())),
        }
        if devices := self._cuda.in_use():
            current = self._cuda.current_device()
            state["cuda"] = self._cuda.random_state(current)
            # A script that names its device in each call may use other devices than the current one.
            state["cuda_others"] = {index: self._cuda.random_state(index) for index in devices if index != current}
        return state

    def _same_or(self, name: str, memory: Any, state: Callable[[], Any]) -> Any:
        """The state of a generator: that of the last call, if the generator has the same memory.

        Many steps use neither numpy's generator nor that of ``random``, and their states take 0.2 ms. So it is worth to
        compare.

        Args:
            name: Name of the generator.
            memory: Everything that its state depends on; None: it is not known.
            state: Gets the state.
        """
        if memory is None or name not in self._last or self._last[name][0] != memory:
            self._last[name] = memory, state()
        return self._last[name][1]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the generators."""
        torch.set_rng_state(state["torch"])
        numpy.random.set_state(_with_array(state["numpy"]))
        version, words, gauss = state["python"]
        random.setstate((version, _WORDS.unpack(words), gauss))
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
    fresh: dict[str, Any] = {
        "torch": torch.Generator().manual_seed(seed).get_state(),
        "numpy": _with_bytes(numpy.random.RandomState(seed % 2**32).get_state(legacy=False)),
        "python": _packed(random.Random(seed).getstate()),
    }
    if "cuda" in state:
        fresh["cuda"] = torch.Generator("cuda").manual_seed(seed).get_state()
        fresh["cuda_others"] = dict.fromkeys(state.get("cuda_others", {}), fresh["cuda"])
    return fresh


def _packed(state: tuple[Any, ...]) -> tuple[int, bytes, float | None]:
    version, words, gauss = state
    return version, _WORDS.pack(*words), gauss


def _with_bytes(state: dict[str, Any]) -> dict[str, Any]:
    """A state of numpy's usual generator with bytes for its words, which are encoded faster than an array."""
    if state["bit_generator"] != "MT19937":
        return state
    return state | {"state": state["state"] | {"key": state["state"]["key"].tobytes()}}


def _with_array(state: dict[str, Any]) -> dict[str, Any]:
    if state["bit_generator"] != "MT19937":
        return state
    return state | {"state": state["state"] | {"key": numpy.frombuffer(state["state"]["key"], numpy.uint32)}}


def _numpy_state() -> dict[str, Any]:
    return _with_bytes(numpy.random.get_state(legacy=False))


def _numpy_memory() -> tuple[bytes, bytes] | None:
    """The memory of numpy's global generator; None: its bits come from another generator than usual."""
    generator: Any = numpy.random.mtrand._rand
    bits = generator._bit_generator
    if type(bits) is not numpy.random.MT19937:
        return None
    # The object has the second number of a pair of normal ones, which is kept for the next call.
    return _memory_of(generator), ctypes.string_at(bits.ctypes.state_address, _MT19937_BYTES)


def _python_memory() -> tuple[bytes, Any]:
    """The memory of the generator of ``random``, and the normal number that it keeps for the next call."""
    generator: Any = random._inst
    return _memory_of(generator), generator.gauss_next


def _memory_of(thing: object) -> bytes:
    """The memory of an object, without its header, whose count of references changes."""
    header = object.__basicsize__
    return ctypes.string_at(id(thing) + header, type(thing).__basicsize__ - header)
