"""How ``--help`` lists commands."""

from __future__ import annotations

import inspect
from typing import Any

from typer.core import TyperGroup


class WholeSummaries(TyperGroup):
    """A group whose commands are listed with the whole first paragraph of their help."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the list of commands."""
        rows: list[tuple[str, str]] = []
        for name in self.list_commands(ctx):
            command = self.get_command(ctx, name)
            if command is not None and not command.hidden:
                summary = inspect.cleandoc(command.help or "").partition("\n\n")[0]
                rows.append((name, " ".join(summary.split())))
        if rows:
            with formatter.section("Commands"):
                formatter.write_dl(rows)
