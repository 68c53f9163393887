"""How `pdmesh requests show` prints a request's life, or the choices that one HTTP request became."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from rich.console import Console
from rich.table import Table

from pdmesh.metrics import tpot_between_s
from pdmesh.wire.messages import RequestList, RequestRecord


def print_request(console: Console, record: RequestRecord) -> None:
    arrived = datetime.fromtimestamp(record.arrived_at).astimezone().isoformat(sep=" ", timespec="milliseconds")
    console.print(
        f"request [bold]{record.request_id}[/]  arrived {arrived}  "
        f"prompt {record.num_prompt_tokens} tokens  policy {record.bundle}",
        highlight=False,
    )
    console.print(summary(record), highlight=False)
    table = Table(box=None, pad_edge=False)
    table.add_column("ms", justify="right")
    table.add_column("+ms", justify="right")
    for column in ("what", "where", "detail"):
        table.add_column(column)
    before_s = 0.0
    for entry in record.entries:
        since_ms, step_ms = 1e3 * entry.at_s, 1e3 * (entry.at_s - before_s)
        table.add_row(f"{since_ms:.1f}", f"{step_ms:.1f}", entry.what, entry.instance_id or "", entry.detail)
        before_s = entry.at_s
    console.print(table)


def print_choices(console: Console, request_id: str, choices: RequestList) -> None:
    console.print(
        f"request [bold]{request_id}[/] fits {len(choices.requests)} requests; give one of their ids", highlight=False
    )
    console.print(requests_table(choices.requests))


def requests_table(requests: Sequence[RequestRecord]) -> Table:
    """A line for each."""
    table = Table(box=None, pad_edge=False)
    table.add_column("id", min_width=max((len(record.request_id) for record in requests), default=0))  # never cut
    has_labels = any(record.label for record in requests)
    for column in ("label", "arrived", "state") if has_labels else ("arrived", "state"):
        table.add_column(column)
    for column in ("prompt", "output", "first ms", "last ms"):
        table.add_column(column, justify="right")
    for record in requests:
        table.add_row(
            record.request_id,
            *([record.label] if has_labels else []),
            datetime.fromtimestamp(record.arrived_at).astimezone().strftime("%H:%M:%S"),
            record.state,
            str(record.num_prompt_tokens),
            "" if record.num_output_tokens is None else str(record.num_output_tokens),
            _ms(record.first_token_s),
            _ms(record.last_token_s),
        )
    return table


def summary(record: RequestRecord) -> str:
    """One line: how it stands or ended, and when its tokens came, as the scheduler heard of them."""
    parts = [record.state]
    if record.num_output_tokens is not None:
        parts.append(f"{record.num_output_tokens} output tokens")
    if record.first_token_s is not None:
        parts.append(f"first token after {_ms(record.first_token_s)} ms")
    if record.last_token_s is not None:
        parts.append(f"last after {_ms(record.last_token_s)} ms")
        if record.first_token_s is not None and record.num_output_tokens is not None:
            tpot_s = tpot_between_s(record.first_token_s, record.last_token_s, record.num_output_tokens)
            if tpot_s is not None:
                parts.append(f"{_ms(tpot_s)} ms a token")
    if record.slo_met is not None:
        parts.append(f"targets {'met' if record.slo_met else 'missed'}")
    return ", ".join(parts)


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{1e3 * seconds:.1f}"
