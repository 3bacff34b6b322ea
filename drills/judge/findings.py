"""Checks that a broken device was reported with the right reason code, machine and owner. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from drills.judge.facts import DrillFacts, is_observed
from drills.spec.fault import ExpectedFinding
from drills.spec.request import DrillRequest
from drills.spec.settings import machine_names
from everstep.model.finding import MachineFinding
from everstep.model.job import JobSpec


def finding_problems(request: DrillRequest, spec: JobSpec, facts: DrillFacts) -> list[str]:
    """Return problems with the reports of a broken device; empty if no device broke."""
    expected = request.opening.finding
    if expected is None:
        return []
    machine = request.opening.struck_machine(spec)
    found = [] if _in_ledger(facts.machine_events, expected) else [f"the ledger has no {expected.reason} of {machine}"]
    observed = [incident.report for incident in facts.incidents if is_observed(incident) and incident.report]
    struck = machine_names(spec.machines) if request.opening.reported_of_all else [machine]
    wrong = [
        report.headline
        for report in observed
        if not all(_reported(report.findings, expected, machine) for machine in struck)
    ]
    found += [f"an incident reports something else: {headline}" for headline in wrong]
    if request.only_reported and expected.opens_incident and len(observed) != 1:
        found.append(f"{len(observed)} incidents report {expected.reason}, and one is due")
    elif request.only_reported and not expected.opens_incident and observed:
        found.append(f"{len(observed)} incidents report {expected.reason}: its verdict is {expected.verdict}")
    stopped = [incident.report for incident in facts.incidents if incident.report and not is_observed(incident)]
    if stopped and not observed and not any(_reported(report.findings, expected, machine) for report in stopped):
        found.append(f"no incident has {expected.reason} of {machine} among its findings")
    return found


def _in_ledger(events: Iterable[str], expected: ExpectedFinding) -> bool:
    return any(f"({expected.reason}; owner: {expected.owner}," in text for text in events)


def _reported(findings: Iterable[MachineFinding], expected: ExpectedFinding, machine: str) -> bool:
    wanted = machine, expected.reason, expected.owner, expected.verdict
    return any((f.machine, f.finding.reason, f.finding.owner, f.finding.verdict) == wanted for f in findings)
