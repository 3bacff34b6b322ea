"""The list of all detection rules. A new rule needs a function and a line here."""

from __future__ import annotations

from collections.abc import Iterator

from everstep.decisions.detect.hang import HANG, STOPPED_RANK
from everstep.decisions.detect.job_facts import JobFacts, Rule
from everstep.decisions.detect.lost_machine import LOST_MACHINE, SILENT_MACHINE
from everstep.decisions.detect.machine_fault import MACHINE_FAULT
from everstep.decisions.detect.not_finite import NOT_FINITE
from everstep.decisions.detect.rank_ends import EARLY_EXIT, FAILED_RANK
from everstep.decisions.detect.slow_steps import SLOW_STEPS
from everstep.decisions.detect.stale_checkpoint import STALE_CHECKPOINT
from everstep.model.incident import Anomaly

RULES: tuple[Rule, ...] = (
    FAILED_RANK,
    EARLY_EXIT,
    LOST_MACHINE,
    NOT_FINITE,
    SILENT_MACHINE,
    STOPPED_RANK,
    HANG,
    STALE_CHECKPOINT,
    MACHINE_FAULT,
    SLOW_STEPS,
)
"""The rules in order: rules that name a rank or a machine are first, faults with which the job continues are last."""


def anomalies(facts: JobFacts) -> Iterator[Anomaly]:
    """Return the anomalies of all rules, each with the name of its rule; the job accepts the first anomaly."""
    for rule in RULES:
        if anomaly := rule.find(facts):
            yield anomaly.model_copy(update={"rule": rule.name})
