"""Network alerts: the findings that are alerts, and the alerts of a machine that count together (ByteRobust, figure
5)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from everstep.model.finding import Finding, FindingSource, Health, MachineFinding, Owner

FLAPS = frozenset({"nic-flap", "ib-port-flap"})
"""Reason codes of a link that went down and came back up. Their verdict is unknown, since the switch may be at fault;
each still counts as an alert (ByteRobust, figure 5)."""
REPEATED_FLAPS = frozenset({"nic-flap-repeated", "ib-port-flap-repeated"})
"""The reason codes with which the monitor itself counted two outages on one link."""
ALERTS_WITHIN_S = 300.0
"""Network alerts of one machine at most this far apart, seconds, count together (ByteRobust, figure 5: 5 minutes)."""
ONE_ALERT_S = 30.0
"""Alerts of a machine closer than this, seconds, are one alert: of two links behind one switch, or of one link that is
reported again (ByteRobust inspects the network every 30 s, table 3)."""
ALERTS_KEPT = 200
"""Network alerts of a job's machines that the job remembers."""


def is_alert(finding: Finding) -> bool:
    """Return whether a finding is a network alert: a fault of the network, or a link that went down.

    A mere count, as of lost packets, does not show which end is at fault, and is no alert; nor is the result of a test
    of the stopped job.
    """
    if finding.source is not FindingSource.INSPECTION or finding.owner is not Owner.NETWORK:
        return False
    seen_down = finding.reason in FLAPS or finding.reason in REPEATED_FLAPS
    return finding.verdict is Health.FAULTY or (seen_down and finding.verdict is Health.UNKNOWN)


def alerts_of(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Return the network alerts among findings, the oldest first, each of them once.

    An outage is reported twice: as a fault while it lasts, and as a flap once the link is back. Both are one alert, the
    first.
    """
    found = {(finding.since_ns, finding.key): finding for finding in findings if is_alert(finding)}
    alerts = [found[key] for key in sorted(found)]
    faults = [alert for alert in alerts if alert.verdict is Health.FAULTY]
    return tuple(
        alert for alert in alerts if not (alert.reason in FLAPS and any(_ends(alert, fault) for fault in faults))
    )


def _ends(flap: Finding, fault: Finding) -> bool:
    same_part = (flap.inspection, flap.item) == (fault.inspection, fault.item)
    return same_part and 0 <= flap.since_ns - fault.since_ns <= ALERTS_WITHIN_S * 1e9


def second_alert(finding: Finding, alerts: tuple[Finding, ...]) -> Finding | None:
    """Return another alert of the machine that counts together with this alert; the end of an outage has none."""
    if finding not in alerts:
        return None
    near = (alert for alert in alerts if ONE_ALERT_S <= abs(alert.since_ns - finding.since_ns) / 1e9 <= ALERTS_WITHIN_S)
    return next(near, None)


def alerts_kept(
    earlier: Sequence[MachineFinding], findings: Iterable[MachineFinding], now_ns: int
) -> list[MachineFinding]:
    """Return the network alerts that may still count together with a later alert, the newest last."""
    new = [seen for seen in findings if is_alert(seen.finding)]
    known = {(seen.machine, seen.finding.since_ns, *seen.finding.key): seen for seen in (*earlier, *new)}
    recent = [seen for seen in known.values() if now_ns - seen.finding.since_ns <= 2 * ALERTS_WITHIN_S * 1e9]
    return sorted(recent, key=lambda seen: seen.finding.since_ns)[-ALERTS_KEPT:]
