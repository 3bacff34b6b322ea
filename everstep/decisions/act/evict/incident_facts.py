"""What an incident knows, as facts for the rules of eviction."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from everstep.decisions.act.evict.facts import ALERTS_WITHIN_S, EvictFacts, is_alert
from everstep.model.hang import HangFound
from everstep.model.health import MachineFinding
from everstep.model.machine import Machine
from everstep.model.slow import SlowFound

ALERTS_KEPT = 200
"""Network alerts of a job's machines."""
EVICTED_KEPT = 1000
"""Times of evictions that a job remembers."""


def facts_of(
    machines: Sequence[Machine],
    *,
    now_ns: int,
    findings: Iterable[MachineFinding],
    earlier: Iterable[MachineFinding] = (),
    silent: Mapping[str, float] | None = None,
    evicted_ns: Iterable[int] = (),
    hang: HangFound | None = None,
    slow: SlowFound | None = None,
) -> EvictFacts:
    """Of the machines of one job.

    Args:
        machines: All of the job, in order.
        now_ns: The time.
        findings: What inspections say now; each of them once.
        earlier: Network alerts of before.
        silent: Machine that does not answer, and whose ranks are no longer there → since how many seconds.
        evicted_ns: When machines left the job without an operator.
        hang: What looks at the ranks of the generation at hand showed; None: nobody looked.
        slow: What a vote over them said; None: there was none.
    """
    ours = {machine.name for machine in machines}
    seen = {(one.machine, *one.finding.key): one for one in findings if one.machine in ours}
    return EvictFacts(
        now_ns=now_ns,
        machines=tuple(machine.name for machine in machines),
        findings=tuple(seen.values()),
        earlier=tuple(one for one in earlier if one.machine in ours),
        silent={name: since for name, since in (silent or {}).items() if name in ours},
        evicted_ns=tuple(evicted_ns),
        hang=hang,
        slow=slow,
    )


def alerts_kept(
    earlier: Sequence[MachineFinding], findings: Iterable[MachineFinding], now_ns: int
) -> list[MachineFinding]:
    """The network alerts that may yet count together with a later one, the newest last."""
    known = {(one.machine, one.finding.since_ns, *one.finding.key): one for one in earlier}
    known |= {(one.machine, one.finding.since_ns, *one.finding.key): one for one in findings if is_alert(one.finding)}
    recent = [one for one in known.values() if now_ns - one.finding.since_ns <= 2 * ALERTS_WITHIN_S * 1e9]
    return sorted(recent, key=lambda one: one.finding.since_ns)[-ALERTS_KEPT:]
