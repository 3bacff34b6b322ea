"""What a rule of classification is: data about one kind of line."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from functools import cache

from everstep.model.finding import Owner


class FaultClass(StrEnum):
    """What happened. The first ones are explicit failures of ByteRobust, table 1; the others are ours."""

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
    """What a line is in the story of a failure; the lower, the nearer to its beginning."""

    CAUSE = 0
    END = 1
    """How a process ended, and not why: killed, by whom it does not say."""
    WAIT = 2
    """A consequence: somebody waited for another process, in vain."""
    LOSS = 3
    """A consequence: the connection to another process broke."""
    SUMMARY = 4
    """A launcher tells that a process failed."""

    @property
    def is_consequence(self) -> bool:
        """Whether the cause lies in another process."""
        return self >= Role.WAIT


class Weight(IntEnum):
    """How much one line says when nothing stands beside it."""

    SURVIVED = 0
    """The program went on, or says that it does."""
    WEAK = 1
    """A word that many use: it counts where nothing better is there."""
    PLAIN = 2
    DECISIVE = 3
    """Nothing goes on after it."""


@dataclass(frozen=True, slots=True)
class LogRule:
    """One kind of line, and what it means.

    A line belongs to the first rule of the list that matches it, so special rules come before general ones.
    """

    name: str
    """Reason code, stable: other programs rely on it."""
    fault: FaultClass
    owner: Owner
    hints: tuple[str, ...]
    """Lower-case texts of which a line has at least one: a quick look before the pattern."""
    pattern: str
    """Regular expression, searched for in the line without regard to case."""
    source: str
    """Where the format is known from."""
    matches: tuple[str, ...]
    """Examples of lines."""
    misses: tuple[str, ...]
    """Lines that look alike and are something else."""
    role: Role = Role.CAUSE
    weight: Weight = Weight.PLAIN

    def is_in(self, line: str) -> bool:
        """Whether a line is of this kind."""
        lowered = line.lower()
        return any(hint in lowered for hint in self.hints) and _compiled(self.pattern).search(line) is not None

    def is_in_hinted(self, line: str, lowered: str) -> bool:
        """Whether it knows the line, whose text in lower case is at hand."""
        for hint in self.hints:
            if hint in lowered:
                return _compiled(self.pattern).search(line) is not None
        return False


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern, re.IGNORECASE)
