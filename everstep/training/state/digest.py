"""Computes the digest of a state. Two runs that are equal bit for bit have equal digests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy
import torch
import xxhash
from torch import Tensor

from everstep.training.state.layout import as_integers
from everstep.training.state.subclasses import is_wrapper, parts_of


def digest_of(state: Any) -> str:
    """The digest of a state dict, 16 hexadecimal digits, with this rank's shard of each DTensor.

    The order of a dict's keys does not matter, since a loaded state may have another order.

    Args:
        state: Tensors, arrays, containers, numbers and strings.
    """
    digest = xxhash.xxh3_64()
    for piece in _pieces(state):
        digest.update(piece)
    return digest.hexdigest()


def _pieces(value: Any) -> Iterator[bytes | memoryview]:
    if isinstance(value, Mapping):
        yield f"dict {len(value)} ".encode()
        for key in sorted(value, key=repr):
            yield f"{key!r} ".encode()
            yield from _pieces(value[key])
    elif isinstance(value, list | tuple):
        yield f"{type(value).__name__} {len(value)} ".encode()
        for item in value:
            yield from _pieces(item)
    elif isinstance(value, Tensor) and is_wrapper(value):
        for part in parts_of(value):
            yield from _pieces(part)
    elif isinstance(value, Tensor) and value.layout is not torch.strided:
        yield from _pieces(value.to_dense())
    elif isinstance(value, Tensor):
        plain = value.detach().resolve_conj().resolve_neg().cpu()
        yield f"{plain.dtype} {tuple(plain.shape)} ".encode()
        yield as_integers(plain).contiguous().reshape(-1).view(torch.uint8).numpy().data
    elif isinstance(value, numpy.ndarray):
        yield f"{value.dtype} {value.shape} ".encode()
        yield value.tobytes()
    else:
        yield f"{value!r} ".encode()
