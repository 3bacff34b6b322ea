"""Things that happened once and count for some time, as a line of the kernel log does.

They are kept as JSON, in ``Inspection.kept``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from everstep.model.finding import EVIDENCE_LINES, Finding

KEPT = 64
"""Different events that count at the same time, at most; the oldest go first."""


def add(events: list[dict[str, Any]], found: Finding, *, now_ns: int, lasts_s: float | None) -> None:
    """Note an event; a repeated one adds its evidence and counts from now. One that counts no more begins anew.

    Args:
        events: As they are kept; changed here.
        found: What happened.
        now_ns: When it did.
        lasts_s: For how long it counts; None: until the machine is started anew.
    """
    until_ns = 0 if lasts_s is None else now_ns + round(lasts_s * 1e9)
    events[:] = current(events, now_ns)
    for event in events:
        known = Finding.model_validate(event["finding"])
        if known.key == found.key:
            evidence = [*known.evidence, *(line for line in found.evidence if line not in known.evidence)]
            # The first lines say how it began.
            last_ns = max(now_ns, known.last_ns, known.since_ns)
            kept = known.model_copy(update={"evidence": evidence[:EVIDENCE_LINES], "last_ns": last_ns})
            event.update(finding=kept.model_dump(mode="json"), until_ns=until_ns, count=event["count"] + 1)
            return
    events.append({"finding": found.model_dump(mode="json"), "until_ns": until_ns, "count": 1})
    del events[: max(len(events) - KEPT, 0)]


def current(events: Iterable[dict[str, Any]], now_ns: int) -> list[dict[str, Any]]:
    """Those that still count."""
    return [event for event in events if not event["until_ns"] or event["until_ns"] > now_ns]


def findings(events: Iterable[dict[str, Any]]) -> list[Finding]:
    """What they say; one that came several times says how often."""
    found = []
    for event in events:
        finding = Finding.model_validate(event["finding"])
        times = f" ({event['count']} times)" if event["count"] > 1 else ""
        found.append(finding.model_copy(update={"text": finding.text + times}))
    return found


def without(events: Iterable[dict[str, Any]], reason: str) -> list[dict[str, Any]]:
    """Those of other reasons: somebody has repaired what these told of."""
    return [event for event in events if event["finding"]["reason"] != reason]
