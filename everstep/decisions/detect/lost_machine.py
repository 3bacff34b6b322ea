"""A machine that answers again and knows nothing of the ranks that it ran.

Ranks elsewhere need not notice: collectives can wait for ten minutes, and when
all machines are lost nobody is left to notice.
"""

from __future__ import annotations

from everstep.decisions.detect.facts import JobFacts
from everstep.decisions.detect.root_cause import headline_of_loss
from everstep.decisions.detect.rule import Rule
from everstep.model.incident import Anomaly, Symptom


def judge(facts: JobFacts) -> Anomaly | None:
    """All such machines in one anomaly."""
    if not facts.lost:
        return None
    return Anomaly(
        id=f"lost-{facts.spec.name}-{facts.generation}",
        generation=facts.generation,
        symptom=Symptom.CRASH,
        headline=headline_of_loss(facts.lost, None),
        ranks=sorted(rank for ranks in facts.lost.values() for rank in ranks),
        machines=sorted(facts.lost),
        seen_ns=facts.now_ns,
        quiet_s=facts.quiet_s,
    )


LOST_MACHINE = Rule(
    name="lost-machine",
    finds="a machine came back and knows nothing of the ranks that it ran",
    threshold="at once",
    source="",
    judge=judge,
)
