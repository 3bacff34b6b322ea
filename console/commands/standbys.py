"""``everstep standbys``: show how many standbys a cluster should have."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from console.commands.shared import ClusterOption, JsonOption, LedgerOption, known_cluster, open_ledger, print_json
from console.terminal import aligned
from controlplane import text
from everstep.decisions.pool.demand import Refill
from everstep.decisions.pool.size import PAPER_MACHINE_DAYS, PAPER_RATE, SHARE, SHORT_DAYS
from everstep.errors import ConfigError

if TYPE_CHECKING:
    from controlplane.local.cluster_file import ClusterFile
    from controlplane.queries.standbys import RateReport, RuleReport, StandbyReport
    from everstep.decisions.pool.demand import FailureRecord

PAPER = "ByteRobust, table 5"
NAMES = {"floor": "the lower limit", "binomial": f"the paper's rule ({PAPER})", "record": "everstep's rule"}


def standbys(  # noqa: PLR0917 - options of a command
    explain: Annotated[
        bool, typer.Option("--explain", help="Show the results of both rules, and how well they would have done.")
    ] = False,
    machines: Annotated[
        int | None,
        typer.Option(
            "--machines",
            metavar="N",
            min=1,
            help="Number of machines for jobs. Default: the machines of the inventory or the cluster.",
        ),
    ] = None,
    failures: Annotated[
        Path | None,
        typer.Option("--failures", metavar="FILE", help="File of recorded failures. Default: those in the ledger."),
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(
            "--rate", metavar="R", min=0.0, max=1.0, help="Failures of one machine in a day, instead of a record."
        ),
    ] = None,
    refill: Annotated[
        Refill,
        typer.Option("--refill", help="The pool is refilled by repaired machines, or daily from outside."),
    ] = Refill.REPAIR,
    as_json: JsonOption = False,
    ledger: LedgerOption = "",
    cluster: ClusterOption = "default",
) -> None:
    """Show how many standbys a cluster should have.

    Two rules each compute a number, and the greater number is the result. The paper's rule (ByteRobust, table 5) is a
    quantile of the binomial distribution. Everstep's rule computes how many standbys the failures of the past would
    have used. It includes failures in bursts, failures during the repair of other machines, and failures of repaired
    machines. docs/guides/standbys.md explains both rules, and the file of failures.

    The failures are the evictions in the ledger. Without any record, the paper's rate is used: 0.0012 failures of a
    machine in a day.

    Examples:

        everstep standbys

        everstep standbys --explain --machines 512 --rate 0.002

        everstep standbys --explain --failures failures.jsonl --json

    Exit codes: 0 shown; 1 the ledger cannot be read; 2 wrong options or a wrong file, or the number of machines is not
    known.
    """
    from controlplane.queries.standbys import standby_report

    if failures is not None and rate is not None:
        raise ConfigError("--failures and --rate both set how often machines fail: give only one of them")
    described = known_cluster(cluster)
    count = machines or _machines(described)
    record, source = None, ""
    if failures is not None:
        from controlplane.failure_file import read_failures

        record, source = read_failures(failures), str(failures)
    elif rate is None:
        record, source = _ledger_record(ledger, cluster, described), "the ledger"
    count = count or (record.machines if record else None)
    if not count:
        raise ConfigError(
            f"the number of machines is not known: there is no inventory and no cluster {cluster!r}. Give --machines"
        )
    report = standby_report(count, record, source, rate=rate, refill=refill, explain=explain)
    if as_json:
        print_json(report.model_dump(mode="json"))
    else:
        print("\n".join(explanation(report) if explain else [headline(report)]))


def _machines(cluster: ClusterFile | None) -> int | None:
    """Number of machines for jobs, from the inventory or else the cluster; None: not known."""
    from controlplane.inventory import inventory_path, load

    if path := inventory_path(None):
        return len(load(path).offered)
    return len(cluster.machines) - cluster.standbys if cluster else None


def _ledger_record(url: str, name: str, cluster: ClusterFile | None) -> FailureRecord | None:
    """The failures in the ledger; None: they are not known, or there is no ledger yet and no option names one."""
    from activities.ledger.database import LedgerUrl
    from controlplane.queries.standbys import ledger_record

    if not url and (cluster is None or ((file := LedgerUrl(cluster.ledger_url).file) and not file.exists())):
        return None
    with open_ledger(url, name, cluster) as opened:
        return ledger_record(opened, _machines(cluster), now_ns=time.time_ns())


def headline(report: StandbyReport) -> str:
    """The number of standbys and of machines; if no failure was recorded, also the assumed failure rate."""
    recorded = report.rate.source == "given" or report.rate.failures
    return _number(report) + ("" if recorded else f"; failure rate: {rate_text(report)}")


def explanation(report: StandbyReport) -> list[str]:
    """The number, the data behind it, and how well both rules would have done."""
    facts = [("rate", rate_text(report)), ("failures", _record_text(report)), ("repairs", _repairs_text(report))]
    rows: list[tuple[str, ...]] = [("Rule", "Standbys", "Enough", "Idle", "Why")]
    rows += [_rule_row(report, rule) for rule in report.rules]
    rows.append(("lower limit", str(report.floor), text.DASH, text.DASH, "there are never fewer"))
    tail = []
    if report.record and any(rule.days for rule in report.rules):
        machines = text.counted(report.record.machines, "machine")
        tail = [
            "",
            f"Enough and Idle: the rule applied to the {machines} of the record, on each day with the failures of the "
            "days before it.",
        ]
    return [f"{_number(report)}, by {NAMES[report.decided_by]}", *aligned(facts, "  "), "", *aligned(rows), *tail]


def _number(report: StandbyReport) -> str:
    return f"{text.counted(report.standbys, 'standby')} for {text.counted(report.machines, 'machine')}"


def rate_text(report: StandbyReport) -> str:
    """The failure rate and its source."""
    rate = report.rate
    number = f"{rate.per_day:.2g} failures of a machine in a day"
    if rate.source == "given":
        return f"{number}, from --rate"
    if rate.source == "paper":
        return f"{number}, derived from the numbers of the paper ({PAPER}), since no failures are recorded here"
    return f"{number}: {_recorded_text(rate)}"


def _recorded_text(rate: RateReport) -> str:
    recorded = f"{text.counted(rate.failures, 'failure')} in {rate.machine_days:.0f} machine-days"
    if rate.machine_days >= 100 * PAPER_MACHINE_DAYS:
        return recorded
    papers = f"the paper's rate of {PAPER_RATE} ({PAPER})"
    return f"{recorded}, and {papers}, counted as one more failure in {PAPER_MACHINE_DAYS:.0f} machine-days"


def _record_text(report: StandbyReport) -> str:
    record = report.record
    if record is None:
        return "unknown"
    failures = f"{text.counted(record.failures, 'failure')} of {text.counted(record.machines, 'machine')}"
    return f"{failures} in {record.days:.1f} days ({record.source})"


def _repairs_text(report: StandbyReport) -> str:
    if report.refill is Refill.DAILY:
        return "not considered: the pool is full again every day"
    if report.record is None:
        return "unknown"
    used = "a standby is in use until the machine that it replaces is back"
    away = report.record.away
    return f"{used}; after {away} of these failures the machine is not known to be back" if away else used


def _rule_row(report: StandbyReport, rule: RuleReport) -> tuple[str, ...]:
    papers = f"enough on {100 * SHARE:.0f} % of days, if failures are independent and repaired by the next day"
    name, why = (f"binomial ({PAPER})", papers) if rule.rule == "binomial" else ("record", _own_why(report))
    enough = idle = "unknown"
    if rule.days:
        enough = f"{rule.held} of {text.counted(rule.days, 'day')} ({text.ratio(rule.share)})"
        machine_days = rule.idle_machine_days or 0.0
        idle = f"{machine_days:.0f} machine-days ({machine_days / rule.days:.1f} a day)"
    return (name, "unknown" if rule.standbys is None else str(rule.standbys), enough, idle, why)


def _own_why(report: StandbyReport) -> str:
    if report.record is None:
        return "no failures are recorded"
    if report.peak is None:
        return f"the record is too short: it has {report.record.days:.1f} days, and {SHORT_DAYS} are needed"
    return f"{report.peak:.1f} were enough on {100 * SHARE:.0f} % of the last days, plus a margin of {report.margin}"
