"""Keeps the book of a job's code versions: the running version, the requested versions, and the status of each."""

from __future__ import annotations

from collections.abc import Iterable

from pydantic import BaseModel, ConfigDict, Field

from everstep.decisions.act.progress import is_steady
from everstep.decisions.act.versions.rollback import is_young, steps_of
from everstep.model.incident import Failure
from everstep.model.job import JobSpec
from everstep.model.recovery_policy import RecoveryPolicy
from everstep.model.version import CodeVersion, JobVersion, UpdateRequest, Urgency, VersionStatus

KEPT = 50
"""The number of versions that a job remembers; the store and the ledger keep all of them."""
RANGES_KEPT = 20
"""The number of step ranges that are kept for one version."""
WAITS = frozenset({VersionStatus.CHECKING, VersionStatus.PENDING})


class VersionBook(BaseModel):
    """The code versions of one job. Mutable; it has no clock."""

    model_config = ConfigDict(extra="allow")

    versions: dict[int, JobVersion] = Field(default_factory=dict)
    """Number → version."""
    running: int = 0
    """The number of the running version; 0: none is known."""
    touched: set[int] = Field(default_factory=set)
    """The numbers of the versions that changed in this book."""

    @classmethod
    def of(cls, versions: Iterable[JobVersion], running: int) -> VersionBook:
        """Return a book of these versions, without changes."""
        return cls(versions={version.number: version for version in versions}, running=running)

    # Queries of the book.

    def all(self) -> list[JobVersion]:
        """Return the versions in order, at most ``KEPT``: the oldest versions that are not needed are left out.

        The running version, the requested versions, and the last two steady versions are needed.
        """
        ordered = sorted(self.versions.values(), key=lambda version: version.number)
        needed = {version.number for version in ordered if version.number == self.running or version.status in WAITS}
        needed |= {steady.number for steady in [version for version in ordered if version.steady][-2:]}
        spare = [version.number for version in ordered if version.number not in needed]
        dropped = set(spare[: max(len(ordered) - KEPT, 0)])
        return [version for version in ordered if version.number not in dropped]

    def pending(self) -> list[JobVersion]:
        """Return the versions that wait for a restart, in the order of their requests."""
        waiting = [
            version for version in self.versions.values() if version.status is VersionStatus.PENDING and version.runs
        ]
        return sorted(waiting, key=lambda version: (version.asked_ns, version.number))

    def urgent(self) -> list[JobVersion]:
        """Return the pending versions for which the job is stopped at once, without waiting for a recovery."""
        return [version for version in self.pending() if version.wanted.urgency is Urgency.URGENT]

    def next_due_ns(self) -> int:
        """Return when the job is stopped for the first pending version; 0: none is pending."""
        return min((version.due_ns for version in self.pending()), default=0)

    def before(self) -> JobVersion | None:
        """Return the version that ran before the running version; None: not known."""
        ran = [version for version in self.versions.values() if version.ranges and version.number != self.running]
        return max(ran, key=lambda version: version.ranges[-1], default=None)

    def changed(self) -> list[JobVersion]:
        """Return the changed versions, in order."""
        return [self.versions[number] for number in sorted(self.touched) if number in self.versions]

    # Changes of the book.

    def merge(self, newer: Iterable[JobVersion]) -> None:
        """Store newer records of some versions from another book."""
        for version in newer:
            self.put(version)

    def put(self, version: JobVersion) -> None:
        """Store the record of one version."""
        self.versions[version.number] = version
        self.touched.add(version.number)

    def change(self, number: int, **changes: object) -> JobVersion:
        """Change fields of one version, and return it."""
        self.put(self.versions[number].model_copy(update=changes))
        return self.versions[number]

    def add_first(self, spec: JobSpec, now_ns: int, launched: tuple[int, int] | None = None) -> None:
        """Record the code with which the job was started as its first version, unless the book has versions.

        Args:
            spec: The spec of the job.
            now_ns: The current time.
            launched: Generation and step at which the job began, if it ran before versions were recorded. Then no
                failure counts against this version.
        """
        if self.versions:
            return
        number = spec.version or 1
        self.put(
            JobVersion(
                number=number,
                runs=CodeVersion.of(spec),
                status=VersionStatus.RUNNING,
                asked_ns=now_ns,
                ranges=[(*launched, -1)] if launched else [],
                steady=launched is not None,
            )
        )
        self.running = number

    def ask(self, request: UpdateRequest, now_ns: int) -> JobVersion:
        """Add a requested version, which has to be made and checked, and return it with a new number."""
        number = max([*self.versions, self.running, 0]) + 1
        self.put(
            JobVersion(
                number=number, runs=request.made, request=request, status=VersionStatus.CHECKING, asked_ns=now_ns
            )
        )
        return self.versions[number]

    def wait_for_restart(self, number: int, now_ns: int, again: UpdateRequest | None = None) -> JobVersion:
        """Record that a version is pending: it waits for the next restart, and is forced after its window.

        Args:
            number: The number of a version that passed its checks, or that ran before.
            now_ns: The current time.
            again: The request for a version that ran before; None: the version is new.
        """
        request = again or self.versions[number].request
        window_ns = 0 if request.urgency is Urgency.URGENT else int(request.window_h * 3600e9)
        asked_ns = now_ns if again else self.versions[number].asked_ns
        return self.change(
            number, status=VersionStatus.PENDING, again=again, due_ns=now_ns + window_ns, asked_ns=asked_ns, why=""
        )

    def withdraw(self, number: int, why: str) -> bool:
        """Withdraw a requested version; return whether that was possible.

        It is possible only while the version waits for its checks or for a launch.
        """
        version = self.versions.get(number)
        if version is None or version.status not in WAITS:
            return False
        status = VersionStatus.REPLACED if version.ranges else VersionStatus.WITHDRAWN
        self.change(number, status=status, why=why, due_ns=0, again=None)
        return True

    def refuse(self, number: int, why: str) -> None:
        """Refuse a version that cannot run."""
        self.change(number, status=VersionStatus.REFUSED, why=why, due_ns=0)

    def switch_to(self, number: int, *, suspect: str = "", now_ns: int) -> None:
        """Make this version the running version from the next launch on.

        Args:
            number: The number of the version.
            suspect: Why the running version is suspect; empty: it is not, or no version runs.
            now_ns: The current time.
        """
        chosen, before = self.versions[number], self.versions.get(self.running)
        for other in self.pending():
            if other.number != number and other.asked_ns <= chosen.asked_ns:
                status = VersionStatus.REPLACED if other.ranges else VersionStatus.SUPERSEDED
                self.change(other.number, status=status, why=f"v{number} was launched instead", due_ns=0)
        if before is not None and before.number != number:
            ended = f"rolled back to v{number}: {suspect}" if suspect else f"replaced by v{number}"
            status = VersionStatus.SUSPECT if suspect else VersionStatus.REPLACED
            self.change(before.number, status=status, why=suspect, ended=ended)
        self.change(number, status=VersionStatus.RUNNING, began_ns=now_ns, due_ns=0, ended="", why="", failed=0)
        self.running = number

    def launched(self, generation: int, step: int, now_ns: int) -> None:
        """Record that a generation of the running version is launched at a step.

        The range of the version that ran before ends at this step.
        """
        for other in list(self.versions.values()):
            if other.ranges and other.ranges[-1][2] < 0 and other.number != self.running:
                first, begin, _ = other.ranges[-1]
                self.change(other.number, ranges=[*other.ranges[:-1], (first, begin, step)])
        version = self.versions.get(self.running)
        if version is None:
            return
        if not version.began_ns:
            version = self.change(version.number, began_ns=now_ns)
        if version.ranges and version.ranges[-1][2] < 0:
            first, begin, _ = version.ranges[-1]
            ranges = [*version.ranges[:-1], (first, min(begin, step), -1)]
        else:
            ranges = [*version.ranges, (generation, step, -1)]
        self.change(version.number, ranges=ranges[-RANGES_KEPT:])

    def record_progress(self, failure: Failure, policy: RecoveryPolicy, before: Failure | None = None) -> None:
        """Record whether the running version is past its first steps, and whether it is steady.

        Args:
            failure: The failure that stopped the job.
            policy: The limits.
            before: The last earlier failure that is not solved; None: there is none.
        """
        version = self.versions.get(self.running)
        if version is None or not version.began_ns or is_young(version, failure.step, failure.time_ns, policy):
            return
        begun = max(version.began_ns, (before.over_ns or before.time_ns) if before else 0)
        steps = steps_of(version, failure.step)
        if before is not None and steps >= 0:
            steps = min(steps, failure.step - max(before.step, 0))
        steady = is_steady(steps if steps >= 0 else None, (failure.time_ns - begun) / 1e9, policy)
        if not version.proven or (steady and not version.steady):
            self.change(version.number, proven=True, steady=version.steady or steady)

    def clear(self, number: int, why: str) -> None:
        """Clear a version that is suspect, since its rollback did not help."""
        version = self.versions.get(number)
        if version is not None and version.status is VersionStatus.SUSPECT:
            self.change(number, status=VersionStatus.REPLACED, why=why)

    def end(self, why: str) -> None:
        """Record the end of the job: the running version ended, and requested versions are withdrawn."""
        for version in list(self.versions.values()):
            if version.status in WAITS:
                self.withdraw(version.number, why)
            elif version.number == self.running and version.status is VersionStatus.RUNNING:
                self.change(version.number, ended=why)

    def count_failure(self) -> None:
        """Count a failure that the running version may have caused, unless it is past its first steps."""
        version = self.versions.get(self.running)
        if version is not None and not (version.steady or version.proven):
            self.change(version.number, failed=version.failed + 1)
