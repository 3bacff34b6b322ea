"""Defines sets of ranks that stay small when they are sent: runs of numbers, e.g. ``0-7,16``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

_ONES = re.compile("1+")
_TEXT = re.compile(r"(\d+(-\d+)?(,\d+(-\d+)?)*)?")
Span = tuple[int, int]
"""The first and the last rank of a run of numbers."""


class Ranks:
    """An immutable set of ranks. Its operations take time in proportion to the largest rank, with a small constant.

    In JSON it is a text such as ``0-7,16``.
    """

    __slots__ = ("_bits",)

    def __init__(self, bits: int = 0) -> None:
        """``bits`` has one bit for each rank."""
        self._bits = bits

    @classmethod
    def of(cls, ranks: Iterable[int]) -> Ranks:
        """Return the set of these ranks."""
        return cls.of_spans((rank, rank) for rank in ranks)

    @classmethod
    def of_spans(cls, spans: Iterable[Span]) -> Ranks:
        """Return the set of the ranks of some runs, in any order."""
        parts: list[str] = []
        end = 0
        for first, last in sorted(spans):
            if last < end:
                continue
            begin = max(first, end)
            parts.append("0" * (begin - end) + "1" * (last + 1 - begin))
            end = last + 1
        # A text of bits has its lowest bit last.
        return cls(int("".join(parts)[::-1] or "0", 2))

    @classmethod
    def parse(cls, text: str) -> Ranks:
        """Read a text such as ``0-7,16``.

        Raises:
            ValueError: the text does not have this form.
        """
        return cls.of_spans(spans_of(text))

    def spans(self) -> Iterator[Span]:
        """Return the runs of the set, in order."""
        return ((run.start(), run.end() - 1) for run in _ONES.finditer(self.mask()))

    def mask(self) -> str:
        """Return one character for each rank up to the largest one: ``1`` if the set has the rank, otherwise ``0``."""
        return bin(self._bits)[:1:-1]

    @property
    def first(self) -> int:
        """The smallest rank; -1: the set is empty."""
        return (self._bits & -self._bits).bit_length() - 1

    def __or__(self, other: Ranks) -> Ranks:
        return Ranks(self._bits | other._bits)

    def __and__(self, other: Ranks) -> Ranks:
        return Ranks(self._bits & other._bits)

    def __sub__(self, other: Ranks) -> Ranks:
        return Ranks(self._bits & ~other._bits)

    def __le__(self, other: Ranks) -> bool:
        return not self._bits & ~other._bits

    def __contains__(self, rank: int) -> bool:
        return rank >= 0 and bool(self._bits >> rank & 1)

    def __iter__(self) -> Iterator[int]:
        return (rank for first, last in self.spans() for rank in range(first, last + 1))

    def __len__(self) -> int:
        return self._bits.bit_count()

    def __bool__(self) -> bool:
        return self._bits != 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ranks) and self._bits == other._bits

    def __hash__(self) -> int:
        return hash(self._bits)

    def __str__(self) -> str:
        return ",".join(span_text(first, last) for first, last in self.spans())

    def __repr__(self) -> str:
        return f"Ranks({self})"

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        from_text = core_schema.no_info_after_validator_function(cls.parse, core_schema.str_schema())
        return core_schema.json_or_python_schema(
            json_schema=from_text,
            python_schema=core_schema.union_schema([core_schema.is_instance_schema(cls), from_text]),
            serialization=core_schema.plain_serializer_function_ser_schema(str, return_schema=core_schema.str_schema()),
        )


def span_text(first: int, last: int) -> str:
    """Return a run of ranks as text: ``0-7``, or ``3`` for a single rank."""
    return str(first) if first == last else f"{first}-{last}"


def spans_of(text: str) -> list[Span]:
    """Return the runs of a text such as ``0-7,16``.

    Raises:
        ValueError: the text does not have this form.
    """
    first, _, last = text.partition("-")
    if first.isdecimal() and (last.isdecimal() or (not last and first == text)):
        return [(int(first), int(last or first))]  # nearly all texts are a single run
    if not _TEXT.fullmatch(text):
        raise ValueError(f"{text[:40]!r} is no set of ranks: write it as 0-7,16")
    spans = []
    for run in text.split(",") if text else ():
        first, _, last = run.partition("-")
        spans.append((int(first), int(last or first)))
    return spans


def members(text: str) -> set[int]:
    """Return the ranks of a text such as ``0-7,16``; for a few ranks, this is quicker than ``Ranks.parse``."""
    return {rank for first, last in spans_of(text) for rank in range(first, last + 1)}


def text_of(ranks: Iterable[int]) -> str:
    """Return a few ranks as text, as ``Ranks`` does; empty: there are none."""
    spans: list[Span] = []
    for rank in sorted(ranks):
        if spans and rank <= spans[-1][1] + 1:
            spans[-1] = spans[-1][0], max(rank, spans[-1][1])
        else:
            spans.append((rank, rank))
    return ",".join(span_text(first, last) for first, last in spans)


NO_RANKS = Ranks()
