"""This module has the numbered log of a machine's observations.

An observation is kept until the control plane has acknowledged it. The log consists of lines of JSON in shared memory,
with a copy on disk (``live.py``). Its first line contains the number after which the log begins, and the id of the boot
of the machine in which the log was written. No number is ever used twice. After a reboot, or if only the copy on disk
exists, the last lines may be missing, so the numbers continue after a gap.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

import structlog
from google.protobuf import json_format

from agent.state.live import LiveLines
from agent.v1 import agent_pb2 as pb
from everstep.model.finding import Finding, Health, Owner, Remedy
from everstep.system.procfs import boot_id

REBOOT_GAP = 1000
"""The gap in the numbers after a reboot. A crash of the machine cannot lose as many observations as this."""
OF_NO_JOB = "*"
"""An acknowledgement of the observations that belong to no job has this instead of the name of a job."""
KEPT = 10_000
"""Unacknowledged observations beyond this number are dropped, the oldest first."""

logger = structlog.get_logger()


class ObservationLog:
    """The observations of a machine, in order."""

    def __init__(self, file: LiveLines, machine: str) -> None:
        self._file = file
        self._machine = machine
        self._entries: list[pb.Observation] = []
        self.last = 0
        """The newest number."""
        self.restored = 0
        """The newest number in the log of an earlier agent."""
        self._changed = asyncio.Event()
        self._lines = 0
        self._boot = boot_id()
        self._load()
        self._rewrite()

    @property
    def waiting(self) -> int:
        """Return the number of observations that are not acknowledged yet."""
        return len(self._entries)

    def append(self, *, job: str = "", generation: int = 0, **what: Any) -> pb.Observation:
        """Number, keep and publish an observation; ``what`` sets the field of its kind, e.g. ``rank_ended``."""
        self.last += 1
        observation = pb.Observation(
            sequence=self.last,
            id=f"{self._machine}-{self.last}",
            time_ns=time.time_ns(),
            machine=self._machine,
            job=job,
            generation=generation,
            **what,
        )
        self._entries.append(observation)
        self._lines += 1
        self._write(_line(observation))
        if len(self._entries) > KEPT:
            del self._entries[: len(self._entries) - KEPT]
            if self._lines > 2 * KEPT + 64:
                self._rewrite()
        self._publish()
        logger.info(
            "observed",
            correlation=observation.id,
            job=job or None,
            generation=generation or None,
            what=observation.WhichOneof("what"),
        )
        return observation

    def finding_changed(self, finding: Finding, over: bool) -> None:
        """Append a finding that an inspection reports; ``over``: the finding is not active any more."""
        self.append(machine_finding=pb.MachineFinding(finding=finding_message(finding), over=over))

    def acknowledge(self, up_to: int, job: str = "") -> None:
        """Forget the observations up to a number.

        Args:
            up_to: The newest number that is acknowledged.
            job: Only the observations of this job; ``OF_NO_JOB``: only those that belong to no job; empty: all.
        """
        kept = [e for e in self._entries if e.sequence > up_to or not _is_of(e, job)]
        if len(kept) == len(self._entries):
            return
        self._entries = kept
        if self._lines > 2 * len(kept) + 64:
            self._rewrite()
        else:
            self._lines += 1
            self._write(json.dumps({"acknowledged": up_to, "job": job}).encode() + b"\n")

    def forget(self, job: str) -> None:
        """Forget the observations of a job that is over."""
        self._entries = [e for e in self._entries if e.job != job]
        self._rewrite()

    async def follow(
        self, after: int, job: str = "", active: Callable[[], Iterable[pb.Finding]] = tuple
    ) -> AsyncIterator[pb.Observation]:
        """Yield the kept observations after a number, then the active findings, then new observations; endless.

        If this log has not reached the number, an earlier log was lost, and all observations are sent.

        Args:
            after: The number.
            job: Only observations of this job and those that belong to no job; empty: all.
            active: Returns the active findings of the inspections, also those that were acknowledged long ago.
        """
        if after > self.last:
            after = 0
        is_first = True
        while True:
            changed = self._changed
            due = [e for e in self._entries if e.sequence > after]
            for entry in due:
                if not job or entry.job in (job, ""):
                    yield entry
            after = max([after, *(e.sequence for e in due)])
            for finding in active() if is_first else ():
                yield self._of_active(finding)
            is_first = False
            if not any(e.sequence > after for e in self._entries):
                await changed.wait()

    def _of_active(self, finding: pb.Finding) -> pb.Observation:
        parts = (self._machine, finding.inspection, finding.reason, finding.item, str(finding.since_ns))
        return pb.Observation(
            id="-".join(parts).replace(" ", "-"),
            time_ns=time.time_ns(),
            machine=self._machine,
            machine_finding=pb.MachineFinding(finding=finding),
        )

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _publish(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _load(self) -> None:
        lines = self._file.read()
        may_lack_lines = False
        for number, line in enumerate(lines, 1):
            try:
                row = json.loads(line)
                if "base" in row:
                    self.last = row["base"]
                    may_lack_lines = row["boot"] != self._boot or not self._file.complete
                elif "acknowledged" in row:
                    up_to, job = row["acknowledged"], row["job"]
                    self._entries = [e for e in self._entries if e.sequence > up_to or not _is_of(e, job)]
                else:
                    entry = json_format.ParseDict(row, pb.Observation(), ignore_unknown_fields=True)
                    self._entries.append(entry)
                    self.last = max(self.last, entry.sequence)
            except (ValueError, KeyError, TypeError, json_format.ParseError) as error:
                logger.warning("skipped a damaged line", path=str(self._file.path), line=number, reason=str(error))
        self.restored = self.last
        self.last += REBOOT_GAP if may_lack_lines else 0
        self._entries = self._entries[-KEPT:]

    def _write(self, line: bytes) -> None:
        if not self._file.append(line):
            self._rewrite()

    def _rewrite(self) -> None:
        header = json.dumps({"base": self.last, "boot": self._boot}).encode() + b"\n"
        self._file.rewrite([header, *map(_line, self._entries)])
        self._lines = len(self._entries)


def _is_of(entry: pb.Observation, job: str) -> bool:
    return not job or entry.job == ("" if job == OF_NO_JOB else job)


def _line(entry: pb.Observation) -> bytes:
    return json.dumps(json_format.MessageToDict(entry, preserving_proto_field_name=True)).encode() + b"\n"


def finding_message(finding: Finding) -> pb.Finding:
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
    """Return the finding in a message; names that this release does not know are kept."""
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
