"""Command groups with a default subcommand."""

from __future__ import annotations

from typing import Any

from typer.core import TyperGroup


class DefaultCommand(TyperGroup):
    """``everstep policy gpt`` is short for ``everstep policy show gpt``."""

    default = ""
    """Name of the default subcommand."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Insert the default subcommand's name where the arguments name none."""
        named = bool(args) and (args[0] in self.commands or args[0] in ctx.help_option_names)
        return super().parse_args(ctx, args if named else [self.default, *args])
