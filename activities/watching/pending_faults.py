"""Faults of a job's machines that its workflow has not accepted yet; no input or output here."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping

from agent.reporting.observations import finding_of
from agent.v1 import agent_pb2 as pb
from everstep.decisions.detect.job_facts import FindingSeen
from everstep.model.finding import Finding, Health, MachineFinding
from everstep.model.incident import Anomaly

FINDINGS_KEPT = 1000
"""The largest number of findings that are kept for a job; more add nothing."""
Key = tuple[str, str, str]


class PendingFaults:
    """The pending faults of one job."""

    def __init__(self) -> None:
        self._seen: dict[str, dict[Key, FindingSeen]] = defaultdict(dict)
        """Machine → subject of a finding → the active finding."""
        self._offered: dict[str, set[str]] = {}
        """Id of the newest anomaly that reports findings → ids of their observations."""
        self.accepted_ns: dict[str, int] = {}
        """Reason code → when the job's workflow last accepted such a fault."""
        self.known: Mapping[str, int] = {}
        """Subject of a fault → when the job's workflow last accepted it, nanoseconds of the wall clock."""

    def found(self, machine: str, observation: pb.Observation, now_ns: int) -> None:
        """Note an inspection's finding, or the end of a finding.

        A finding that was active when the stream began may have been reported before any watcher was connected.
        """
        finding = finding_of(observation.machine_finding.finding)
        if observation.machine_finding.over or finding.verdict is not Health.FAULTY:
            self._seen[machine].pop(finding.key, None)
        elif observation.sequence or not self._is_known(machine, finding):
            self._keep(FindingSeen(observation.id, machine, finding, now_ns, observation.sequence))

    def _is_known(self, machine: str, finding: Finding) -> bool:
        about = MachineFinding(machine=machine, finding=finding).about
        return finding.key in self._seen[machine] or self.known.get(about, -1) >= finding.since_ns

    def offered(self, anomaly: Anomaly, faults: Iterable[FindingSeen]) -> None:
        """Note which faults an anomaly reports."""
        self._offered = {anomaly.id: {seen.id for seen in faults}}

    def accepted(self, anomaly: Anomaly, now_ns: int) -> None:
        """The job's workflow accepted an anomaly: the faults that it reports are pending no more."""
        self.accepted_ns |= {found.finding.reason: now_ns for found in anomaly.findings}
        self.known = {**self.known, **{found.about: found.finding.since_ns for found in anomaly.findings}}
        gone = self._offered.get(anomaly.id, {anomaly.id})
        self.drop(lambda seen: seen.id in gone)

    def drop(self, is_gone: Callable[[FindingSeen], bool]) -> None:
        """Drop faults that need not be reported."""
        for machine, findings in self._seen.items():
            self._seen[machine] = {key: seen for key, seen in findings.items() if not is_gone(seen)}

    def first(self, machine: str) -> int | None:
        """Return the number of a machine's oldest observation with a pending fault; None: there is none."""
        return min((seen.sequence for seen in self._seen[machine].values() if seen.sequence), default=None)

    def all(self) -> list[FindingSeen]:
        """Return all pending faults, in the order of their arrival."""
        found = [seen for findings in self._seen.values() for seen in findings.values()]
        return sorted(found, key=lambda seen: seen.heard_ns)

    def _keep(self, seen: FindingSeen) -> None:
        known = self._seen[seen.machine]
        if seen.finding.key in known or sum(map(len, self._seen.values())) < FINDINGS_KEPT:
            known[seen.finding.key] = seen
