"""All rules of classification, and which texts a chunk of a log is searched for first."""

from __future__ import annotations

from everstep.decisions.blame.classify.rule import LogRule
from everstep.decisions.blame.classify.rules_code import CODE_RULES
from everstep.decisions.blame.classify.rules_communication import COMMUNICATION_RULES
from everstep.decisions.blame.classify.rules_general import GENERAL_RULES
from everstep.decisions.blame.classify.rules_gpu import GPU_RULES
from everstep.decisions.blame.classify.rules_host import HOST_RULES
from everstep.decisions.blame.classify.rules_network import NETWORK_RULES
from everstep.decisions.blame.classify.rules_process import PROCESS_RULES
from everstep.decisions.blame.classify.rules_scheduler import SCHEDULER_RULES
from everstep.decisions.blame.classify.rules_storage import STORAGE_RULES

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
"""In the order in which they are tried: a line belongs to the first that matches."""

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
"""Lower-case texts: only lines with one of them are looked at. Each example of a rule has one of them (a test holds
that); the fewer there are, the faster it is."""
