"""Commands with commands of their own, of which one is meant where none is named."""

from __future__ import annotations

from typing import Any

from typer.core import TyperGroup


class DefaultCommand(TyperGroup):
    """``everstep policy gpt`` is short for ``everstep policy show gpt``."""

    default = ""
    """Name of the command that is meant."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Add the name of the command that is meant where none is given."""
        named = bool(args) and (args[0] in self.commands or args[0] in ctx.help_option_names)
        return super().parse_args(ctx, args if named else [self.default, *args])
