"""Errors become gRPC statuses, and statuses become errors again."""

from __future__ import annotations

import inspect

import grpc
import pytest

from agent.statuses import NO_ANSWER, REFUSED, STATUSES, error_of, status_of
from everstep import errors
from everstep.errors import AgentError, AgentRefuses, AgentUnreachable, EverstepError

ALL = [one for one in vars(errors).values() if inspect.isclass(one) and issubclass(one, EverstepError)]
COMES_BACK = {
    errors.Fenced: errors.Fenced,
    errors.StillDying: errors.StillDying,
    errors.UnknownJob: errors.UnknownJob,
    errors.CodeMissing: errors.CodeMissing,
    errors.ConfigError: errors.ConfigError,
    errors.NoSuchJob: errors.ConfigError,
    errors.NoSuchFolder: errors.ConfigError,
}
"""Error of an agent → the error that the control plane gets. All other errors become ``AgentError``."""


@pytest.mark.parametrize("kind", ALL, ids=lambda one: one.__name__)
def test_each_error_is_converted_to_the_error_of_the_control_plane(kind: type[EverstepError]) -> None:
    error = errors.Lacks("said", "do this") if kind is errors.Lacks else kind("said")
    assert error_of(status_of(error)) is COMES_BACK.get(kind, AgentError)


def test_a_full_disk_and_a_bug_become_agent_errors() -> None:
    assert status_of(OSError(28, "no space left")) is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert error_of(status_of(OSError(28, "no space left"))) is error_of(status_of(ValueError("ours"))) is AgentError


@pytest.mark.parametrize("status", grpc.StatusCode, ids=lambda one: one.name)
def test_each_status_is_an_error(status: grpc.StatusCode) -> None:
    found = error_of(status)
    assert issubclass(found, EverstepError)
    assert (found is AgentUnreachable) == (status in NO_ANSWER)
    assert (found is AgentRefuses) == (status in REFUSED)


def test_each_status_belongs_to_one_error() -> None:
    assert len(set(STATUSES.values())) == len(STATUSES)
    assert not {*NO_ANSWER, *REFUSED} & set(STATUSES.values())
