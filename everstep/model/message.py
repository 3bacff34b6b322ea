"""The base of what crosses Temporal, or is stored."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, GetPydanticSchema
from pydantic_core import core_schema


class Model(BaseModel):
    """Base of the messages: frozen; fields that a newer release added are kept and passed on."""

    model_config = ConfigDict(frozen=True, extra="allow")


AnyWord = GetPydanticSchema(lambda _source, _handler: core_schema.str_schema())
"""Annotates a ``Literal``: the type checker sees the list, and a model takes any text."""
