"""The form of a classification rule: data about one kind of line."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from functools import cache

from everstep.model.finding import Owner


class FaultClass(StrEnum):
    """The class of a fault. The first classes are explicit failures of ByteRobust, table 1; the rest are everstep's
    own."""

    CUDA_ERROR = "cuda error"
    HOST_OVERLOAD = "cpu overload"
    HOST_OUT_OF_MEMORY = "cpu out of memory"
    DISK_FULL = "disk full"
    INFINIBAND = "infiniband error"
    MOUNT = "file system mount"
    REMOTE_STORAGE = "remote storage"
    CONTAINER = "container error"
    KERNEL_PANIC = "kernel panic"
    GPU_MEMORY = "gpu memory error"
    EXTERNAL_SERVICE = "external service"
    GPU_UNAVAILABLE = "gpu unavailable"
    DISK_FAULT = "disk fault"
    HANG = "hang"
    NAN = "nan value"
    GPU_OUT_OF_MEMORY = "gpu out of memory"
    NCCL_ERROR = "nccl error"
    CONNECTION_LOST = "connection lost"
    NETWORK = "network"
    DNS = "name resolution"
    PORT_TAKEN = "port taken"
    USER_EXCEPTION = "user exception"
    WRONG_USAGE = "wrong usage"
    DEPENDENCY = "dependency"
    DATA_ERROR = "data error"
    MISSING_FILE = "missing file"
    PERMISSION = "permission"
    LIMIT = "process limit"
    SHARED_MEMORY = "shared memory full"
    PREEMPTED = "preempted"
    TIME_LIMIT = "time limit"
    CANCELLED = "cancelled"
    EVICTED = "evicted"
    NODE_FAILED = "node failed"
    INTERRUPTED = "interrupted"
    KILLED = "killed"
    TERMINATED = "terminated"
    CRASHED = "native crash"
    NO_FAILURE = "no failure"
    UNKNOWN = "unknown"


class Role(IntEnum):
    """The role of a line in the course of a failure; the lower, the nearer to its beginning."""

    CAUSE = 0
    END = 1
    """The line shows how a process ended, but not why: e.g. that it was killed, but not by which process."""
    WAIT = 2
    """The line shows a consequence: a process waited for another process in vain."""
    LOSS = 3
    """A consequence: the connection to another process broke."""
    SUMMARY = 4
    """A launcher reports that a process failed."""

    @property
    def is_consequence(self) -> bool:
        """Whether the cause is in another process."""
        return self >= Role.WAIT


class Weight(IntEnum):
    """How much a single line proves without further lines."""

    SURVIVED = 0
    """The program continued, or reports that it does."""
    WEAK = 1
    """The line has a common word: it counts only if there is nothing better."""
    PLAIN = 2
    DECISIVE = 3
    """Nothing goes on after it."""


@dataclass(frozen=True, slots=True)
class LogRule:
    """A kind of line, and its meaning."""

    name: str
    """The stable reason code on which other programs rely."""
    fault: FaultClass
    owner: Owner
    hints: tuple[str, ...]
    """Lower-case texts of which a line has at least one: a fast check before the pattern."""
    pattern: str
    """Regular expression, searched for in the line without regard to case."""
    source: str
    """The source of the format."""
    matches: tuple[str, ...]
    """Examples of lines."""
    misses: tuple[str, ...]
    """Lines that look alike and are something else."""
    role: Role = Role.CAUSE
    weight: Weight = Weight.PLAIN

    def is_in(self, line: str) -> bool:
        """Return whether a line is of this kind."""
        lowered = line.lower()
        return any(hint in lowered for hint in self.hints) and _compiled(self.pattern).search(line) is not None

    def is_in_hinted(self, line: str, lowered: str) -> bool:
        """Return whether the line is of this kind; ``lowered``: its text in lower case."""
        for hint in self.hints:
            if hint in lowered:
                return _compiled(self.pattern).search(line) is not None
        return False


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern, re.IGNORECASE)
