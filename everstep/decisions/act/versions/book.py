"""The versions of one job: the running version, the requested versions, and the state of each."""

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
"""Versions that a job remembers; all of them are in the store and in the ledger."""
RANGES_KEPT = 20
"""The number of step ranges that are kept for one version."""
WAITS = frozenset({VersionStatus.CHECKING, VersionStatus.PENDING})


class VersionBook(BaseModel):
    """The versions of one job. Mutable; no clock."""

    model_config = ConfigDict(extra="allow")

    versions: dict[int, JobVersion] = Field(default_factory=dict)
    running: int = 0
    """Number of the version that runs; 0: none is known."""
    touched: set[int] = Field(default_factory=set)
    """Numbers of the versions that changed."""

    @classmethod
    def of(cls, versions: Iterable[JobVersion], running: int) -> VersionBook:
        """Return the book of a job's state."""
        return cls(versions={version.number: version for version in versions}, running=running)

    # Queries of the book.

    def all(self) -> list[JobVersion]:
        """Return the versions in order, at most as many as are kept: the oldest versions without a use are left out."""
        ones = sorted(self.versions.values(), key=lambda one: one.number)
        needed = {version.number for version in ones if version.number == self.running or version.status in WAITS}
        needed |= {one.number for one in [version for version in ones if version.steady][-2:]}
        spare = [version.number for version in ones if version.number not in needed]
        dropped = set(spare[: max(len(ones) - KEPT, 0)])
        return [version for version in ones if version.number not in dropped]

    def pending(self) -> list[JobVersion]:
        """Return the versions that wait for a restart, in the order of their requests."""
        waiting = [
            version for version in self.versions.values() if version.status is VersionStatus.PENDING and version.runs
        ]
        return sorted(waiting, key=lambda one: (one.asked_ns, one.number))

    def urgent(self) -> list[JobVersion]:
        """Return the waiting versions that do not wait for a recovery."""
        return [version for version in self.pending() if version.wanted.urgency is Urgency.URGENT]

    def next_due_ns(self) -> int:
        """Return when the first waiting version is forced; 0: none waits."""
        return min((version.due_ns for version in self.pending()), default=0)

    def before(self) -> JobVersion | None:
        """Return the version that ran before the running version; None: not known."""
        ran = [version for version in self.versions.values() if version.ranges and version.number != self.running]
        return max(ran, key=lambda one: one.ranges[-1], default=None)

    def changed(self) -> list[JobVersion]:
        """Return the changed versions, in order."""
        return [self.versions[number] for number in sorted(self.touched) if number in self.versions]

    # Changes of the book.

    def take(self, told: Iterable[JobVersion]) -> None:
        """Merge newer records of some versions from another book."""
        for one in told:
            self.put(one)

    def put(self, version: JobVersion) -> None:
        """Store the record of one version."""
        self.versions[version.number] = version
        self.touched.add(version.number)

    def change(self, number: int, **changes: object) -> JobVersion:
        """Change fields of one version, and return it."""
        changed = self.versions[number].model_copy(update=changes)
        self.versions[number] = changed
        self.touched.add(number)
        return changed

    def began_with(self, spec: JobSpec, now_ns: int, launched: tuple[int, int] | None = None) -> None:
        """Record the code that the job was started with as its first version, if it is not known yet.

        Args:
            spec: The spec of the job.
            now_ns: The current time.
            launched: Generation and step at which the job began, if it ran before versions were recorded: no failure
            counts
                against its code.
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
        """Add a requested version that has to be made, and return it with a new number."""
        number = max([*self.versions, self.running, 0]) + 1
        made = JobVersion(
            number=number, runs=request.made, request=request, status=VersionStatus.CHECKING, asked_ns=now_ns
        )
        self.put(made)
        return made

    def wait_for_restart(self, number: int, now_ns: int, again: UpdateRequest | None = None) -> JobVersion:
        """Let a version that passed its checks, or ran before, wait for the next restart; after its window it is
        forced."""
        request = again or self.versions[number].request
        window_ns = 0 if request.urgency is Urgency.URGENT else int(request.window_h * 3600e9)
        asked_ns = now_ns if again else self.versions[number].asked_ns
        return self.change(
            number, status=VersionStatus.PENDING, again=again, due_ns=now_ns + window_ns, asked_ns=asked_ns, why=""
        )

    def withdraw(self, number: int, why: str) -> bool:
        """Withdraw a requested version; return whether it had not been applied yet."""
        version = self.versions.get(number)
        if version is None or version.status not in WAITS:
            return False
        ran = bool(version.ranges)
        status = VersionStatus.REPLACED if ran else VersionStatus.WITHDRAWN
        self.change(number, status=status, why=why, due_ns=0, again=None)
        return True

    def refuse(self, number: int, why: str) -> None:
        """Refuse a version that cannot run."""
        self.change(number, status=VersionStatus.REFUSED, why=why, due_ns=0)

    def come(self, number: int, *, suspect: str = "", now_ns: int) -> None:
        """Make this version the running version from the next launch on.

        Args:
            number: The number of the version.
            suspect: Why the running version is suspect; empty: it is not, or no version runs.
            now_ns: The current time.
        """
        coming, before = self.versions[number], self.versions.get(self.running)
        for other in self.pending():
            if other.number != number and other.asked_ns <= coming.asked_ns:
                status = VersionStatus.REPLACED if other.ranges else VersionStatus.SUPERSEDED
                self.change(other.number, status=status, why=f"v{number} came with the same restart", due_ns=0)
        if before is not None and before.number != number:
            ended = f"rolled back to v{number}: {suspect}" if suspect else f"v{number} came"
            status = VersionStatus.SUSPECT if suspect else VersionStatus.REPLACED
            self.change(before.number, status=status, why=suspect, ended=ended)
        self.change(number, status=VersionStatus.RUNNING, began_ns=now_ns, due_ns=0, ended="", why="", failed=0)
        self.running = number

    def launched(self, generation: int, step: int, now_ns: int) -> None:
        """Record that a generation of the running version is launched at a step: earlier steps of the version end
        there."""
        for one in list(self.versions.values()):
            if one.ranges and one.ranges[-1][2] < 0 and one.number != self.running:
                came, begin, _ = one.ranges[-1]
                self.change(one.number, ranges=[*one.ranges[:-1], (came, begin, step)])
        version = self.versions.get(self.running)
        if version is None:
            return
        if not version.began_ns:
            version = self.change(version.number, began_ns=now_ns)
        if version.ranges and version.ranges[-1][2] < 0:
            came, begin, _ = version.ranges[-1]
            ranges = [*version.ranges[:-1], (came, min(begin, step), -1)]
        else:
            ranges = [*version.ranges, (generation, step, -1)]
        self.change(version.number, ranges=ranges[-RANGES_KEPT:])

    def came_to(self, failure: Failure, policy: RecoveryPolicy, before: Failure | None = None) -> None:
        """Record the step that the job reached with the running version, and whether the version passed its first steps
        and is steady.

        Args:
            failure: The failure that stopped the job.
            policy: The limits.
            before: The failure before it that is not solved yet; None: there is none.
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

    def acquit(self, number: int, why: str) -> None:
        """Clear a version of suspicion: its rollback did not help."""
        version = self.versions.get(number)
        if version is not None and version.status is VersionStatus.SUSPECT:
            self.change(number, status=VersionStatus.REPLACED, why=why)

    def end(self, why: str) -> None:
        """The job is over: what runs ended with it, and what waits is not applied any more."""
        for version in list(self.versions.values()):
            if version.status in WAITS:
                self.withdraw(version.number, why)
            elif version.number == self.running and version.status is VersionStatus.RUNNING:
                self.change(version.number, ended=why)

    def count_failure(self) -> None:
        """The version that runs failed, and may have caused it."""
        version = self.versions.get(self.running)
        if version is not None and not (version.steady or version.proven):
            self.change(version.number, failed=version.failed + 1)
