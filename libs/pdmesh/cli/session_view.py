"""`pdmesh sessions list|show|end`: the agents and conversations that clients name."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import typer

from pdmesh.cli.options import Asked, Output
from pdmesh.cli.tables import Column, Table, duration
from pdmesh.wire.messages import CloseSession, ListSessions, SessionList, SessionStatus

#: Digits of an id in a table; any unique beginning names a session.
SHORT_ID = 8


def list_sessions(asked: Asked, limit: int) -> None:
    """Print the ``limit`` sessions whose state changed last. Raises PdmeshError if no mesh can be asked."""
    answer = asked.answer(ListSessions(limit=limit), SessionList)
    if asked.output is Output.JSON:
        _echo_json(answer)
    elif answer.sessions:
        sessions_table(answer.sessions).show()
    else:
        typer.echo("no sessions: no client has named one lately (see docs/clients.md)")


def show_session(asked: Asked, session: str) -> None:
    """Print all that is known of a session. Raises PdmeshError if it is unknown, or no mesh can be asked."""
    answer = asked.answer(ListSessions(session=session), SessionList)
    if asked.output is Output.JSON:
        _echo_json(answer)
        return
    for each in answer.sessions:
        typer.echo("\n".join(_lines(each)))


def end_session(asked: Asked, session: str) -> None:
    """End a session. Raises PdmeshError if it is unknown or not unique, or no mesh can be asked."""
    asked.answer(CloseSession(session=session), SessionList)
    typer.echo(f"session {session} is ended: its cached KV goes first")


def sessions_table(sessions: Sequence[SessionStatus]) -> Table:
    """Return a table with a line for each session."""
    has_tenants = any(each.tenant for each in sessions)
    numbers = [Column(title, right=True) for title in ("turns", "prompt", "reused")]
    table = Table(
        [
            Column("session"),
            *([Column("tenant", min_width=8)] if has_tenants else []),
            Column("state"),
            Column("since", right=True),
            *numbers,
            Column("cached on", min_width=8),
        ]
    )
    for each in sessions:
        table.add(
            each.session[:SHORT_ID],
            *([each.tenant] if has_tenants else []),
            each.state,
            duration(each.since_s),
            str(each.num_turns),
            str(each.num_prompt_tokens),
            _share(each),
            ", ".join(each.cached_on),
        )
    return table


def _lines(session: SessionStatus) -> list[str]:
    pause = "not known yet" if session.pause_s is None else duration(session.pause_s)
    lines = [
        f"session {typer.style(session.session, bold=True)}  {session.state} since {duration(session.since_s)}",
        f"turns {session.num_turns}  usual pause {pause}  latest prompt {session.num_prompt_tokens} tokens",
        f"reused {session.num_reused_tokens} of {session.num_possible_tokens} tokens that an earlier turn had",
        f"cached on {', '.join(session.cached_on) or 'no instance'}",
    ]
    if session.num_waits:
        lines.append(f"set aside {session.num_waits} times lately, at most {duration(session.longest_aside_s)}")
    if session.tenant:
        lines.append(f"tenant {session.tenant}")
    if session.parent is not None:
        lines.append(f"child of {session.parent}")
    if session.num_children:
        lines.append(f"children {session.num_children}")
    return lines


def _share(session: SessionStatus) -> str:
    if not session.num_possible_tokens:
        return ""
    return f"{100 * session.num_reused_tokens / session.num_possible_tokens:.0f} %"


def _echo_json(answer: SessionList) -> None:
    typer.echo(msgspec.json.format(msgspec.json.encode(answer)).decode())
