"""A fault that makes a rank allocate memory until the kernel kills it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from drills.faults.fault import RankFault
from drills.inject import process_group
from drills.inject.context import DrillContext
from drills.spec.fault import Entry, ExpectedFinding, OnRanks
from everstep.errors import CannotInject
from everstep.model.finding import Health, Owner
from everstep.model.job import JobSpec

ROOTS = ((Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"), (Path("/sys/fs/cgroup"), "memory.max"))
"""Folder of control groups, and name of the file of their memory limit, for both versions of cgroups."""
LIMIT = 64 << 20
"""Memory limit of the control group, bytes."""


class OutOfMemory(OnRanks, RankFault):
    """A rank joins a control group with little memory, and allocates more."""

    name = "oom"
    summary = "a rank allocates memory until the kernel kills it, in a control group of its own"
    line = "{ranks} is killed for memory"
    fixed_finding = ExpectedFinding("oom-kill-limit", Owner.CODE, Health.UNKNOWN)
    action = "oom"
    own_job = True

    def details(self, spec: JobSpec) -> Entry:
        return {"group": str(_root()[0] / process_group.name())}

    def why_not(self) -> str:
        """Return why the control group cannot be made; empty: it can."""
        try:
            with small_group():
                return ""
        except CannotInject as error:
            return str(error)

    def prepared(self, context: DrillContext) -> AbstractContextManager[None]:
        """Make the control group; it exists until the job has ended."""
        return small_group()


@contextmanager
def small_group() -> Iterator[None]:
    """Make a control group with little memory, which exists while the block runs.

    Raises:
        CannotInject: the group cannot be made.
    """
    root, limit = _root()
    with process_group.made(root, {limit: str(LIMIT)}, "with a limit of memory"):
        yield


def _root() -> tuple[Path, str]:
    return next((root for root in ROOTS if Path(*root).exists()), ROOTS[-1])
