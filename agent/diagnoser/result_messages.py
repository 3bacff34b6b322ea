"""This module converts results of tests to messages of gRPC, and back."""

from __future__ import annotations

from agent.reporting.observations import finding_message, finding_of
from agent.v1 import agent_pb2 as pb
from everstep.model.diagnosis import DiagnosticResult


def result_message(result: DiagnosticResult) -> pb.TestResult:
    """Convert a result to a message."""
    return pb.TestResult(
        name=result.test,
        findings=map(finding_message, result.findings),
        nothing=result.nothing,
        measures=result.measures,
        digests=result.digests,
        kind=result.kind,
        seconds=result.seconds,
    )


def result_of(message: pb.TestResult) -> DiagnosticResult:
    """Return the result that a message describes; names that this release does not know are kept."""
    return DiagnosticResult(
        test=message.name,
        findings=list(map(finding_of, message.findings)),
        nothing=message.nothing,
        measures=dict(message.measures),
        digests=dict(message.digests),
        kind=message.kind,
        seconds=message.seconds,
    )
