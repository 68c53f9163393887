"""`pdmesh chat`: a streaming conversation with a gateway."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import typer

from pdmesh.cli.http import Target, refusal
from pdmesh.cli.options import ChatOptions
from pdmesh.errors import PdmeshError

#: Seconds between two pieces of an answer: a long prompt ahead of ours may take minutes.
_READ_TIMEOUT_S = 600.0


#: A message in the API's form.
Message = dict[str, Any]


def run_chat(target: Target, options: ChatOptions, message: str | None) -> int:
    """Converse until the end of input, or print one answer to ``message``. Return the exit code.

    Raise PdmeshError if the gateway cannot be reached, or refuses ``message``.
    """
    fields: dict[str, Any] = {"max_tokens": options.max_tokens, "stream": True}
    if options.temperature is not None:
        fields["temperature"] = options.temperature
    if options.tools is not None:
        fields["tools"] = _read_tools(options.tools)
    if options.tool_choice is not None:
        fields["tool_choice"] = _tool_choice(options.tool_choice)
    with target.client(read_timeout_s=_READ_TIMEOUT_S) as client:
        try:
            fields["model"] = options.model or _first_model(client)
            history: list[Message] = [{"role": "system", "content": options.system}] if options.system else []
            if message is not None:
                _turn(client, fields, history, [{"role": "user", "content": message}])
                return 0
            typer.echo(f"{fields['model']} at {client.base_url}; Ctrl-C stops an answer, Ctrl-D exits")
            return _converse(client, fields, history)
        except httpx.TransportError as error:
            raise PdmeshError(f"the gateway at {client.base_url} cannot be reached: {error}") from error


def _converse(client: httpx.Client, fields: dict[str, Any], history: list[Message]) -> int:
    while True:
        try:
            said = _ask(history)
        except (EOFError, KeyboardInterrupt):
            typer.echo()
            return 0
        if not said:
            continue
        try:
            _turn(client, fields, history, said)
        except KeyboardInterrupt:
            typer.echo(" [stopped]")
        except PdmeshError as error:  # only this turn failed
            typer.echo(f"[{error}]")


def _ask(history: list[Message]) -> list[Message]:
    """Return the next messages: results of the last answer's calls, else a typed message; none for an empty line."""
    calls = history[-1].get("tool_calls") if history else None
    if calls:
        return [
            {"role": "tool", "tool_call_id": call["id"], "content": input(f"{call['function']['name']} returns> ")}
            for call in calls
        ]
    text = input("> ")
    return [{"role": "user", "content": text}] if text.strip() else []


def _turn(client: httpx.Client, fields: dict[str, Any], history: list[Message], said: list[Message]) -> None:
    """Send messages and print the answer as it comes. Add both to ``history`` if the answer is complete.

    Raises PdmeshError if the gateway refuses, or the answer breaks off.
    """
    body = {**fields, "messages": [*history, *said]}
    answer = _Answer()
    request_id = ""
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.status_code != 200:
            response.read()
            raise PdmeshError(refusal(response))
        for chunk in _events(response):
            request_id = chunk.get("id", request_id)
            for choice in chunk.get("choices", []):
                answer.add(choice.get("delta", {}))
                answer.is_cut |= choice.get("finish_reason") == "length"
    answer.end()
    if answer.is_cut:
        note = f"[cut at the limit of tokens: --max-tokens is {fields['max_tokens']}, or the context is full]"
        typer.echo(note, err=True)
    if request_id:
        typer.echo(f"[{request_id}]", err=True)  # id for `pdmesh requests show`
    history += [*said, answer.message]


class _Answer:
    """An answer, printed as it comes: reasoning is dim, and each call has its own line."""

    def __init__(self) -> None:
        self.message: Message = {"role": "assistant", "content": ""}
        self.is_cut = False
        self._printing = ""  # kind of the last printed text

    def add(self, delta: dict[str, Any]) -> None:
        if reasoning := delta.get("reasoning_content"):
            self._show("reasoning", typer.style(reasoning, dim=True))
        if content := delta.get("content"):
            self._show("content", content)
            self.message["content"] += content
        for piece in delta.get("tool_calls", []):
            self._add_call(piece)

    def end(self) -> None:
        typer.echo()

    def _add_call(self, piece: dict[str, Any]) -> None:
        calls = self.message.setdefault("tool_calls", [])
        function = piece["function"]
        if piece["index"] == len(calls):
            calls.append({"id": piece["id"], "type": "function", "function": {"name": "", "arguments": ""}})
            self._printing = self._printing and "an earlier call"
        called = calls[piece["index"]]["function"]
        called["name"] += function.get("name") or ""
        called["arguments"] += function.get("arguments") or ""
        name = typer.style(function["name"], bold=True) + " " if function.get("name") else ""
        self._show("call", name + (function.get("arguments") or ""))

    def _show(self, kind: str, text: str) -> None:
        if self._printing not in ("", kind):
            typer.echo()
        self._printing = kind
        typer.echo(text, nl=False)


def _read_tools(path: Path) -> list[Any]:
    """Return the tools of a JSON file: a list of tools in the API's form, or of functions.

    Raise PdmeshError for an unreadable file.
    """
    try:
        tools = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PdmeshError(f"cannot read tools from {path}: {error}") from error
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise PdmeshError(f"{path} does not hold a list of tools")
    return [tool if "function" in tool else {"type": "function", "function": tool} for tool in tools]


def _tool_choice(choice: str) -> Any:
    if choice in ("none", "auto", "required"):
        return choice
    return {"type": "function", "function": {"name": choice}}


def _events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """Yield the objects of an SSE stream up to its ``[DONE]``. Raises PdmeshError for an error event or a cut-off
    stream.
    """
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
