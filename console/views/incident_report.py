"""The report of an incident for the person on call: observations, decisions and actions, with times.

Pure functions make blocks of text from a record of the ledger.
"""

from __future__ import annotations

import re
import urllib.parse
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from controlplane import text
from everstep.base.text import listed, signal_name
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
    """Address of a workflow in Temporal's Web UI; empty if there is no Web UI."""
    return f"{ui_url}/namespaces/{namespace}/workflows/{urllib.parse.quote(id, safe='')}" if ui_url else ""


def plain(output: str) -> str:
    """Output of ranks without control sequences for a terminal, since ranks may print any bytes."""
    return _CONTROL.sub("", output.expandtabs(4))


def outcome(record: IncidentRecord) -> str:
    """The outcome in one or two words."""
    if record.closed_ns is None:
        return "open"
    return record.resolution or ("recovered" if record.recovered else "not recovered")


def headline(record: IncidentRecord) -> str:
    """The headline of the report, or else the headline with which the incident was opened."""
    report = record.parsed_report()
    return plain((report.headline if report else None) or record.headline or "(its begin was not recorded)")


def symptom(record: IncidentRecord) -> str:
    """The symptom in the report, or else the symptom that opened the incident."""
    report = record.parsed_report()
    return str(report.failures[0].symptom) if report and report.failures else record.symptom or "?"


def summary_row(record: IncidentRecord) -> tuple[str, ...]:
    """Cells of the list: id, time of the fault, symptom, outcome, duration, lost steps, headline."""
    lost = "" if record.lost_steps is None else f"{record.lost_steps} lost"
    took = "" if record.seconds is None else f"{record.seconds:.2f} s"
    what = plain(record.headline or headline(record)) + (f" [{record.problem}]" if record.problem else "")
    return (record.id, text.moment_ns(record.fault_ns), symptom(record), outcome(record), took, lost, what)


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
            blocks.append(Block("Findings about the machines", findings))
        culprit = next((end for end in _own_ends(evidence) if end.log_tail.strip()), None)
        if culprit is not None:
            lines = plain(culprit.log_tail).rstrip().splitlines()[-LOG_LINES:]
            blocks.append(Block(f"End of rank {culprit.rank}'s error output", [(line,) for line in lines]))
    elif (report := record.parsed_report()) and (findings := _findings(report.findings)):
        blocks.append(Block("Findings about the machines", findings))
    blocks.append(Block("More", _more(record, evidence, ui_link)))
    return blocks


def _facts(record: IncidentRecord) -> list[tuple[str, ...]]:
    anomaly, report = record.anomaly or {}, record.parsed_report()
    rows = [
        ("job", record.job),
        ("symptom", symptom(record)),
        ("cause", plain(record.cause or "")),
        *_class_rows(record),
        ("detected by", _rule(str(anomaly.get("rule", "")))),
        ("seen on", ", ".join([*(f"rank {rank}" for rank in anomaly.get("ranks", [])), *anomaly.get("machines", [])])),
        ("fault at", text.moment_ns(record.fault_ns)),
        ("at step", "" if record.step is None or record.step < 0 else str(record.step)),
        ("steps lost", "" if record.lost_steps is None else str(record.lost_steps)),
        ("outcome", outcome(record)),
        ("accepted", plain(report.accepted_loss) if report else ""),
        ("not read", record.problem),
        ("cleaned", record.cleaned),
        ("evicted", ", ".join(record.evicted) or ("no machine" if record.closed_ns else "")),
        *(
            ("approved", plain(f"{machine}, by {operator}"))
            for machine, operator in (report.approved if report else {}).items()
        ),
    ]
    return [row for row in rows if row[1]]


def _hang(record: IncidentRecord) -> list[tuple[str, ...]]:
    """The result of sampling the ranks before they were stopped, with the picture of the topology."""
    report = record.parsed_report()
    if report is None or (hang := report.hang) is None:
        return []
    samples = text.counted(hang.looks, "sample")
    lines = [f"{hang.conclusion}: {hang.reason}", f"by {hang.method}, {samples} in {hang.seconds:.2f} s"]
    lines += [f"no sample of the ranks on {listed(hang.silent)}"] if hang.silent else []
    lines += [f"not kept: {hang.left_out}"] if hang.left_out else []
    return [(plain(line),) for line in [*lines, *hang.evidence, *hang.picture.splitlines()]]


def _vote(record: IncidentRecord) -> list[tuple[str, ...]]:
    """The result of the vote for the machine that slows the job down, and its rounds."""
    report = record.parsed_report()
    if report is None or (vote := report.slow) is None:
        return []
    lines = [f"{vote.conclusion}: {vote.reason}"]
    lines += [f"{listed(vote.suspects, 4)}: {vote.flags} of {vote.rounds} flags"] if vote.suspects else []
    return [(plain(line),) for line in [*lines, *vote.evidence]]


def _class_rows(record: IncidentRecord) -> list[tuple[str, ...]]:
    """The first failure: its class, its owner, its line in the user's code, and the log lines that prove it."""
    first = _classification(record)
    if first is None:
        return []
    also = ", a consequence: its cause is elsewhere" if first.consequence else ""
    return [
        ("class", plain(f"{first.fault} ({first.reason}){also}")),
        ("owner", plain(first.owner)),
        ("in", plain(first.place)),
        *(("evidence", plain(line)) for line in first.evidence),
    ]


def _classification(record: IncidentRecord) -> Classification | None:
    """The classification in the report, or else in the anomaly; None: an older release recorded none."""
    report = record.parsed_report()
    if report is not None:
        return report.classification
    with suppress(ValueError):
        return Classification.model_validate((record.anomaly or {}).get("classification"))
    return None


