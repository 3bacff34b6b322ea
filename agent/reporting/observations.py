"""The numbered log of a machine's observations, each kept until the control plane acknowledged it.

Lines of JSON in shared memory and on disk (``live.py``). The first line says after which number the log begins and in
which boot of the machine it was written. No number is ever used twice: after a reboot, or where only the copy on disk
is left, which may lack the last lines, numbering leaps ahead.
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

REBOOT_LEAP = 1000
"""More than can be lost unwritten in a crash of the machine."""
OF_NO_JOB = "*"
"""Stands for the observations of the machine alone where one acknowledges a job's; no job has such a name."""
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
        boot = boot_id()
        self._boot = boot
        self._load(boot)
        self._rewrite()

    @property
    def waiting(self) -> int:
        """Return the number of observations that are not acknowledged yet."""
        return len(self._entries)

    def append(self, *, job: str = "", generation: int = 0, **what: Any) -> pb.Observation:
        """Number, keep and publish an observation; ``what`` is one of its kinds."""
        self.last += 1
        found = pb.Observation(
            sequence=self.last,
            id=f"{self._machine}-{self.last}",
            time_ns=time.time_ns(),
            machine=self._machine,
            job=job,
            generation=generation,
            **what,
        )
        self._entries.append(found)
        self._lines += 1
        self._write(_line(found))
        if len(self._entries) > KEPT:
            del self._entries[: len(self._entries) - KEPT]
            if self._lines > 2 * KEPT + 64:
                self._rewrite()
        self._publish()
        logger.info(
            "observed",
            correlation=found.id,
            job=job or None,
            generation=generation or None,
            what=found.WhichOneof("what"),
        )
        return found

    def finding_changed(self, finding: Finding, over: bool) -> None:
        """Append a finding that an inspection reports; ``over``: the finding is not active any more."""
        self.append(machine_finding=pb.MachineFinding(finding=finding_message(finding), over=over))

    def acknowledge(self, up_to: int, job: str = "") -> None:
        """Forget what is up to a number: of one job, of no job (``OF_NO_JOB``), or of all (empty).

        What is of no job (an agent started) is acknowledged by the caller that wrote it to the ledger.
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
        """What is kept after a number, then active findings, then what is observed from now on; endless.

        A number that this log never gave means that an earlier log was lost: all is sent.

        Args:
            after: The number.
            job: Only observations of this job and of the machine; empty: all.
            active: Returns what inspections find now. It may have been acknowledged long ago.
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

    def _load(self, boot: str) -> None:
        lines = self._file.read()
        leap = False
        for number, line in enumerate(lines, 1):
            try:
                row = json.loads(line)
                if "base" in row:
                    self.last = row["base"]
                    leap = row["boot"] != boot or not self._file.complete
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
        self.last += REBOOT_LEAP if leap else 0
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
    """Return the finding in a message; words that this release does not know are kept."""
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
