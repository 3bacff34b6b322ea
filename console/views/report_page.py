"""The report over some days, as one HTML page of plots and tables, without scripts or external files."""

from __future__ import annotations

from collections.abc import Sequence

from console.views.ledger_report import SHOWN, day, ettr_text, headline, job_row, lost_causes, tally_row
from console.views.svg import Bar, horizontal, plain, vertical
from controlplane import text
from controlplane.queries.report import UNKNOWN, IncidentTally, LedgerReport

STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; color: #1f2933; background: #fff; max-width: 900px; margin: 2rem auto;
  padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: 0; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
p.sub { color: #52606d; margin-top: .2rem; }
svg { max-width: 100%; height: auto; font: 12px system-ui, sans-serif; fill: #1f2933; }
svg .bar { fill: #3b7dd8; } svg .unknown { fill: #b8c2cc; } svg .value { fill: #52606d; } svg line { stroke: #cbd2d9; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; }
th, td { text-align: left; padding: .3rem .6rem .3rem 0; border-bottom: 1px solid #e4e7eb; vertical-align: top; }
th { color: #52606d; font-weight: 600; }
@media print { body { margin: 0; max-width: none; } h2 { break-after: avoid; } svg { break-inside: avoid; } }
"""


def report_page(report: LedgerReport) -> str:
    """The HTML of the whole page."""
    title = f"everstep: {day(report.since)} to {day(report.until)}"
    parts = [f"<h1>{plain(title)}</h1>", f'<p class="sub">{plain(headline(report))}</p>']
    if not report.empty:
        parts += _sections(report)
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{plain(title)}</title><style>{STYLE}</style>"
    )
    body = "\n".join(parts)
    return f'<!DOCTYPE html>\n<html lang="en">\n<head>{head}</head>\n<body>\n{body}\n</body>\n</html>\n'


def _sections(report: LedgerReport) -> list[str]:
    days = [Bar(f"{one.day:%m-%d}", one.incidents, str(one.incidents)) for one in report.by_day]
    lost = [Bar(cause, each, text.duration(each), cause != UNKNOWN) for cause, each in lost_causes(report)]
    shares = [
        Bar(share.job, share.ettr or 0.0, ettr_text(share), share.ettr is not None) for share in report.jobs[:SHOWN]
    ]
    machines = [Bar(one.machine, one.evictions, str(one.evictions)) for one in report.machines[:SHOWN]]
    jobs = _table(("Job", "Started", "Ran", "ETTR", "Lost to", "Outcome"), [job_row(share) for share in report.jobs])
    return [
        *_section("Incidents by day", vertical(days, "Incidents by day") if report.incidents else "", "no incidents"),
        *_section("Incidents by symptom", _tallies(report.by_symptom, "Symptom"), "no incidents"),
        *_section("Incidents by owner", _tallies(report.by_owner, "Owner"), "no incidents"),
        *_section("Time lost, by cause, of all jobs", _bars(lost, "Time lost by cause"), "nothing known was lost"),
        *_section("Machines by number of evictions", _bars(machines, "Evictions"), "no machine was evicted"),
        *_section("ETTR of jobs", horizontal(shares, "ETTR of jobs", most=1.0) + jobs if shares else "", "no job ran"),
        *(f"<p>Note: {plain(note)}</p>" for note in report.notes),
    ]


def _section(title: str, content: str, otherwise: str) -> list[str]:
    return [f"<h2>{plain(title)}</h2>", content or f"<p>{plain(otherwise)}</p>"]


def _bars(bars: Sequence[Bar], title: str) -> str:
    return horizontal(bars, title) if bars else ""


def _tallies(tallies: Sequence[IncidentTally], what: str) -> str:
    if not tallies:
        return ""
    bars = [Bar(one.name, one.incidents, str(one.incidents), one.name != UNKNOWN) for one in tallies[:SHOWN]]
    rows = [tally_row(one) for one in tallies]
    return horizontal(bars, f"Incidents by {what.lower()}") + _table((what, "Incidents", "Took"), rows)


def _table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    def row(cells: tuple[str, ...], tag: str) -> str:
        return f"<tr>{''.join(f'<{tag}>{plain(cell)}</{tag}>' for cell in cells)}</tr>"

    return f"<table>{row(header, 'th')}{''.join(row(cells, 'td') for cells in rows)}</table>"
