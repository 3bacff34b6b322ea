"""The signals of an operator, from the Web UI or the command line.

Temporal accepts invalid signals too. So signals are validated here, and an invalid signal is shown and does not fail
the workflow.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from everstep.model.pool import OperatorMove


class OperatorRequest(BaseModel):
    """The operator who sends a request, and the reason."""

    model_config = ConfigDict(extra="forbid")

    operator: str = Field(min_length=1, max_length=100)
    note: str = Field(default="", max_length=1000)
    accept_loss: bool = Field(
        default=False, description="Go on from the step that is certain, although a newer one may exist."
    )


def read_move(raw: Any, *more: Any) -> OperatorMove | str:
    """Return an operator's request about a machine, or why it was rejected."""
    if more:
        return f'{1 + len(more)} arguments; send one: {{"machine": "m3", "operator": "you", "reason": "why"}}'
    try:
        return OperatorMove.model_validate(raw)
    except ValidationError as error:
        return f'{str(raw)[:80]!r}: {_problems(error)}; send {{"machine": "m3", "operator": "you", "reason": "why"}}'


def read_request(raw: Any, *more: Any) -> OperatorRequest | str:
    """Return the request, or why it was rejected.

    A handler must accept any number of arguments, because a wrong number would fail the workflow's task again and
    again.
    """
    if more:
        return f'{1 + len(more)} arguments; send one: {{"operator": "you", "note": "why"}}'
    try:
        return OperatorRequest.model_validate(raw)
    except ValidationError as error:
        return f'{str(raw)[:80]!r}: {_problems(error)}; send {{"operator": "you", "note": "why"}}'


def _problems(error: ValidationError) -> str:
    return "; ".join(f"{'.'.join(map(str, e['loc'])) or 'input'}: {e['msg']}" for e in error.errors())
