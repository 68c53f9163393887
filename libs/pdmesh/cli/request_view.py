"""`pdmesh requests show|list`: a request's history, the choices of one HTTP request, and the latest requests."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

import msgspec
import typer

from pdmesh.cli.options import Asked, Output
from pdmesh.cli.state_folder import scheduler_of
from pdmesh.cli.tables import Column, Table, duration
from pdmesh.metrics import tpot_between_s
from pdmesh.wire.messages import GetRequest, ListRequests, RequestList, RequestRecord


def show_request(asked: Asked, request_id: str) -> None:
    """Print a request's record, or the choices of a request that has several.

    Raises PdmeshError if the request is not remembered, or no mesh can be asked.
    """
    question = GetRequest(request_id=request_id.rstrip("…"))  # a narrow terminal cuts ids like this
    answer = asked.answer(question, RequestRecord, RequestList)
    if asked.output is Output.JSON:
        typer.echo(msgspec.json.format(msgspec.json.encode(answer)).decode())
    elif isinstance(answer, RequestRecord):
        print_request(answer)
    elif isinstance(answer, RequestList):
        print_choices(request_id, answer)


def list_requests(asked: Asked, limit: int) -> None:
    """Print the latest ``limit`` requests. Raises PdmeshError if no mesh can be asked."""
    answer = asked.answer(ListRequests(limit=limit), RequestList)
    if asked.output is Output.JSON:
        typer.echo(msgspec.json.format(msgspec.json.encode(answer)).decode())
    elif answer.requests:
        requests_table(answer.requests).show()
        typer.echo("`pdmesh requests show` takes any unique beginning of an id, with or without chatcmpl-")
    else:
        record, _, _ = scheduler_of(asked.config, asked.state)
        services = () if record is None else record.services
        since_s = next((each.process.age_s() for each in services if each.name == "scheduler"), None)
        typer.echo(f"no requests since the scheduler started{'' if since_s is None else f' {duration(since_s)} ago'}")


def print_request(record: RequestRecord) -> None:
    """Print a request's record with all its entries."""
    arrived = datetime.fromtimestamp(record.arrived_at).astimezone().isoformat(sep=" ", timespec="milliseconds")
    typer.echo(f"request {typer.style(record.request_id, bold=True)}  arrived {arrived}")
    typer.echo(f"prompt {record.num_prompt_tokens} tokens  policy {record.bundle}")
    typer.echo(summary(record))
    if shares := computed_by(record):
        typer.echo(f"computed by {shares}")
    if num_again := computed_again(record):
        typer.echo(f"{num_again} tokens were computed again: a helper was lost before the others had received its KV")
    table = Table([Column("ms", right=True), Column("+ms", right=True), *map(Column, ("what", "where", "detail"))])
    before_s = 0.0
    for entry in record.entries:
        since_ms, step_ms = 1e3 * entry.at_s, 1e3 * (entry.at_s - before_s)
        table.add(f"{since_ms:.1f}", f"{step_ms:.1f}", entry.what, entry.instance_id or "", entry.detail)
        before_s = entry.at_s
    table.show()


def print_choices(request_id: str, choices: RequestList) -> None:
    """Print the requests that an id fits, with full ids: they may differ only at their ends."""
    typer.echo(f"request {typer.style(request_id, bold=True)} fits {len(choices.requests)} requests; give a full id")
    for record in choices.requests:
        typer.echo(f"{record.request_id}  {summary(record)}")


def requests_table(requests: Sequence[RequestRecord]) -> Table:
    """Return a table with a line for each request. A narrow terminal cuts ids; any unique beginning names a request."""
    has_labels = any(record.label for record in requests)
    cut = [Column("id", min_width=12), *([Column("label", min_width=12)] if has_labels else [])]
    numbers = [Column(title, right=True) for title in ("prompt", "output", "first ms", "last ms")]
    table = Table([*cut, Column("arrived"), Column("state"), *numbers])
    for record in requests:
        table.add(
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


def computed_by(record: RequestRecord) -> str:
    """Return each instance's share of a prompt's computation, with its waits; empty if one computed it all."""
    chunks = [(entry.instance_id or "", entry.figures) for entry in record.entries if entry.what == "chunk"]
    parts: list[str] = []
    for name in dict.fromkeys(name for name, _ in chunks):
        own = [figures for owner, figures in chunks if owner == name]
        num_tokens = sum(figures.get("num_tokens", 0.0) for figures in own)
        waited_s = sum(figures.get("waited_s", 0.0) for figures in own)
        step_s = sum(figures.get("step_s", 0.0) for figures in own)
        words = f"{len(own)} chunk{'s' * (len(own) > 1)}, {num_tokens:.0f} tokens, {_ms(step_s)} ms"
        parts.append(f"{name} ({words}, {_ms(waited_s)} ms of waiting for KV)")
    return ", ".join(parts) if len(parts) > 1 else ""


def computed_again(record: RequestRecord) -> int:
    """Return how many prompt tokens were computed and then lost with a helper, in all epochs together.

    Tokens that a new epoch computes anew are not counted.
    """
    num_again = 0
    done: set[int] = set()  # computed before the last loss in this epoch
    since: set[int] = set()
    for entry in record.entries:
        if entry.what == "chunk" and "start" in entry.figures:
            start, num_tokens = int(entry.figures["start"]), int(entry.figures["num_tokens"])
            tokens = range(start, start + num_tokens)
            num_again += len(done.intersection(tokens))
            since.update(tokens)
        elif entry.what == "continues without":
            done |= since
            since.clear()
        elif entry.what.startswith("queued again"):
            done.clear()
            since.clear()
    return num_again


def summary(record: RequestRecord) -> str:
    """Return a line with a request's state or end, and its tokens' times, as reported to the scheduler."""
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
