"""Findings as they cross gRPC."""

from __future__ import annotations

from collections.abc import Iterable

from agent.monitor.monitor import InspectionState
from agent.v1 import agent_pb2 as pb
from everstep.model.finding import Finding, Health, Owner, Remedy, together

FINDINGS = 64
"""In one answer, at most, the worst first."""


def to_message(finding: Finding) -> pb.Finding:
    """Convert a finding to a message."""
    return pb.Finding(
        inspection=finding.inspection,
        reason=finding.reason,
        verdict=finding.verdict,
        item=finding.item,
        text=finding.text,
        owner=finding.owner,
        remedy=finding.remedy,
        sure=finding.sure,
        evidence=finding.evidence,
        since_ns=finding.since_ns,
        last_ns=finding.last_ns,
    )


def finding_of(message: pb.Finding) -> Finding:
    """The finding of a message; words that this release does not know are kept."""
    return Finding(
        inspection=message.inspection,
        reason=message.reason,
        verdict=Health(message.verdict or Health.UNKNOWN),
        item=message.item,
        text=message.text,
        owner=Owner(message.owner or Owner.UNKNOWN),
        remedy=Remedy(message.remedy or Remedy.WATCH),
        sure=message.sure,
        evidence=list(message.evidence),
        since_ns=message.since_ns,
        last_ns=message.last_ns,
    )


def inspect_reply(machine: str, time_ns: int, states: Iterable[InspectionState]) -> pb.InspectReply:
    """What all inspections say now."""
    states = list(states)
    return pb.InspectReply(
        machine=machine,
        time_ns=time_ns,
        verdict=together(state.verdict for state in states),  # one that has not looked yet is unknown
        inspections=[
            pb.InspectionState(
                name=state.name,
                looks_at=state.looks_at,
                verdict=state.verdict,
                findings=map(to_message, state.findings[:FINDINGS]),
                measures=state.measures,
                facts=state.facts,
                note=state.note,
                interval_s=state.interval_s,
                looked_ns=state.looked_ns,
                looks=state.looks,
                busy_s=state.busy_s,
            )
            for state in states
        ],
    )
