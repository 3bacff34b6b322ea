"""The base of what crosses Temporal, or is stored."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Model(BaseModel):
    """Base of the messages: frozen; fields that a newer release added are kept and passed on."""

    model_config = ConfigDict(frozen=True, extra="allow")
