"""Plots as SVG text without external files: horizontal bars and vertical columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from controlplane.shown import clean_line

WIDTH = 640
"""Width of a plot, pixels; it is scaled with the page."""
LABEL = 190
"""Room for the names of bars, pixels."""
VALUE = 110
"""Room for the values after the bars, pixels."""
ROW = 24
HEIGHT = 150
"""Height of the columns, pixels."""
LABEL_CHARACTERS = 28
COLUMN_LABELS = 8
"""About this many columns have a label."""


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar or column."""

    label: str
    value: float
    text: str
    """The value as text."""
    known: bool = True
    """False: it is drawn in grey, e.g. for an unknown cause."""


def plain(text: str) -> str:
    """Text for HTML and SVG: escaped, without control characters."""
    return escape(clean_line(text), quote=True)


def horizontal(bars: Sequence[Bar], title: str, *, most: float | None = None) -> str:
    """Bars from left to right, each in a row with its name and value.

    Args:
        bars: Bars from top to bottom.
        title: Text for readers who cannot see the plot.
        most: The value of a full bar; None: the greatest value.
    """
    full = most or max((bar.value for bar in bars), default=0.0)
    room = WIDTH - LABEL - VALUE
    rows = []
    for index, bar in enumerate(bars):
        top = index * ROW
        length = room * min(1.0, max(0.0, bar.value / full)) if full > 0 else 0.0
        rows.append(
            f"<g><title>{plain(bar.label)}: {plain(bar.text)}</title>"
            f'<text x="{LABEL - 8}" y="{top + 16}" text-anchor="end">{plain(_short(bar.label))}</text>'
            f'<rect class="{_class(bar)}" x="{LABEL}" y="{top + 4}" width="{length:.1f}" height="{ROW - 8}"/>'
            f'<text class="value" x="{LABEL + length + 6:.1f}" y="{top + 16}">{plain(bar.text)}</text></g>'
        )
    return _svg(rows, title, max(ROW, ROW * len(bars)))


def vertical(bars: Sequence[Bar], title: str) -> str:
    """Columns from bottom to top, e.g. one for each day; if there are many, only some have a label."""
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
            f"<title>{plain(bar.label)}: {plain(bar.text)}</title>",
            f'<rect class="{_class(bar)}" x="{middle - width / 2:.1f}" y="{top:.1f}" width="{width:.1f}" '
            f'height="{height:.1f}"/>',
        ]
        if bar.value and step > 8 * len(bar.text):
            parts.append(_centred(middle, top - 4, bar.text, "value"))
        if index % every == 0:
            parts.append(_centred(middle, HEIGHT - 4, _short(bar.label), "name"))
        columns.append(f"<g>{''.join(parts)}</g>")
    return _svg(columns, title, HEIGHT)


def _centred(x: float, y: float, text: str, kind: str) -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="middle">{plain(text)}</text>'


def _class(bar: Bar) -> str:
    return "bar" if bar.known else "bar unknown"


def _short(label: str) -> str:
    return label if len(label) <= LABEL_CHARACTERS else label[: LABEL_CHARACTERS - 1] + "…"


def _svg(parts: Sequence[str], title: str, height: int) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" role="img" '
        f'aria-label="{plain(title)}">{"".join(parts)}</svg>'
    )
