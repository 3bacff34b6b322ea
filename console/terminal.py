"""Text for terminals and pipes: what a command prints is plain text, and never markup."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.text import Text

from controlplane.shown import clean, clean_line

PIPE_WIDTH = 160
"""Columns of a table in a pipe."""


class PlainConsole(Console):
    """Shows plain strings, in tables too, as they are: brackets mean nothing, control characters are made visible."""

    def __init__(self, **options: Any) -> None:
        width = None if sys.stdout.isatty() else PIPE_WIDTH
        super().__init__(**({"width": width} | options | {"markup": False, "highlight": False, "emoji": False}))

    def render_str(self, text: str, **options: Any) -> Text:
        """Render a plain string, without markup."""
        return super().render_str(clean(text), **options)


def styled(text: str, style: str = "") -> Text:
    """A text with a style."""
    return Text(clean(text), style=style)


def together(*parts: RenderableType) -> Group:
    """Several renderables, one below the other."""
    return Group(*parts)


def aligned(rows: Sequence[tuple[str, ...]], indent: str = "") -> list[str]:
    """Rows as plain lines with aligned columns, two spaces apart, without spaces at the end of a line."""
    shown = [[clean_line(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in shown if i < len(row)) for i in range(max(map(len, shown), default=0))]
    return [
        indent + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)).rstrip()
        for row in shown
    ]
