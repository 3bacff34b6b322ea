"""How long the ledger keeps details, and how large it may become."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class Retention(BaseModel):
    """The settings of the ledger's cleaning."""

    model_config = ConfigDict(frozen=True)

    days: float = Field(365.0, ge=1)
    """Details are deleted this many days after the end of their incident; machine events this many days after they
    were seen."""
    gib: float = Field(4.0, gt=0)
    """If a SQLite file uses more than this, GiB, the oldest details are deleted earlier, but not in their first day."""
