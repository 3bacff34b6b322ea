"""The report of an incident for the person on call: observations, decisions and actions, with times.

Pure functions from a ledger's record to blocks of text; how blocks are printed
depends on whether a terminal reads them.
"""

from __future__ import annotations

import re
import signal
import urllib.parse
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING

from controlplane.shown import clean_line
from everstep.base.text import listed
from everstep.decisions.detect.rules import RULES
from everstep.model.evidence import Classification, Evidence, RankExit
from everstep.model.finding import MachineFinding
from everstep.model.ladder import Rung
from everstep.model.stage import NOT_CONFIRMED

if TYPE_CHECKING:
    from activities.ledger.records import IncidentRecord

LOG_LINES = 12
"""Lines of a rank's error output in a report."""
EXITS_SHOWN = 8
FINDINGS_SHOWN = 8

_CONTROL = re.compile(r"\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b\[[0-9;?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@dataclass(frozen=True, slots=True)
class Block:
    """A title and its rows; the cells of a column are aligned."""

    title: str
    rows: list[tuple[str, ...]] = field(default_factory=list)


def link(id: str, ui_url: str, namespace: str) -> str:
    """Address of a workflow in Temporal's Web UI; empty when there is no Web UI."""
    return f"{ui_url}/namespaces/{namespace}/workflows/{urllib.parse.quote(id, safe='')}" if ui_url else ""


def clean(text: str) -> str:
    """The text without control sequences for a terminal: ranks may print any bytes."""
    return _CONTROL.sub("", text.expandtabs(4))


def clock(time_ns: int | None) -> str:
    """Local date and time, to the second."""
    return datetime.fromtimestamp(time_ns / 1e9).astimezone().strftime("%Y-%m-%d %H:%M:%S") if time_ns else "-"


def outcome(record: IncidentRecord) -> str:
    """The outcome in one or two words."""
    if record.closed_ns is None:
        return "open"
    return record.resolution or ("recovered" if record.recovered else "not recovered")


def headline(record: IncidentRecord) -> str:
    """The report's headline, else the symptom."""
    report = record.parsed_report()
    return clean((report.headline if report else None) or record.headline or "(its beginning was not recorded)")


def symptom(record: IncidentRecord) -> str:
    """The symptom in the report, else the symptom that was seen first."""
    report = record.parsed_report()
    return str(report.failures[0].symptom) if report and report.failures else record.symptom or "?"


def summary_row(record: IncidentRecord) -> tuple[str, ...]:
    """Cells of the list: id, opened, symptom, outcome, lost steps, took, what."""
    lost = "" if record.lost_steps is None else f"{record.lost_steps} lost"
    took = "" if record.seconds is None else f"{record.seconds:.2f} s"
    what = clean(record.headline or headline(record)) + (f" [{record.problem}]" if record.problem else "")
    return (record.id, clock(record.fault_ns), symptom(record), outcome(record), took, lost, what)


def report_blocks(record: IncidentRecord, ui_link: str = "") -> list[Block]:
    """The report, block by block; the first title is the headline."""
    blocks = [Block(f"{record.id}: {headline(record)}", _facts(record)), Block("What happened", _story(record))]
    if tried := _tried(record):
        blocks.append(Block("What was tried", tried))
    if stages := _stages(record):
        blocks.append(Block("Where the time went", stages))
    if hang := _hang(record):
        blocks.append(Block("What the ranks did", hang))
    if vote := _vote(record):
        blocks.append(Block("The vote for the slow machine", vote))
    evidence = record.parsed_evidence()
    if evidence is not None:
        blocks.append(Block("Evidence", _exits(evidence, record.fault_ns)))
        if findings := _findings(evidence.findings):
            blocks.append(Block("What inspections say of the machines", findings))
        culprit = next((end for end in _by_themselves(evidence) if end.log_tail.strip()), None)
        if culprit is not None:
            lines = clean(culprit.log_tail).rstrip().splitlines()[-LOG_LINES:]
            blocks.append(Block(f"End of rank {culprit.rank}'s error output", [(line,) for line in lines]))
    elif report := record.parsed_report():
        blocks += [Block("What inspections say of the machines", rows) for rows in [_findings(report.findings)] if rows]
    blocks.append(Block("More", _more(record, evidence, ui_link)))
    return blocks


def _facts(record: IncidentRecord) -> list[tuple[str, ...]]:
    anomaly, report = record.anomaly or {}, record.parsed_report()
    rows = [
        ("job", record.job),
        ("symptom", symptom(record)),
        ("cause", clean(record.cause or "")),
        *_class_rows(record),
        ("found by", _rule(str(anomaly.get("rule", "")))),
        ("seen on", ", ".join([*(f"rank {rank}" for rank in anomaly.get("ranks", [])), *anomaly.get("machines", [])])),
        ("fault at", clock(record.fault_ns)),
        ("at step", "" if record.step is None or record.step < 0 else str(record.step)),
        ("steps lost", "" if record.lost_steps is None else str(record.lost_steps)),
        ("outcome", outcome(record)),
        ("accepted", clean(report.accepted_loss) if report else ""),
        ("not read", record.problem),
        ("evicted", ", ".join(record.evicted) or ("nobody" if record.closed_ns else "")),
        *(("approved", clean(f"{machine}, by {who}")) for machine, who in (report.approved if report else {}).items()),
    ]
    return [row for row in rows if row[1]]


def _hang(record: IncidentRecord) -> list[tuple[str, ...]]:
    """The result of sampling the ranks before they were stopped, with the picture of the topology."""
    report = record.parsed_report()
    if report is None or (found := report.hang) is None:
        return []
    lines = [f"{found.conclusion}: {found.reason}", f"by {found.method}, {found.looks} looks in {found.seconds:.2f} s"]
    lines += [f"{listed(found.silent)} did not say what its ranks do"] if found.silent else []
    lines += [f"not kept: {found.left_out}"] if found.left_out else []
    return [(clean(line),) for line in [*lines, *found.evidence, *found.picture.splitlines()]]


def _vote(record: IncidentRecord) -> list[tuple[str, ...]]:
    """The vote on which machine the others wait for, round by round, and its result."""
    report = record.parsed_report()
    if report is None or (found := report.slow) is None:
        return []
    lines = [f"{found.conclusion}: {found.reason}"]
    lines += [f"{listed(found.suspects, 4)}: {found.flags} of {found.rounds} flags"] if found.suspects else []
    return [(clean(line),) for line in [*lines, *found.evidence]]


def _class_rows(record: IncidentRecord) -> list[tuple[str, ...]]:
    """The first failure: its class, its owner, its line in the user's code, and the log lines that prove it."""
    found = _classification(record)
    if found is None:
        return []
    also = ", a consequence: its cause is elsewhere" if found.consequence else ""
    return [
        ("class", clean(f"{found.fault} ({found.reason}){also}")),
        ("owner", clean(found.owner)),
        ("in", clean(found.place)),
        *(("evidence", clean(line)) for line in found.evidence),
    ]


def _classification(record: IncidentRecord) -> Classification | None:
    """The classification in the report, else in the anomaly; None: an older release made none."""
    report = record.parsed_report()
    if report is not None:
        return report.classification
    with suppress(ValueError):
        return Classification.model_validate((record.anomaly or {}).get("classification"))
    return None


def _rule(name: str) -> str:
    finds = {rule.name: rule.finds for rule in RULES}
    return f"rule {name}: {finds.get(name, 'of another release')}" if name else ""


def _story(record: IncidentRecord) -> list[tuple[str, ...]]:
    entries: list[tuple[int, str, str]] = []
    if record.seen_ns:
        entries.append((record.seen_ns, "seen", record.headline or record.symptom or ""))
    if record.opened_ns:
        entries.append((record.opened_ns, "opened", f"correlation id {record.correlation_id or '?'}"))
    entries += [(event.time_ns, event.stage, event.text) for event in record.events]
    report = record.parsed_report()
    if record.closed_ns:
        stepped = report.confirmation if report and report.confirmation else None
        text = outcome(record)
        if stepped and stepped.ok:
            text = f"{'all ranks stepped' if stepped.confirmed else NOT_CONFIRMED}: {stepped.reason}"
        entries.append((record.closed_ns, "closed", text))
    # Sorted by time alone: events of one moment stay in their order.
    return [
        (since(time_ns, record.fault_ns), stage, clean(text))
        for time_ns, stage, text in sorted(entries, key=lambda entry: entry[0])
    ]


def _tried(record: IncidentRecord) -> list[tuple[str, ...]]:
    """The rungs of the ladder; a single restart is already in the list of events."""
    report = record.parsed_report()
    tried = report.tried if report else []
    if {one.rung for one in tried} <= {Rung.REATTEMPT} and len(tried) < 2:
        return []
    return [(one.rung, f"{one.seconds:.3f} s", clean(f"{one.why} → {one.found}")) for one in tried]


def _stages(record: IncidentRecord) -> list[tuple[str, ...]]:
    report = record.parsed_report()
    if report is None:
        return []
    rows: list[tuple[str, ...]] = [
        (stage.name, f"{stage.seconds:.3f} s", clean(stage.found)) for stage in report.timings
    ]
    parts = report.confirmation.parts if report.confirmation else {}
    rows += [(f"  {name}", f"{seconds:.3f} s", "of the restart, slowest rank") for name, seconds in parts.items()]
    return rows


def _by_themselves(evidence: Evidence) -> list[RankExit]:
    mine = [end for end in evidence.exits if not end.stopped_by_us]
    return sorted(mine, key=lambda end: (end.time_ns, end.rank))


def _findings(findings: Sequence[MachineFinding]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for seen in findings[:FINDINGS_SHOWN]:
        found = seen.finding
        rows.append((seen.machine, str(found.verdict), clean(found.headline), found.reason))
        rows.append(("", "", f"owner {found.owner}, {found.remedy}", ""))
        rows += [("", "", f"  {clean(line)}", "") for line in found.evidence if line not in found.text]
    if len(findings) > FINDINGS_SHOWN:
        rows.append((f"and {len(findings) - FINDINGS_SHOWN} more",))
    return rows


def _exits(evidence: Evidence, fault_ns: int | None) -> list[tuple[str, ...]]:
    mine = _by_themselves(evidence)
    rows: list[tuple[str, ...]] = []
    for end in mine[:EXITS_SHOWN]:
        done = f" after {end.completed_steps} steps" if end.completed_steps >= 0 else ""
        when = since(end.time_ns, fault_ns) if end.time_ns else ""
        rows.append((f"rank {end.rank} on {end.machine}", when, how_it_ended(end) + done))
        if end.exception:
            rows.append(("", "", clean(end.exception)))
    if len(mine) > EXITS_SHOWN:
        rows.append((f"and {len(mine) - EXITS_SHOWN} more", "", ""))
    stopped = len(evidence.exits) - len(mine)
    if stopped:
        rows.append((f"{stopped} other rank{'s' if stopped > 1 else ''}", "", "ran until everstep stopped them"))
    rows += [(f"machine {machine}", "", "did not answer") for machine in evidence.unreachable]
    if evidence.left_out:
        rows.append(("not kept", "", evidence.left_out))
    rows += [
        (f"{held.tier} seen from {held.machine}", "", clean(held.reason)) for held in evidence.held if held.unlisted
    ]
    bad = [held for held in evidence.held if not held.valid and not held.unlisted]
    rows += [
        (f"checkpoint of rank {held.rank} on {held.machine}", "", f"not valid: {clean(held.reason)}")
        for held in bad[:EXITS_SHOWN]
    ]
    return rows


def how_it_ended(end: RankExit) -> str:
    """``SIGKILL``, ``exit code 1`` or ``ended, nobody knows how``."""
    if end.signal is not None:
        known = {number.value: number.name for number in signal.Signals}
        return known.get(end.signal, f"signal {end.signal}")
    return f"exit code {end.code}" if end.code is not None else "ended, nobody knows how"


def _more(record: IncidentRecord, evidence: Evidence | None, ui_link: str) -> list[tuple[str, ...]]:
    ranks = [end.rank for end in _by_themselves(evidence)] if evidence else []
    rank = (ranks or (record.anomaly or {}).get("ranks") or [None])[0]
    option = "" if rank is None else f" --rank {rank}"
    rows: list[tuple[str, ...]] = [("logs", f"everstep logs {record.job}{option}")]
    if record.closed_ns is None:
        rows.append(("job", f"everstep status {record.job}"))
    return [*rows, ("Web UI", ui_link)] if ui_link else rows


def since(time_ns: int, fault_ns: int | None) -> str:
    """The time since the fault, such as ``+0.412 s``."""
    return f"{(time_ns - (fault_ns or time_ns)) / 1e9:+.3f} s"


def aligned(rows: Sequence[tuple[str, ...]], indent: str = "") -> list[str]:
    """Rows as plain lines: columns are two spaces apart, without spaces at the end."""
    shown = [[clean_line(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in shown if i < len(row)) for i in range(max(map(len, shown), default=0))]
    return [
        indent + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)).rstrip()
        for row in shown
    ]
