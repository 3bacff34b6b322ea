"""A rank that ended by a signal, an exception or an exit code other than 0."""

from __future__ import annotations

from everstep.decisions.detect.exits import anomaly_of, is_success
from everstep.decisions.detect.facts import JobFacts
from everstep.decisions.detect.root_cause import first_failure
from everstep.decisions.detect.rule import Rule
from everstep.model.incident import Anomaly


def judge(facts: JobFacts) -> Anomaly | None:
    """The first failure, once any rank failed; a rank that left early with success may be why the others did."""
    ends = facts.exits.values()
    if all(map(is_success, ends)):
        return None
    culprit = first_failure([seen.end for seen in ends if not (seen.finished and is_success(seen))])
    assert culprit is not None
    return anomaly_of(facts, next(seen for seen in ends if seen.end is culprit))


FAILED_RANK = Rule(
    name="failed-rank",
    finds="a rank ended by a signal, an exception or an exit code other than 0",
    threshold="at once",
    source="ByteRobust, section 4.1: the exits of training processes",
    judge=judge,
)
