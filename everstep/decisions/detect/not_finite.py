"""The detection of a loss or gradient norm that is NaN or infinite, on some or all ranks.

Every step is saved, so the newest states are as bad as the loss. The anomaly names the last state that can be trusted
(``not_after``). A jump to another finite value is shown, but is no anomaly: training may recover from it (ADR 0037).
"""

from __future__ import annotations

from collections.abc import Sequence

from everstep.base.text import listed
from everstep.decisions.detect.job_facts import JobFacts, RankFacts, ReportedNumber, Rule
from everstep.model.incident import Anomaly, Symptom

AWAIT_S = 5.0
"""If no rank steps for this many seconds, missing reports are not waited for."""
LATE_STEPS = 8
"""A rank that is this many steps past a step without a report of it does not report every step."""
NAMED = 4
"""The largest number of ranks that a headline names."""


def find_not_finite(facts: JobFacts) -> Anomaly | None:
    """Return an anomaly that names the ranks which first reported a bad value.

    The other ranks' reports of that step are awaited first, since a NaN spreads to all ranks with the next update.
    """
    policy = facts.spec.policy
    if not facts.newest or not any(
        _lasts(rank.loss, policy.nan.loss_steps) or _lasts(rank.grad_norm, policy.nan.grad_norm_steps)
        for rank in facts.ranks
    ):
        return None
    since = min(number.since for rank in facts.ranks for number in (rank.loss, rank.grad_norm) if number.bad_steps)
    value = "loss" if any(rank.loss.since == since for rank in facts.ranks) else "gradient norm"
    reporting = [rank for rank in facts.ranks if _number(rank, value).known]
    first = [rank for rank in reporting if _number(rank, value).since == since]
    reached = max(rank.steps - _number(rank, value).bad_steps for rank in first)
    behind = [rank for rank in reporting if rank.alive and rank.reported_step < since]
    unseen = [rank for rank in behind if rank.machine in facts.silent or rank.steps > reached + LATE_STEPS]
    if len(behind) > len(unseen) and facts.quiet_s <= AWAIT_S:
        return None
    named = first if len(first) < len(reporting) and not unseen else []
    return Anomaly(
        id=f"not-finite-{facts.spec.name}-{facts.generation}",
        generation=facts.generation,
        symptom=Symptom.NOT_FINITE,
        headline=f"the {value} is NaN or infinite since step {since}, {_where(first, reporting, unseen)}",
        ranks=sorted(rank.rank for rank in named),
        machines=sorted({rank.machine for rank in named}),
        seen_ns=max(rank.heard_ns for rank in first),
        not_after=max(since, 0),
    )


def _lasts(number: ReportedNumber, limit: int) -> bool:
    return 0 < limit <= number.bad_steps


def _number(rank: RankFacts, value: str) -> ReportedNumber:
    return rank.loss if value == "loss" else rank.grad_norm


def _where(first: Sequence[RankFacts], reporting: Sequence[RankFacts], unseen: Sequence[RankFacts]) -> str:
    """Return which ranks reported the bad value first, as text.

    The origin is not known if all reporting ranks had it at once, e.g. since the loss is a mean over ranks, or if some
    ranks did not report that step.
    """
    ranks = listed([f"rank {rank.rank} on {rank.machine}" for rank in first], NAMED)
    if unseen:
        silent = listed([f"rank {rank.rank} on {rank.machine}" for rank in unseen], NAMED)
        return f"on {ranks}; the first rank is not known, since {silent} did not report that step"
    if len(first) < len(reporting):
        return f"first on {ranks}"
    if len(first) == 1:
        return f"on {ranks}, the only rank that reports it; the rank at fault is not known"
    return f"on all {len(first)} ranks that report it, at once; the rank at fault is not known"


NOT_FINITE = Rule(
    name="not-finite",
    finds="the loss or the gradient norm is NaN or infinite",
    threshold="the loss for {policy.nan.loss_steps} steps in a row, the gradient norm for {policy.nan.grad_norm_steps}",
    source="NaN: ByteRobust, section 4.1",
    find=find_not_finite,
)
