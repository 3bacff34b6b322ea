"""The report over some days as one HTML page of plots and tables, without scripts or external files.

The plots are SVG text: horizontal bars and vertical columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from console.views.ledger_report import SHOWN, day, ettr_text, headline, job_row, lost_causes, tally_row
from controlplane import text
from controlplane.queries.report import UNKNOWN, IncidentTally, LedgerReport
from controlplane.shown import clean_line

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
    """The HTML of the page."""
    title = f"everstep: {day(report.since)} to {day(report.until)}"
    parts = [f"<h1>{escaped(title)}</h1>", f'<p class="sub">{escaped(headline(report))}</p>']
    if not report.empty:
        parts += _sections(report)
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escaped(title)}</title><style>{STYLE}</style>"
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
        *(f"<p>Note: {escaped(note)}</p>" for note in report.notes),
    ]


def _section(title: str, content: str, otherwise: str) -> list[str]:
    return [f"<h2>{escaped(title)}</h2>", content or f"<p>{escaped(otherwise)}</p>"]


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
        return f"<tr>{''.join(f'<{tag}>{escaped(cell)}</{tag}>' for cell in cells)}</tr>"

    return f"<table>{row(header, 'th')}{''.join(row(cells, 'td') for cells in rows)}</table>"


WIDTH = 640
"""Width of a plot, pixels; it is scaled with the page."""
LABEL = 190
"""Room for the names of bars, pixels."""
VALUE = 110
"""Room for the values after the bars, pixels."""
ROW = 24
"""Height of the row of a bar, pixels."""
HEIGHT = 150
"""Height of a plot of columns, pixels."""
LABEL_CHARACTERS = 28
COLUMN_LABELS = 8
"""The largest number of columns with a label."""


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar or column."""

    label: str
    value: float
    shown: str
    """The value as text."""
    known: bool = True
    """False: the bar is grey, e.g. for an unknown cause."""


def escaped(words: str) -> str:
    """Text for HTML and SVG: escaped, and without control characters."""
    return escape(clean_line(words), quote=True)


def horizontal(bars: Sequence[Bar], title: str, *, most: float | None = None) -> str:
    """Bars one below the other, each in a row with its name and value.

    Args:
        bars: Bars from top to bottom.
        title: Text for readers who cannot see the plot.
        most: The value of a bar with full length; None: the greatest value.
    """
    full = most or max((bar.value for bar in bars), default=0.0)
    room = WIDTH - LABEL - VALUE
    rows = []
    for index, bar in enumerate(bars):
        top = index * ROW
        length = room * min(1.0, max(0.0, bar.value / full)) if full > 0 else 0.0
        rows.append(
            f"<g><title>{escaped(bar.label)}: {escaped(bar.shown)}</title>"
            f'<text x="{LABEL - 8}" y="{top + 16}" text-anchor="end">{escaped(_short(bar.label))}</text>'
            f'<rect class="{_class(bar)}" x="{LABEL}" y="{top + 4}" width="{length:.1f}" height="{ROW - 8}"/>'
            f'<text class="value" x="{LABEL + length + 6:.1f}" y="{top + 16}">{escaped(bar.shown)}</text></g>'
        )
    return _svg(rows, title, max(ROW, ROW * len(bars)))


def vertical(bars: Sequence[Bar], title: str) -> str:
    """Columns from left to right, e.g. one for each day; if there are many, only some have a label."""
    full = max((bar.value for bar in bars), default=0.0)
    step = WIDTH / max(1, len(bars))
    width = min(step * 0.7, 40.0)
    every = max(1, -(-len(bars) // COLUMN_LABELS))
    base = HEIGHT - 20
    columns = [f'<line x1="0" y1="{base}" x2="{WIDTH}" y2="{base}"/>']
    for index, bar in enumerate(bars):
        height = (base - 20) * bar.value / full if full > 0 else 0.0
        middle, top = (index + 0.5) * step, base - height
        parts = [
            f"<title>{escaped(bar.label)}: {escaped(bar.shown)}</title>",
            f'<rect class="{_class(bar)}" x="{middle - width / 2:.1f}" y="{top:.1f}" width="{width:.1f}" '
            f'height="{height:.1f}"/>',
        ]
        if bar.value and step > 8 * len(bar.shown):
            parts.append(_centred(middle, top - 4, bar.shown, "value"))
        if index % every == 0:
            parts.append(_centred(middle, HEIGHT - 4, _short(bar.label), "name"))
        columns.append(f"<g>{''.join(parts)}</g>")
    return _svg(columns, title, HEIGHT)


def _centred(x: float, y: float, words: str, kind: str) -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="middle">{escaped(words)}</text>'


def _class(bar: Bar) -> str:
    return "bar" if bar.known else "bar unknown"


def _short(label: str) -> str:
    return label if len(label) <= LABEL_CHARACTERS else label[: LABEL_CHARACTERS - 1] + "…"


def _svg(parts: Sequence[str], title: str, height: int) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" role="img" '
        f'aria-label="{escaped(title)}">{"".join(parts)}</svg>'
    )
