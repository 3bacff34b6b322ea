"""Translates errors between agent and control plane to gRPC statuses and back, with a single table."""

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
"""Error → the status that an agent answers; the first that fits counts, and an error that fits none is ``ABORTED``."""
NO_ANSWER = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)
"""The statuses that gRPC makes itself: there was no answer, or not in time."""


def status_of(error: Exception) -> grpc.StatusCode:
    """Return the status for an error."""
    return next((status for kind, status in STATUSES.items() if isinstance(error, kind)), grpc.StatusCode.ABORTED)


def error_of(status: grpc.StatusCode) -> type[Exception]:
    """Return the control plane's error for a status; an agent's full disk becomes a refusal."""
    if status in NO_ANSWER:
        return AgentUnreachable
    found = next((kind for kind, one in STATUSES.items() if one is status), AgentError)
    return AgentError if found is OSError else found
