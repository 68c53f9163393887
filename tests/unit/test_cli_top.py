"""`pdmesh top`: what it draws, and what it says when there is nothing to draw."""

from __future__ import annotations

import io
import json
from typing import Any

import httpx
import pytest
from rich.console import Console, Group
from rich.text import Text
from typer.testing import CliRunner

from pdmesh.cli.app import app
from pdmesh.cli.http import Target
from pdmesh.cli.top import CELL_S, NUM_CELLS, Timelines, view

FRAME: dict[str, Any] = {
    "now_s": 100.0,
    "model": "demo",
    "bundle": "pdmesh",
    "unready_reason": None,
    "num_running": 1,
    "num_waiting": 2,
    "ttft_s": {"p50": 0.1, "p99": 1.5},
    "itl_s": None,
    "instances": [
        {
            "id": "prefill-0",
            "role": "prefill",
            "state": "serving",
            "num_blocks": 100,
            "num_taken_blocks": 25,
            "num_prefilling": 1,
            "num_decoding": 0,
            "num_queued_tokens": 512,
        }
    ],
    "requests": [
        {
            "id": "abc",
            "label": "mine",
            "phase": "prefilling",
            "where": ["prefill-0", "decode-0"],
            "num_prompt_tokens": 1000,
            "num_planned_tokens": 250,
            "age_s": 0.5,
        }
    ],
    "steps": [["prefill-0", 99.0, 99.5, 512, 0, False]],
}


def text_of(frame: dict[str, Any], width: int = 160) -> str:
    timelines = Timelines()
    timelines.take(frame["now_s"], frame["steps"])
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(view(frame, timelines, width))
    return console.export_text()


def test_a_frame_says_what_the_page_says() -> None:
    text = text_of(FRAME)
    for part in (
        "serving",
        "policy pdmesh",
        "running 1",
        "waiting 2",
        "TTFT p50 / p99  100 ms / 1.5 s",
        "ITL p50 / p99  -",
        "prefill-0",
        "25 %",
    ):
        assert part in text
    for part in ("mine", "prefill-0 → decode-0", "1000", "25 %", "0.5 s"):
        assert part in text


def test_at_80_columns_progress_and_age_are_whole_and_what_is_not_shown_is_counted() -> None:
    (request,) = FRAME["requests"]
    long = {**request, "label": "", "id": "chatcmpl-0a57fd1ed650d5a659dfc0e3142cf4d7", "helpers": ["prefill-1"]}
    text = text_of({**FRAME, "requests": [long] * 20, "num_running": 25, "num_waiting": 5}, width=80)
    rows = [line for line in text.splitlines() if line.startswith("chatcmpl-0a5")]
    assert len(rows) == 12
    assert all(row.split()[-4:] == ["25", "%", "0.5", "s"] for row in rows)
    assert "and 18 more" in text
    assert max(map(len, text.splitlines())) <= 80


def test_a_request_that_waits_for_long_is_coloured() -> None:
    (request,) = FRAME["requests"]
    ages = {"new": 1.0, "slow": 6.0, "late": 61.0}
    waiting = [{**request, "label": name, "where": [], "age_s": age} for name, age in ages.items()]
    drawn = view({**FRAME, "requests": [*waiting, {**request, "label": "placed", "age_s": 90.0}]}, None, 80)
    assert isinstance(drawn, Group)
    styles = {text.plain.split(" ")[0]: text.style for text in drawn.renderables if isinstance(text, Text)}
    assert [styles[name] for name in (*ages, "placed")] == ["", "yellow", "red", ""]


def test_who_helps_stands_beside_the_leader() -> None:
    (request,) = FRAME["requests"]
    helped = {**request, "helpers": ["prefill-1", "prefill-2"]}
    assert "prefill-0 + prefill-1 + prefill-2 → decode-0" in text_of({**FRAME, "requests": [helped]})
    assert "waiting" in text_of({**FRAME, "requests": [{**request, "where": []}]})


