"""Words that many parts use alike: tried last, when no other rule knows the line."""

from __future__ import annotations

from everstep.decisions.blame.classify.rule import FaultClass, LogRule, Role, Weight
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
"""In the order in which they are tried."""
