"""Rich output of commands: all text is plain text, and never markup."""

from __future__ import annotations

import sys
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.text import Text

from controlplane.shown import clean

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
