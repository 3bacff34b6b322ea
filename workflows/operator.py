"""What an operator may send by signal, from the Web UI or the command line.

A signal that makes no sense is accepted by Temporal all the same: it is
validated here, and a rejection is shown instead of failing the workflow.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError


class OperatorRequest(BaseModel):
    """Who asks, and why."""

    model_config = ConfigDict(extra="forbid")

    operator: str
    note: str = ""


def read_request(raw: Any) -> OperatorRequest | str:
    """The request, or why it was rejected."""
    try:
        return OperatorRequest.model_validate(raw)
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, e['loc'])) or 'input'}: {e['msg']}" for e in error.errors())
        return f'{str(raw)[:80]!r}: {problems}; send {{"operator": "you", "note": "why"}}'
