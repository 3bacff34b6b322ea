"""Computes the digest of a state. Two runs that are equal bit for bit have equal digests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy
import torch
import xxhash
from torch import Tensor
from torch.distributed.tensor import DTensor


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
    elif isinstance(value, DTensor):
        yield from _pieces(value.to_local())
    elif isinstance(value, Tensor):
        plain = value.detach().cpu().contiguous()
        yield f"{plain.dtype} {tuple(plain.shape)} ".encode()
        yield plain.reshape(-1).view(torch.uint8).numpy().data
    elif isinstance(value, numpy.ndarray):
        yield f"{value.dtype} {value.shape} ".encode()
        yield value.tobytes()
    else:
        yield f"{value!r} ".encode()
