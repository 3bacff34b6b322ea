"""Decides which findings are network alerts, and which alerts of a machine count together (ByteRobust, figure 5)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from everstep.model.finding import Finding, FindingSource, Health, MachineFinding, Owner

FLAPS = frozenset({"nic-flap", "ib-port-flap"})
"""The reason codes of a link that went down and up again. The verdict of such a finding is unknown, since the switch
may be at fault, but it counts as an alert (ByteRobust, figure 5)."""
REPEATED_FLAPS = frozenset({"nic-flap-repeated", "ib-port-flap-repeated"})
"""The reason codes of a link on which the monitor counted two outages."""
LINKS_DOWN = frozenset({"nic-down", "nic-missing", "ib-port-down", "ib-port-missing"})
"""The reason codes of a link that is down. The link is down for good if it is still down when the ranks are stopped."""
DOWN_FOR_GOOD_S = 10.0
"""A link that is down for a shorter time, seconds, may be a flap."""
ALERTS_WITHIN_S = 300.0
"""Alerts of one machine that are at most this far apart, seconds, count together (ByteRobust, figure 5: 5 minutes)."""
ONE_ALERT_S = 30.0
"""Alerts of one machine that are closer together, seconds, are one alert: they may be from two links behind one switch,
or from one link that is reported again (ByteRobust inspects the network every 30 s, table 3)."""
ALERTS_KEPT = 200
"""Number of network alerts that a job remembers of its machines."""


def is_alert(finding: Finding) -> bool:
    """Return whether a finding of an inspection is a network alert: a fault of the network, or a link that went down.

    A count, for example of lost packets, is no alert, since it does not show which end of a link is at fault.
    """
    if finding.source is not FindingSource.INSPECTION:
        return False
    if finding.owner is Owner.MACHINE:
        return finding.reason in LINKS_DOWN and finding.verdict is Health.FAULTY
    if finding.owner is not Owner.NETWORK:
        return False
    seen_down = finding.reason in FLAPS or finding.reason in REPEATED_FLAPS
    return finding.verdict is Health.FAULTY or (seen_down and finding.verdict is Health.UNKNOWN)


def alerts_of(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Return the network alerts among findings, the oldest first, each of them once.

    An outage is reported twice: as a fault while it lasts, and as a flap once the link is back. Only the fault counts.
    """
    by_key = {(finding.since_ns, finding.key): finding for finding in findings if is_alert(finding)}
    alerts = [by_key[key] for key in sorted(by_key)]
    faults = [alert for alert in alerts if alert.verdict is Health.FAULTY]
    return tuple(
        alert for alert in alerts if not (alert.reason in FLAPS and any(_ends(alert, fault) for fault in faults))
    )


def _ends(flap: Finding, fault: Finding) -> bool:
    same_part = (flap.inspection, flap.item) == (fault.inspection, fault.item)
    return same_part and 0 <= flap.since_ns - fault.since_ns <= ALERTS_WITHIN_S * 1e9


def second_alert(finding: Finding, alerts: tuple[Finding, ...]) -> Finding | None:
    """Return another alert of the machine that counts together with a finding; None if the finding is no alert."""
    if finding not in alerts:
        return None
    near = (alert for alert in alerts if ONE_ALERT_S <= abs(alert.since_ns - finding.since_ns) / 1e9 <= ALERTS_WITHIN_S)
    return next(near, None)


def is_down_for_good(finding: Finding, now_ns: int) -> bool:
    """Return whether an active finding is about a link that has been down for so long that it is no flap."""
    is_down = finding.reason in LINKS_DOWN and finding.verdict is Health.FAULTY
    return is_down and now_ns - finding.since_ns >= DOWN_FOR_GOOD_S * 1e9


def alerts_kept(
    earlier: Sequence[MachineFinding], findings: Iterable[MachineFinding], now_ns: int
) -> list[MachineFinding]:
    """Return the network alerts that may still count together with a later alert, the newest last."""
    new = [seen for seen in findings if is_alert(seen.finding)]
    known = {(seen.machine, seen.finding.since_ns, *seen.finding.key): seen for seen in (*earlier, *new)}
    recent = [seen for seen in known.values() if now_ns - seen.finding.since_ns <= 2 * ALERTS_WITHIN_S * 1e9]
    return sorted(recent, key=lambda seen: seen.finding.since_ns)[-ALERTS_KEPT:]
