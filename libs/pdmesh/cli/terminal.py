"""How the commands write to a terminal."""

from __future__ import annotations

from rich.console import Console


def terminal() -> Console:
    """For people, on standard output. What names and reasons hold is shown as it is: none of it is markup."""
    return Console(markup=False, highlight=False, emoji=False)
