"""Faults of a job's machines that its workflow was not told yet; no input or output here."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping

from agent.monitor.finding_messages import finding_of
from agent.v1 import agent_pb2 as pb
from everstep.decisions.detect.job_facts import FindingSeen
from everstep.model.finding import Finding, Health, MachineFinding
from everstep.model.incident import Anomaly

FINDINGS_KEPT = 1000
"""Of inspections, that the job was not told; more of them say nothing new."""
Key = tuple[str, str, str]


class UntoldFaults:
    """Of one job."""

    def __init__(self) -> None:
        self._seen: dict[str, dict[Key, FindingSeen]] = defaultdict(dict)
        """Machine → what it is about → what its inspections say now."""
        self._offered: dict[str, set[str]] = {}
        """Id of the newest anomaly that tells some → ids of their observations."""
        self.told_ns: dict[str, int] = {}
        """Reason code → when the job's workflow took one last."""
        self.known: Mapping[str, int] = {}
        """What faults are about → when the job's workflow took them last, nanoseconds of the wall clock."""

    def found(self, machine: str, observation: pb.Observation, now_ns: int) -> None:
        """An inspection found something, or what it had found is over.

        What was active when the stream began may have been reported before there was anybody to hear it.
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
        """What an anomaly tells."""
        self._offered = {anomaly.id: {seen.id for seen in faults}}

    def told(self, anomaly: Anomaly, now_ns: int) -> None:
        """The job's workflow took an anomaly."""
        self.told_ns |= {found.finding.reason: now_ns for found in anomaly.findings}
        self.known = {**self.known, **{found.about: found.finding.since_ns for found in anomaly.findings}}
        gone = self._offered.get(anomaly.id, {anomaly.id})
        self.drop(lambda seen: seen.id in gone)

    def drop(self, is_gone: Callable[[FindingSeen], bool]) -> None:
        """Nobody has to be told of some."""
        for machine, findings in self._seen.items():
            self._seen[machine] = {key: seen for key, seen in findings.items() if not is_gone(seen)}

    def first(self, machine: str) -> int | None:
        """The oldest observation of a machine that tells one; None: there is none."""
        return min((seen.sequence for seen in self._seen[machine].values() if seen.sequence), default=None)

    def all(self) -> list[FindingSeen]:
        """In the order in which they were heard of."""
        found = [seen for findings in self._seen.values() for seen in findings.values()]
        return sorted(found, key=lambda seen: seen.heard_ns)

    def _keep(self, seen: FindingSeen) -> None:
        known = self._seen[seen.machine]
        if seen.finding.key in known or sum(map(len, self._seen.values())) < FINDINGS_KEPT:
            known[seen.finding.key] = seen
