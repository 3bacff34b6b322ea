"""Errors between agent and control plane: which gRPC status stands for which of them, one table for both ways."""

from __future__ import annotations

import grpc

from everstep.errors import (
    AgentError,
    AgentUnreachable,
    CodeMissing,
    ConfigError,
    Fenced,
    StillDying,
    UnknownJob,
)

STATUSES: dict[type[Exception], grpc.StatusCode] = {
    Fenced: grpc.StatusCode.FAILED_PRECONDITION,
    StillDying: grpc.StatusCode.OUT_OF_RANGE,  # of the time that one call waits
    UnknownJob: grpc.StatusCode.NOT_FOUND,
    CodeMissing: grpc.StatusCode.DATA_LOSS,  # of what can be brought again
    ConfigError: grpc.StatusCode.INVALID_ARGUMENT,
    OSError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    AgentError: grpc.StatusCode.ABORTED,
}
"""What an agent answers; of an error that fits several the first counts, and what fits none is ``ABORTED`` too."""
NO_ANSWER = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)
"""What gRPC says by itself: nobody answered, or not in time."""


def status_of(error: Exception) -> grpc.StatusCode:
    """The status that stands for an error."""
    return next((status for kind, status in STATUSES.items() if isinstance(error, kind)), grpc.StatusCode.ABORTED)


def error_of(status: grpc.StatusCode) -> type[Exception]:
    """The error that a status stands for: the control plane's, for whom an agent's full disk is a refusal."""
    if status in NO_ANSWER:
        return AgentUnreachable
    found = next((kind for kind, one in STATUSES.items() if one is status), AgentError)
    return AgentError if found is OSError else found