def test_a_lost_instance_stays_and_says_why() -> None:
    note = {"at": 988.0, "cause": "was killed by SIGKILL", "next": "its supervisor starts it again"}
    (prefill,) = FRAME["instances"]
    gone = {**prefill, "id": "decode-0", "role": "decode", "state": "restarting", "note": note, "gone": True}
    event = {"at": 988.5, "what": "lost", "name": "decode-0", "detail": "was killed by SIGKILL"}
    text = text_of({**FRAME, "at": 1000.0, "instances": [prefill, gone], "events": [event]})
    assert "decode-0 restarting" in text
    assert "decode-0 was killed by SIGKILL 12 s ago; its supervisor starts it again" in text
    assert "11 s ago lost  decode-0 was killed by SIGKILL" in text


def test_modes_and_phases_are_shown_where_there_are_any() -> None:
    assert "batching" not in text_of(FRAME)
    (prefill,) = FRAME["instances"]
    exclusive = {**prefill, "id": "m-0", "batching": {"mode": "eb", "phase": "prefill", "gain": 0.0312}}
    mixed = {**prefill, "id": "m-1", "batching": {"mode": "mb"}}
    text = text_of({**FRAME, "instances": [prefill, exclusive, mixed]})
    assert "batching" in text
    assert "eb prefill  eb +3.1 %" in text
    (line,) = [line for line in text.splitlines() if line.startswith("m-1")]
    assert line.rstrip().endswith("mb")


def test_timelines_have_the_share_of_each_half_second_that_steps_took() -> None:
    timelines = Timelines()
    timelines.take(10.0, [["i", 9.0, 9.5, 1, 0, False], ["i", 9.75, 10.0, 1, 0, False]])
    drawn = timelines.of("i")
    assert len(drawn) == NUM_CELLS
    assert drawn[-3:] == "█▄ "
    assert timelines.of("another") == " " * NUM_CELLS
    timelines.take(10.0 + NUM_CELLS * CELL_S, [])
    assert timelines.of("i").strip() == ""


def test_a_step_of_a_lifetime_is_drawn_at_once() -> None:
    timelines = Timelines()
    timelines.take(1e9, [["i", 0.0, 1e9, 1, 0, False]])
    assert timelines.of("i") == "█" * (NUM_CELLS - 1) + " "


def served(monkeypatch: pytest.MonkeyPatch, handle: Any) -> None:
    def client(*_: Any, **__: Any) -> httpx.Client:
        return httpx.Client(transport=httpx.MockTransport(handle), base_url="http://gateway")

    monkeypatch.setattr(Target, "client", client)


def test_once_prints_and_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    body = b": no news\n\ndata: " + json.dumps(FRAME).encode() + b"\n\n"
    served(monkeypatch, lambda request: httpx.Response(200, content=body))
    shown = CliRunner().invoke(app, ["top", "--once"])
    assert shown.exit_code == 0, shown.output
    assert "prefill-0" in shown.output
    assert "steps of" not in shown.output  # there is no time to look back on
    assert CliRunner().invoke(app, ["top"]).output == shown.output, "without a terminal there is nothing to watch"
    as_json = CliRunner().invoke(app, ["top", "-o", "json"])
    assert json.loads(as_json.output) == FRAME


@pytest.mark.parametrize(
    ("response", "said"),
    [
        (httpx.Response(404, json={}), "gateway.ui is off"),
        (httpx.Response(401, json={"error": {"message": "You didn't provide an API key"}}), "Set PDMESH_API_KEY"),
        (httpx.Response(403, json={"error": {"message": "It lacks the scope 'watch'."}}), "lacks the scope 'watch'"),
        (httpx.Response(502, content=b"<html>"), "answered 502"),
        (
            httpx.Response(200, content=b'data: {"unready_reason": "the scheduler cannot be reached"}\n\n'),
            "cannot be reached",
        ),
        (httpx.Response(200, content=b""), "ended the stream"),
    ],
)
def test_what_is_wrong_is_said_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch, response: httpx.Response, said: str
) -> None:
    served(monkeypatch, lambda request: response)
    shown = CliRunner().invoke(app, ["top", "--once"])
    assert shown.exit_code != 0
    assert said in f"{shown.output}{shown.exception}"
