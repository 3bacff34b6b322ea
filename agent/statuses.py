"""This module converts an agent's errors to gRPC statuses, and the statuses back to errors for the control plane."""

from __future__ import annotations

import grpc

from everstep.errors import (
    AgentError,
    AgentRefuses,
    AgentUnreachable,
    CodeMissing,
    ConfigError,
    Fenced,
    StillDying,
    UnknownJob,
)

STATUSES: dict[type[Exception], grpc.StatusCode] = {
    Fenced: grpc.StatusCode.FAILED_PRECONDITION,
    StillDying: grpc.StatusCode.OUT_OF_RANGE,  # the processes need longer than one call waits
    UnknownJob: grpc.StatusCode.NOT_FOUND,
    CodeMissing: grpc.StatusCode.DATA_LOSS,  # the caller can send the code again
    ConfigError: grpc.StatusCode.INVALID_ARGUMENT,
    OSError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    AgentError: grpc.StatusCode.ABORTED,
}
"""Error → the status of an agent's answer. The first entry that fits the error is used. If none fits, the status is
``ABORTED``."""
NO_ANSWER = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)
"""The statuses that gRPC itself sets if there was no answer in time."""

REFUSED = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNIMPLEMENTED)
"""The statuses of an agent that does not accept the token, or does not know the call."""


def status_of(error: Exception) -> grpc.StatusCode:
    """Return the status for an error."""
    return next((status for kind, status in STATUSES.items() if isinstance(error, kind)), grpc.StatusCode.ABORTED)


def error_of(status: grpc.StatusCode) -> type[Exception]:
    """Return the control plane's error for a status; the OSError of an agent becomes an ``AgentError``."""
    if status in NO_ANSWER:
        return AgentUnreachable
    if status in REFUSED:
        return AgentRefuses
    error = next((kind for kind, code in STATUSES.items() if code is status), AgentError)
    return AgentError if error is OSError else error
