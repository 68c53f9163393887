"""How the commands write to a terminal."""

from __future__ import annotations

from rich.console import Console


def terminal() -> Console:
    """Return the console for people, on standard output. Names and reasons are shown as they are, not as markup."""
    return Console(markup=False, highlight=False, emoji=False)
