"""The pages about rules: detection, eviction, a stopped job, the ladder, the classes of faults."""

from __future__ import annotations

from docs.generate.flowchart import diagram
from docs.generate.markdown import code, first_paragraph, paragraph, sentence, table
from everstep.decisions.act.evict.rules import RULES as EVICT_RULES
from everstep.decisions.act.evict.rules import EvictRule
from everstep.decisions.act.ladder.next_rung import DEFAULT_MODES
from everstep.decisions.act.ladder.paths import PATHS
from everstep.decisions.act.recover.rules import RULES as RESTART_RULES
from everstep.decisions.act.recover.rules import RestartRule
from everstep.decisions.blame.classify.rules import LOG_RULES
from everstep.decisions.detect.rules import RULES as DETECT_RULES
from everstep.model.checkpoint_policy import CheckpointPolicy
from everstep.model.recovery_policy import RecoveryPolicy


def detection() -> str:
    """Rules of detection with the default numbers."""
    numbers = {"policy": RecoveryPolicy(), "checkpoint": CheckpointPolicy()}
    rows = [(code(rule.name), rule.finds, rule.threshold.format(**numbers), rule.source) for rule in DETECT_RULES]
    intro = paragraph(
        "Each worker asks these rules, in this order, about every running job.",
        "The numbers are the defaults of [`[policy]`](policy.md) and [`[checkpoint]`](checkpoint.md).",
    )
    return f"{intro}\n\n{table(('rule', 'detects', 'after', 'source'), rows)}"


def eviction() -> str:
    """Rules of eviction in the order in which they are asked."""
    evicting = table(
        ("rule", "mode", "evicts", "numbers", "source"),
        [
            (code(rule.name), rule.mode, sentence(rule.asks), _numbers(rule), rule.paper)
            for rule in EVICT_RULES
            if rule.evicts
        ],
    )
    others = table(
        ("rule", "why it evicts no machine", "source"),
        [(code(rule.name), sentence(rule.asks), rule.paper) for rule in EVICT_RULES if not rule.evicts],
    )
    intro = paragraph(
        "The rules are asked in this order. The first rule that evicts a machine is named in the incident.",
        "[Eviction](../concepts/eviction.md) explains modes and the breaker.",
    )
    why_not = "## Rules that evict no machine\n\nThey explain why a finding is not enough."
    return f"{intro}\n\n{evicting}\n\n{why_not}\n\n{others}"


def _numbers(rule: EvictRule) -> str:
    own = [f"`{name}` = {RecoveryPolicy().value(name):g} ({code('[policy]')})" for name in rule.settings]
    return "; ".join([*own, *(f"`{number.name}` = {number.value:g}" for number in rule.fixed)])


def restart() -> str:
    """Rules about a stopped job, in the order in which they are asked."""
    rows = [(code(rule.name), first_paragraph(rule.decide.__doc__), _when_not(rule)) for rule in RESTART_RULES]
    intro = paragraph(
        "A job is stopped: the first of these rules that answers decides what is done next. Most of them park the job",
        "([a parked job](../guides/parked-job.md)); the last ones launch it again.",
    )
    return f"{intro}\n\n{table(('rule', 'when it answers', 'not asked'), rows)}"


def _when_not(rule: RestartRule) -> str:
    reasons = {
        "after an operator's resume": not rule.binds_operator,
        "where other code comes": rule.of_the_code,
        "for the first launch without a machine at fault": rule.counts_failures,
    }
    return "; ".join(reason for reason, holds in reasons.items() if holds)


def ladder() -> str:
    """Paths of the ladder, as a table and as a flow chart."""
    rows = [(code(path.name), path.when, " → ".join(path.rungs), path.source) for path in PATHS]
    modes = ", ".join(f"`{rung}`: {mode}" for rung, mode in DEFAULT_MODES.items())
    intro = paragraph(
        "The first row that fits a failure counts. [The ladder](../concepts/ladder.md) explains the rungs.",
        f"Modes by default: {modes}.",
    )
    return f"{intro}\n\n{table(('path', 'when', 'rungs', 'source'), rows)}\n\n```mermaid\n{diagram()}\n```"


def fault_classes() -> str:
    """Classes of log lines and exits, with owner and reason codes."""
    grouped: dict[tuple[str, str], list[str]] = {}
    for rule in LOG_RULES:
        grouped.setdefault((str(rule.fault), str(rule.owner)), []).append(rule.name)
    rows = [(fault, owner, ", ".join(map(code, codes))) for (fault, owner), codes in grouped.items()]
    intro = paragraph(
        "[Classification](../concepts/classification.md) explains how the first cause is found.",
        "Three more classes have no rule: *user exception* (owner code, reason `user-exception`), an exception that no",
        "rule knows; *no failure*, exit code 0 and nothing that ended a process; and *unknown*.",
    )
    return f"{intro}\n\n{table(('class', 'owner', 'reason codes'), rows)}"
