"""The number of standbys that a cluster should have, as text."""

from __future__ import annotations

from console.views.incident_report import aligned
from controlplane import text
from controlplane.queries.standbys import RateReport, RuleReport, StandbyReport
from everstep.decisions.pool.demand import Refill
from everstep.decisions.pool.size import PAPER_MACHINE_DAYS, PAPER_RATE, SHARE, SHORT_DAYS

PAPER = "ByteRobust, table 5"
NAMES = {"floor": "the floor", "binomial": f"the paper's rule ({PAPER})", "record": "our rule"}


def headline(report: StandbyReport) -> str:
    """The number of standbys and of machines; if no failure was seen, also the assumed failure rate."""
    seen = report.rate.source == "given" or report.rate.failures
    return _number(report) + ("" if seen else f"; failure rate: {rate_text(report)}")


def explanation(report: StandbyReport) -> list[str]:
    """The number, the data behind it, and how well both rules would have done."""
    facts = [("rate", rate_text(report)), ("failures", _record_text(report)), ("repairs", _repairs_text(report))]
    rows: list[tuple[str, ...]] = [("Rule", "Says", "Held", "Idle", "Why")]
    rows += [_rule_row(report, rule) for rule in report.rules]
    rows.append(("floor", str(report.floor), text.DASH, text.DASH, "never fewer"))
    tail = []
    if report.record and any(rule.days for rule in report.rules):
        tail = [
            "",
            f"Held and idle: on the {text.counted(report.record.machines, 'machine')} of the record, each day sized "
            "from the days before it.",
        ]
    return [f"{_number(report)}, by {NAMES[report.decided_by]}", *aligned(facts, "  "), "", *aligned(rows), *tail]


def _number(report: StandbyReport) -> str:
    return f"{text.counted(report.standbys, 'standby')} for {text.counted(report.machines, 'machine')}"


def rate_text(report: StandbyReport) -> str:
    """The failure rate and its source."""
    rate = report.rate
    said = f"{rate.per_day:.2g} failures of a machine in a day: "
    if rate.source == "given":
        return f"{said}as --rate says"
    if rate.source == "paper":
        return f"{said}nothing is recorded here, so it is the paper's ({PAPER}; derived from its numbers)"
    return said + _seen_text(rate)


def _seen_text(rate: RateReport) -> str:
    seen = f"{text.counted(rate.failures, 'failure')} in {rate.machine_days:.0f} machine-days"
    if rate.machine_days >= 100 * PAPER_MACHINE_DAYS:
        return seen
    return f"{seen}, and the paper's {PAPER_RATE} ({PAPER}) as one more in {PAPER_MACHINE_DAYS:.0f}"


def _record_text(report: StandbyReport) -> str:
    record = report.record
    if record is None:
        return "unknown"
    where = f"{text.counted(record.failures, 'failure')} of {text.counted(record.machines, 'machine')}"
    return f"{where} in {record.days:.1f} days ({record.source})"


def _repairs_text(report: StandbyReport) -> str:
    if report.refill is Refill.DAILY:
        return "left out: the pool is full again every day"
    if report.record is None:
        return "unknown"
    away = f"; after {report.record.away} of these failures the machine is not known to be back" * bool(
        report.record.away
    )
    return f"a standby is in use until the machine that it replaces is back{away}"


def _rule_row(report: StandbyReport, rule: RuleReport) -> tuple[str, ...]:
    papers = f"enough on {100 * SHARE:.0f} % of days, if failures are independent and repaired by tomorrow"
    name, why = (f"binomial ({PAPER})", papers) if rule.rule == "binomial" else ("record", _own_why(report))
    held = idle = "unknown"
    if rule.days:
        held = f"{rule.held} of {text.counted(rule.days, 'day')} ({text.ratio(rule.share)})"
        machine_days = rule.idle_machine_days or 0.0
        idle = f"{machine_days:.0f} machine-days ({machine_days / rule.days:.1f} a day)"
    says = "unknown" if rule.standbys is None else str(rule.standbys)
    return (name, says, held, idle, why)


def _own_why(report: StandbyReport) -> str:
    if report.record is None:
        return "no failures are recorded"
    if report.peak is None:
        return f"the record is too short: {report.record.days:.1f} days, and {SHORT_DAYS} are needed"
    return f"{report.peak:.1f} were enough on {100 * SHARE:.0f} % of the last days, and {report.margin} as a margin"
