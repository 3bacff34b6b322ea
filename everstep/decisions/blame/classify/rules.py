"""All rules of classification, and which rule a line matches: quickly, since thousands of ranks write the same line."""

from __future__ import annotations

import re

from everstep.decisions.blame.classify.rule import FaultClass, LogRule, Role, Weight
from everstep.decisions.blame.classify.rules_code import CODE_RULES
from everstep.decisions.blame.classify.rules_communication import COMMUNICATION_RULES
from everstep.decisions.blame.classify.rules_gpu import GPU_RULES
from everstep.decisions.blame.classify.rules_host import HOST_RULES
from everstep.decisions.blame.classify.rules_network import NETWORK_RULES
from everstep.decisions.blame.classify.rules_process import PROCESS_RULES
from everstep.decisions.blame.classify.rules_scheduler import SCHEDULER_RULES
from everstep.decisions.blame.classify.rules_storage import STORAGE_RULES
from everstep.model.finding import Owner

ERRNO = "Linux: text of errno"

GENERAL_RULES = (
    LogRule(
        "missing-file",
        FaultClass.MISSING_FILE,
        Owner.UNKNOWN,
        ("filenotfounderror", "no such file or directory"),
        r"FileNotFoundError|No such file or directory",
        ERRNO + ", ENOENT: code and data may both be wrong",
        ("FileNotFoundError: [Errno 2] No such file or directory: '/data/train.bin'",),
        ("no such files were needed",),
        weight=Weight.WEAK,
    ),
    LogRule(
        "permission",
        FaultClass.PERMISSION,
        Owner.UNKNOWN,
        ("permissionerror", "permission denied", "operation not permitted"),
        r"PermissionError|: Permission denied|Operation not permitted",
        ERRNO + ", EACCES, EPERM",
        ("PermissionError: [Errno 13] Permission denied: '/data/out'",),
        ("permission denied requests: 0",),
        weight=Weight.WEAK,
    ),
    LogRule(
        "bare-connection-lost",
        FaultClass.CONNECTION_LOST,
        Owner.UNKNOWN,
        ("reset by peer", "broken pipe", "connection refused"),
        r"Connection reset by peer|Broken pipe|Connection refused",
        "Linux: ECONNRESET, EPIPE, ECONNREFUSED; of a peer or of another service",
        ("ConnectionResetError: [Errno 104] Connection reset by peer", "BrokenPipeError: [Errno 32] Broken pipe"),
        ("the pipe is broken",),
        role=Role.LOSS,
        weight=Weight.WEAK,
    ),
)
"""The lists of rules, in the order in which they are tried."""


LOG_RULES: tuple[LogRule, ...] = (
    *SCHEDULER_RULES,
    *GPU_RULES,
    *COMMUNICATION_RULES,
    *HOST_RULES,
    *NETWORK_RULES,
    *STORAGE_RULES,
    *CODE_RULES,
    *PROCESS_RULES,
    *GENERAL_RULES,
)
"""The rules in the order in which they are tried: a line belongs to the first rule that matches."""

TRIGGERS = (
    b"error",
    b"exception",
    b"fail",
    b"timed out",
    b"timeout",
    b"xid",
    b"killed",
    b"oom",
    b"signal",
    b"traceback",
    b"abort",
    b"cannot",
    b"evicted",
    b"preempt",
    b"terminate",
    b"not found",
    b"interrupt",
    b"no such",
    b"could",
    b"unable to",
    b"deadline",
    b"backoff",
    b"nccl",
    b"link",
    b"taking the",
    b"lockup",
    b"blocked for",
    b"not respond",
    b"notready",
    b"segmentation",
    b"read-only",
    b"wrong fs",
    b"sigterm",
)
"""Lower-case texts: only lines with at least one of them are matched. Each example of a rule has one of them (a test
checks that); fewer texts are faster."""


KEPT = 8192
"""Shapes of lines whose rule is remembered."""
READ = 2000
"""The number of characters of a line that are matched: a longer line is cut, and its end is kept too."""
# Numbers that decide are short: of an Xid, a signal, an errno, an exit code.
_VARYING = re.compile(r"0x[0-9a-fA-F]+|\d+(?:[.:,]\d+)+|\d{4,}|(?<=[Rr]ank )\d+|(?<=\[rank)\d+|(?<=\[default)\d+")


class LineMatcher:
    """Finds the rule of a line, and remembers it for lines of the same shape."""

    def __init__(self, rules: tuple[LogRule, ...] = LOG_RULES) -> None:
        self._rules = rules
        self._known: dict[str, LogRule | None] = {}

    def rule_of(self, line: str) -> LogRule | None:
        """The first rule that a cleaned line matches; None: none does."""
        if len(line) > READ:
            line = line[: READ - READ // 4] + line[-READ // 4 :]
        shape = _VARYING.sub("0", line)
        try:
            return self._known[shape]
        except KeyError:
            pass
        lowered = line.lower()
        found = next((rule for rule in self._rules if rule.is_in_hinted(line, lowered)), None)
        if len(self._known) >= KEPT:
            self._known.clear()
        self._known[shape] = found
        return found
