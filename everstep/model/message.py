"""The bases of what crosses Temporal, or is stored: models, and the words of closed lists that grow with releases.

During an upgrade two releases run side by side, and after a downgrade the older one reads what the newer one wrote. A
field or a word that this release does not know is kept as it is: shown, passed on and stored again; such a word is
equal to no word that is known. Neither makes a message unreadable.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Self

from pydantic import BaseModel, ConfigDict, GetPydanticSchema
from pydantic_core import core_schema


class Model(BaseModel):
    """Base of the messages: frozen; fields that a newer release added are kept and passed on."""

    model_config = ConfigDict(frozen=True, extra="allow")


AnyWord = GetPydanticSchema(lambda _source, _handler: core_schema.str_schema())
"""Annotates a ``Literal``: the type checker sees the list, and a model takes any text."""


class Words(StrEnum):
    """Base of the enums that cross Temporal or are stored: any other text becomes a member of its own, not listed."""

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
