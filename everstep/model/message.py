"""Defines base classes of the models and enums that are sent through Temporal or are stored.

During an upgrade two releases run side by side, and after a downgrade the older release reads what the newer one wrote.
So a message stays readable if it has a field or a word that this release does not know. Both are kept: they are shown,
passed on and stored again. An unknown word differs from all known words.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Self

from pydantic import BaseModel, ConfigDict, GetPydanticSchema
from pydantic_core import core_schema


class Model(BaseModel):
    """Base of the messages, which are frozen. Fields that a newer release added are kept and passed on."""

    model_config = ConfigDict(frozen=True, extra="allow")


AnyWord = GetPydanticSchema(lambda _source, _handler: core_schema.str_schema())
"""Annotation of a ``Literal``: the type checker sees the listed words, and a model accepts any text."""


class Words(StrEnum):
    """Base of the enums that are sent through Temporal or are stored. A text that is not listed becomes an unlisted
    member."""

    @classmethod
    def _missing_(cls, value: object) -> Self | None:
        if not isinstance(value, str):
            return None
        unknown = str.__new__(cls, value)
        unknown._name_ = unknown._value_ = value
        return unknown

    @property
    def known(self) -> bool:
        """Whether this release knows the word."""
        return type(self).__members__.get(self.name) is self
