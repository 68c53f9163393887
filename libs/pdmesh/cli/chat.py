"""`pdmesh chat`: a streaming conversation with a gateway."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import typer

from pdmesh.cli.http import Target, refusal
from pdmesh.errors import PdmeshError

#: Between two pieces of an answer: a long prompt ahead of ours may take minutes.
_READ_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    model: str | None
    system: str | None
    max_tokens: int
    temperature: float


def run_chat(target: Target, options: ChatOptions, message: str | None) -> int:
    """Converse until the end of input, or give one answer to ``message``. Raises PdmeshError."""
    with target.client(read_timeout_s=_READ_TIMEOUT_S) as client:
        try:
            model = options.model or _first_model(client)
            history = [{"role": "system", "content": options.system}] if options.system else []
            if message is not None:
                _turn(client, model, options, history, message)
                return 0
            typer.echo(f"{model} at {client.base_url}; Ctrl-C stops an answer, Ctrl-D exits")
            return _converse(client, model, options, history)
        except httpx.TransportError as error:
            raise PdmeshError(f"the gateway at {client.base_url} cannot be reached: {error}") from error


def _converse(client: httpx.Client, model: str, options: ChatOptions, history: list[dict[str, str]]) -> int:
    while True:
        try:
            text = input("> ")
        except (EOFError, KeyboardInterrupt):
            typer.echo()
            return 0
        if not text.strip():
            continue
        try:
            _turn(client, model, options, history, text)
        except KeyboardInterrupt:
            typer.echo(" [stopped]")
        except PdmeshError as error:  # this turn failed, the conversation goes on
            typer.echo(f"[{error}]")


def _turn(client: httpx.Client, model: str, options: ChatOptions, history: list[dict[str, str]], text: str) -> None:
    """Say ``text``, print the answer as it comes, and add both to ``history`` if it was given in full."""
    said = {"role": "user", "content": text}
    body = {
        "model": model,
        "messages": [*history, said],
        "max_tokens": options.max_tokens,
        "temperature": options.temperature,
        "stream": True,
    }
    answer, request_id = "", ""
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.status_code != 200:
            response.read()
            raise PdmeshError(refusal(response))
        for chunk in _events(response):
            request_id = chunk.get("id", request_id)
            for choice in chunk.get("choices", []):
                piece = choice.get("delta", {}).get("content") or ""
                typer.echo(piece, nl=False)
                answer += piece
    typer.echo()
    if request_id:
        typer.echo(f"[{request_id}]", err=True)  # what `pdmesh requests show` takes
    history += [said, {"role": "assistant", "content": answer}]


def _events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """The objects of an SSE stream up to its ``[DONE]``. Raises PdmeshError for an error event or a cut-off stream."""
    for line in response.iter_lines():
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        event = json.loads(data)
        if "error" in event:
            raise PdmeshError(str(event["error"].get("message", event["error"])))
        yield event
    raise PdmeshError("the answer was cut off")


def _first_model(client: httpx.Client) -> str:
    response = client.get("/v1/models")
    if response.status_code != 200:
        raise PdmeshError(refusal(response))
    return str(response.json()["data"][0]["id"])