def _rule(name: str) -> str:
    detects = {rule.name: rule.finds for rule in RULES}
    return f"rule {name}: {detects.get(name, 'a rule of another release')}" if name else ""


def _story(record: IncidentRecord) -> list[tuple[str, ...]]:
    entries: list[tuple[int, str, str]] = []
    if record.seen_ns:
        entries.append((record.seen_ns, "detected", record.headline or record.symptom or ""))
    if record.opened_ns:
        entries.append((record.opened_ns, "opened", f"correlation id {record.correlation_id or '?'}"))
    entries += [(event.time_ns, event.stage, event.text) for event in record.events]
    report = record.parsed_report()
    if record.closed_ns:
        confirmation = report.confirmation if report and report.confirmation else None
        end = outcome(record)
        if confirmation and confirmation.ok:
            end = f"{'all ranks stepped' if confirmation.confirmed else NOT_CONFIRMED}: {confirmation.reason}"
        entries.append((record.closed_ns, "closed", end))
    # Sorted by time alone: events with the same time stay in their order.
    return [
        (text.since(time_ns, record.fault_ns), stage, plain(entry))
        for time_ns, stage, entry in sorted(entries, key=lambda entry: entry[0])
    ]


def _tried(record: IncidentRecord) -> list[tuple[str, ...]]:
    """The rungs of the ladder that were tried; empty for a single restart, which is in the list of events."""
    report = record.parsed_report()
    tried = report.tried if report else []
    if {attempt.rung for attempt in tried} <= {Rung.REATTEMPT} and len(tried) < 2:
        return []
    return [(attempt.rung, f"{attempt.seconds:.3f} s", plain(f"{attempt.why} → {attempt.found}")) for attempt in tried]


def _stages(record: IncidentRecord) -> list[tuple[str, ...]]:
    report = record.parsed_report()
    if report is None:
        return []
    rows: list[tuple[str, ...]] = [
        (stage.name, f"{stage.seconds:.3f} s", plain(stage.found)) for stage in report.timings
    ]
    parts = report.confirmation.parts if report.confirmation else {}
    rows += [(f"  {name}", f"{seconds:.3f} s", "part of the restart, slowest rank") for name, seconds in parts.items()]
    return rows


def _own_ends(evidence: Evidence) -> list[RankExit]:
    """The ends that everstep did not cause, in their order."""
    own = [end for end in evidence.exits if not end.stopped_by_us]
    return sorted(own, key=lambda end: (end.time_ns, end.rank))


def _findings(findings: Sequence[MachineFinding]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for entry in findings[:FINDINGS_SHOWN]:
        finding = entry.finding
        rows.append((entry.machine, str(finding.verdict), plain(finding.headline), finding.reason))
        rows.append(("", "", f"owner {finding.owner}, {finding.remedy}", ""))
        rows += [("", "", f"  {plain(line)}", "") for line in finding.evidence if line not in finding.text]
    if len(findings) > FINDINGS_SHOWN:
        rows.append((f"and {len(findings) - FINDINGS_SHOWN} more",))
    return rows


def _exits(evidence: Evidence, fault_ns: int | None) -> list[tuple[str, ...]]:
    own = _own_ends(evidence)
    rows: list[tuple[str, ...]] = []
    for end in own[:EXITS_SHOWN]:
        steps = f" after {end.completed_steps} steps" if end.completed_steps >= 0 else ""
        when = text.since(end.time_ns, fault_ns) if end.time_ns else ""
        rows.append((f"rank {end.rank} on {end.machine}", when, how_it_ended(end) + steps))
        if end.exception:
            rows.append(("", "", plain(end.exception)))
    ended = sum(len(end.ranks) for end in own)
    if ended > EXITS_SHOWN:
        rows.append((f"and {ended - min(len(own), EXITS_SHOWN)} more", "", ""))
    stopped = sum(len(end.ranks) for end in evidence.exits) - ended
    if stopped:
        rows.append((f"{stopped} other rank{'s' if stopped > 1 else ''}", "", "ran until everstep stopped them"))
    rows += [(f"machine {machine}", "", "did not answer") for machine in evidence.unreachable]
    rows += [
        (f"{copy.tier} seen from {listed([*copy.places])}", "", plain(copy.reason))
        for copy in evidence.held
        if copy.unlisted
    ]
    invalid = [copy for copy in evidence.held if not copy.valid and not copy.unlisted]
    rows += [
        (
            f"checkpoint of rank {listed([*copy.ranks])} on {listed([*copy.places])}",
            "",
            f"not valid: {plain(copy.reason)}",
        )
        for copy in invalid[:EXITS_SHOWN]
    ]
    return rows


def how_it_ended(end: RankExit) -> str:
    """The end of a rank: ``SIGKILL``, ``exit code 1`` or ``unknown exit``."""
    if end.signal:
        return signal_name(end.signal)
    return "unknown exit" if end.code is None else f"exit code {end.code}"


def _more(record: IncidentRecord, evidence: Evidence | None, ui_link: str) -> list[tuple[str, ...]]:
    ranks = [end.rank for end in _own_ends(evidence)] if evidence else []
    rank = (ranks or (record.anomaly or {}).get("ranks") or [None])[0]
    option = "" if rank is None else f" --rank {rank}"
    rows: list[tuple[str, ...]] = [("logs", f"everstep logs {record.job}{option}")]
    if record.closed_ns is None:
        rows.append(("job", f"everstep status {record.job}"))
    return [*rows, ("Web UI", ui_link)] if ui_link else rows
