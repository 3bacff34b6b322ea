"""Lists all classification rules, and finds the rule that a line matches."""

from __future__ import annotations

import re

from everstep.decisions.blame.classify.rule import ERRNO, FaultClass, LogRule, Role, Weight
from everstep.decisions.blame.classify.rules_code import CODE_RULES
from everstep.decisions.blame.classify.rules_communication import COMMUNICATION_RULES
from everstep.decisions.blame.classify.rules_gpu import GPU_RULES
from everstep.decisions.blame.classify.rules_host import HOST_RULES
from everstep.decisions.blame.classify.rules_network import NETWORK_RULES
from everstep.decisions.blame.classify.rules_process import PROCESS_RULES, RAY_RULES
from everstep.decisions.blame.classify.rules_scheduler import SCHEDULER_RULES
from everstep.decisions.blame.classify.rules_storage import STORAGE_RULES
from everstep.model.finding import Owner

GENERAL_RULES = (
    LogRule(
        "file-race",
        FaultClass.USER_EXCEPTION,
        Owner.CODE,
        hints="no such file or directory|directory not empty|file exists|could not be acquired",
        pattern=(
            r"No such file or directory: '[^']*(?:/tmp[-_][^/']+|\.tmp|\.lock|\.incomplete|\.partial)['/]"
            r"|\[Errno 39\] Directory not empty|\[Errno 17\] File exists|file lock '[^']*' could not be acquired"
        ),
        source=ERRNO + ", ENOENT, ENOTEMPTY, EEXIST of a temporary file: another rank was faster; filelock",
        matches=(
            "OSError: [Errno 39] Directory not empty: '/code/results/tmp-checkpoint-s0y' -> "
            "'/code/results/checkpoint-50'",
            "FileNotFoundError: [Errno 2] No such file or directory: '/code/results/tmp-checkpoint-s0yubqtr'",
            "filelock._error.Timeout: The file lock '/cache/kernels/build.lock' could not be acquired.",
        ),
        misses=("FileNotFoundError: [Errno 2] No such file or directory: '/data/train.bin'",),
    ),
    LogRule(
        "missing-file",
        FaultClass.MISSING_FILE,
        Owner.UNKNOWN,
        hints="filenotfounderror|no such file or directory|parent directory|cannot be opened",
        pattern=(
            r"FileNotFoundError|No such file or directory|Parent directory \S+ does not "
            r"exist|File \S+ cannot be opened"
        ),
        source=ERRNO + ", ENOENT; the code or the data may be wrong",
        matches=(
            "FileNotFoundError: [Errno 2] No such file or directory: '/data/train.bin'",
            "RuntimeError: Parent directory /ckpt does not exist.",
        ),
        misses=("no such files were needed",),
        weight=Weight.WEAK,
    ),
    LogRule(
        "permission",
        FaultClass.PERMISSION,
        Owner.UNKNOWN,
        hints="permissionerror|permission denied|operation not permitted",
        pattern="PermissionError|: Permission denied|Operation not permitted",
        source=ERRNO + ", EACCES, EPERM",
        matches=("PermissionError: [Errno 13] Permission denied: '/data/out'",),
        misses=("permission denied requests: 0",),
        weight=Weight.WEAK,
    ),
    LogRule(
        "bare-connection-lost",
        FaultClass.CONNECTION_LOST,
        Owner.UNKNOWN,
        hints="reset by peer|broken pipe|connection refused",
        pattern="Connection reset by peer|Broken pipe|Connection refused",
        source="Linux: ECONNRESET, EPIPE, ECONNREFUSED; the other side may be a peer or any service",
        matches=(
            "ConnectionResetError: [Errno 104] Connection reset by peer",
            "BrokenPipeError: [Errno 32] Broken pipe",
        ),
        misses=("the pipe is broken",),
        role=Role.LOSS,
        weight=Weight.WEAK,
    ),
)
LOG_RULES: tuple[LogRule, ...] = (
    *SCHEDULER_RULES,
    *RAY_RULES,
    *GPU_RULES,
    *COMMUNICATION_RULES,
    *HOST_RULES,
    *NETWORK_RULES,
    *STORAGE_RULES,
    *CODE_RULES,
    *PROCESS_RULES,
    *GENERAL_RULES,
)
"""All rules, in order: a line belongs to the first rule that matches it."""
FRAME_RULES = tuple(rule for rule in LOG_RULES if rule.of_frame)

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
    b"access fault",
    b"gpu reset",
    b"(rev ff)",
    b"has died",
    b"marked dead",
    b"exceeded",
    b"finite",
    b"finished",
    b"complete",
    b"training done",
    b"train_runtime",
    b"end time of",
    b"`trainer.fit`",
    b"what():",
    b"uncorrectable",
    b"nvrm",
)
"""Lower-case texts. Only a line with at least one of them is compared with the rules, which saves most of the time. A
test checks that each example of each rule has one."""
NAN = re.compile(rb"nan\b(?! iterations)")
"""A further trigger, for text in lower case. It leaves out "nan iterations", whose number Megatron-LM writes at each
step."""
STEPS = tuple(re.compile(text) for text in (rb"loss[^\w\n]{1,4}(?:\d|nan)", rb"step[^\w\n]{1,9}\d", rb"it/s", rb"s/it"))
"""The patterns of a report of a training step, for text in lower case."""
SHAPES_KEPT = 8192
"""Number of line shapes whose rule is remembered."""
CHARACTERS_READ = 2000
"""Number of characters of a line that are compared with the rules. Of a longer line, three quarters of these characters
are its beginning, and one quarter is its end."""
# Numbers that may differ between lines of one shape. A short number may not, since it may be an Xid or a signal.
_VARYING = re.compile(r"0x[0-9a-fA-F]+|\d+(?:[.:,]\d+)+|\d{4,}|(?<=[Rr]ank )\d+|(?<=\[rank)\d+|(?<=\[default)\d+")


class LineMatcher:
    """The search for the rule of a line.

    It remembers the rule of each line shape, since thousands of ranks write similar lines.
    """

    def __init__(self) -> None:
        self._rule_of_shape: dict[str, LogRule | None] = {}

    def rule_of(self, line: str) -> LogRule | None:
        """Return the first rule that a line without prefix matches; None if no rule matches."""
        if len(line) > CHARACTERS_READ:
            line = line[: CHARACTERS_READ - CHARACTERS_READ // 4] + line[-CHARACTERS_READ // 4 :]
        shape = line if "Xid (" in line else _VARYING.sub("0", line)  # the registers of an Xid may decide its rule
        try:
            return self._rule_of_shape[shape]
        except KeyError:
            pass
        lowered = line.lower()
        rule = next((rule for rule in LOG_RULES if rule.is_in(line, lowered)), None)
        if len(self._rule_of_shape) >= SHAPES_KEPT:
            self._rule_of_shape.clear()
        self._rule_of_shape[shape] = rule
        return rule
