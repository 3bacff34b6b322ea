"""Defines the form of a classification rule: what a kind of log line looks like, and what it means."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from functools import cache

from everstep.model.finding import Owner

KERNEL = "Linux kernel log"
ERRNO = "Linux: text of errno"


class FaultClass(StrEnum):
    """The class of a fault.

    The classes up to ``DISK_FAULT`` are the explicit failures of ByteRobust, table 1; the others are everstep's own.
    """

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


MAYBE_HARDWARE = frozenset(
    {
        FaultClass.CUDA_ERROR,
        FaultClass.GPU_MEMORY,
        FaultClass.GPU_UNAVAILABLE,
        FaultClass.NCCL_ERROR,
        FaultClass.INFINIBAND,
        FaultClass.NETWORK,
        FaultClass.HANG,
    }
)
"""Classes of faults that a GPU or the network may cause even if the owner is not known, so the code is not blamed
alone."""


class Role(IntEnum):
    """The role of a line in the course of a failure: a lower value is nearer to the beginning."""

    CAUSE = 0
    END = 1
    """The line shows how a process ended but not why: for example that it was killed, but not who killed it."""
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
    """How much a line proves by itself."""

    SURVIVED = 0
    """The program continued after the line, or the line says that it will."""
    WEAK = 1
    """The line has only a common word: it counts if no stronger line exists."""
    PLAIN = 2
    DECISIVE = 3
    """No program continues after such a line."""


@dataclass(frozen=True, slots=True)
class LogRule:
    """A kind of log line and its meaning."""

    name: str
    """The reason code. It stays the same, since other programs rely on it."""
    fault: FaultClass
    owner: Owner
    hints: str
    """Lower-case texts, separated by ``|``. A line of this kind has at least one of them. The search for them is a fast
    check before the pattern is tried."""
    pattern: str
    """Regular expression, searched for in the line without regard to case."""
    source: str
    """The program or document from which the form of the line is known."""
    matches: tuple[str, ...]
    """Examples of lines of this kind."""
    misses: tuple[str, ...]
    """Examples of lines that look similar and are not of this kind."""
    role: Role = Role.CAUSE
    weight: Weight = Weight.PLAIN
    vague: bool = False
    """The line says that something failed, but not why. A further line of its message, or another cause, may be
    clearer."""
    times: int = 1
    """A client that writes such a line tries again, so a single line shows nothing. It takes so many of them, right
    before the end."""
    of_frame: bool = False
    """The pattern is searched for in the innermost frame of a traceback and its exception, as one line."""

    def is_in(self, line: str, lowered: str = "") -> bool:
        """Return whether a line is of this kind; ``lowered`` is the line in lower case, if the caller has it."""
        lowered = lowered or line.lower()
        hinted = any(hint in lowered for hint in _separate(self.hints))
        return hinted and _compiled(self.pattern).search(line) is not None


@cache
def _separate(hints: str) -> tuple[str, ...]:
    return tuple(hints.split("|"))


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern, re.IGNORECASE)
