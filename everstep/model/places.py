"""Defines the places of copies: which machine has those of which ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from everstep.model.ranks import Ranks, Span, members, spans_of, text_of

KEPT = 64
"""The number of texts whose places are kept. Most entries of a job's copies have the same places, which are then read
only once."""


class Places(Mapping[str, str]):
    """An immutable map: machine → its ranks as text, e.g. ``8-15``. The same rank may be on several machines.

    In JSON it is one text with a line for each machine: its name, a tab, its ranks.
    """

    __slots__ = ("_places", "_ranks", "_spans")

    def __init__(self, places: Mapping[str, str]) -> None:
        self._places = dict(places)
        self._ranks: Ranks | None = None
        self._spans: list[tuple[str, list[Span]]] | None = None

    @property
    def ranks(self) -> Ranks:
        """All ranks that have a place."""
        if self._ranks is None:
            self._ranks = Ranks.of_spans(chain.from_iterable(spans for _, spans in self.each()))
        return self._ranks

    @property
    def first(self) -> str:
        """The machine with the smallest rank; empty: there is no place."""
        first = self.ranks.first
        return next((name for name, spans in self.each() if any(a <= first <= b for a, b in spans)), "")

    def each(self) -> Sequence[tuple[str, list[Span]]]:
        """Return each machine with the runs of its ranks."""
        if self._spans is None:
            self._spans = [(machine, spans_of(text)) for machine, text in self._places.items()]
        return self._spans

    def among(self, ranks: Ranks) -> Places:
        """Return the places of these ranks only."""
        if self.ranks <= ranks:
            return self
        mask = ranks.mask()
        kept: dict[str, str] = {}
        for machine, spans in self.each():
            text = self._places[machine]
            if all(b < len(mask) and "0" not in mask[a : b + 1] for a, b in spans):
                kept[machine] = text
            elif some := [rank for a, b in spans for rank in range(a, b + 1) if mask[rank : rank + 1] == "1"]:
                kept[machine] = text_of(some)
        return Places(kept)

    def __and__(self, other: Places) -> Places:
        if self == other:
            return self
        both: dict[str, str] = {}
        for machine, text in self._places.items():
            if (there := other.get(machine)) and (
                common := text if text == there else text_of(members(text) & members(there))
            ):
                both[machine] = common
        return Places(both)

    def __sub__(self, other: Places) -> Places:
        left: dict[str, str] = {}
        for machine, text in self._places.items():
            there = other.get(machine, "")
            if rest := text if not there else "" if text == there else text_of(members(text) - members(there)):
                left[machine] = rest
        return Places(left)

    def __getitem__(self, machine: str) -> str:
        return self._places[machine]

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Places) and self._places == other._places)

    def __hash__(self) -> int:
        return hash(frozenset(self._places.items()))

    def __str__(self) -> str:
        return "\n".join(f"{machine}\t{text}" for machine, text in self._places.items())

    def __repr__(self) -> str:
        return f"Places({self._places})"

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        from_text = core_schema.no_info_after_validator_function(_parsed, core_schema.str_schema())
        from_map = core_schema.no_info_after_validator_function(cls, core_schema.dict_schema())
        return core_schema.json_or_python_schema(
            json_schema=from_text,
            python_schema=core_schema.union_schema([core_schema.is_instance_schema(cls), from_text, from_map]),
            serialization=core_schema.plain_serializer_function_ser_schema(str, return_schema=core_schema.str_schema()),
        )


@lru_cache(maxsize=KEPT)
def _parsed(text: str) -> Places:
    places: dict[str, str] = {}
    for line in text.splitlines():
        machine, tab, ranks = line.rpartition("\t")
        if not tab:
            raise ValueError(f"{line[:40]!r} is no place of copies: it needs a machine, a tab and its ranks")
        places[machine] = ranks
    found = Places(places)
    found.ranks  # noqa: B018 - a wrong text of ranks is refused here, and not in a decision
    return found


NOWHERE = Places({})
