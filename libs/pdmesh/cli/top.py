"""`pdmesh top`: the mesh at work in a terminal, from the stream that feeds the gateway's page."""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import httpx
import msgspec
import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from pdmesh.cli import tables
from pdmesh.cli.history_view import events_table, note_line
from pdmesh.cli.http import Target, refusal
from pdmesh.cli.options import Output
from pdmesh.cli.status import link_lines
from pdmesh.cli.tables import Column, terminal_width
from pdmesh.errors import PdmeshError
from pdmesh.wire.messages import InstanceNote, LinkStatus, MeshEvent

#: One character of an instance's timeline, seconds; and how many there are.
CELL_S = 0.5
NUM_CELLS = 20

#: Requests shown; the page shows more.
MAX_REQUESTS = 12
#: Events shown.
MAX_EVENTS = 5

#: Styles of waiting requests, from these ages on.
_WAITING_STYLES = ((30.0, "red"), (5.0, "yellow"))

_LEVELS = " ▁▂▃▄▅▆▇█"
_STYLES = {"prefill": "blue", "decode": "green", "mixed": "magenta"}

Frame = Mapping[str, Any]


class Timelines:
    """How large a part of each of the last half seconds an instance's steps took."""

    def __init__(self) -> None:
        self._busy_s: dict[str, dict[int, float]] = defaultdict(lambda: defaultdict(float))
        self._last_cell = 0

    def take(self, now_s: float, steps: Sequence[Sequence[Any]]) -> None:
        """Add steps as the stream has them: instance, begin and end in seconds, and more."""
        self._last_cell = int(now_s / CELL_S)
        for instance_id, begin_s, end_s, *_ in steps:
            cells = self._busy_s[instance_id]
            first = max(int(begin_s / CELL_S), self._last_cell - NUM_CELLS + 1)  # of one that took hours, too
            for cell in range(first, int(end_s / CELL_S) + 1):
                cells[cell] += min(end_s, (cell + 1) * CELL_S) - max(begin_s, cell * CELL_S)
        oldest = self._last_cell - NUM_CELLS
        for cells in self._busy_s.values():
            for cell in [cell for cell in cells if cell <= oldest]:
                del cells[cell]

    def of(self, instance_id: str) -> str:
        """Return a character for each half second, the present one last."""
        cells = self._busy_s[instance_id]
        shares = [cells.get(cell, 0.0) / CELL_S for cell in range(self._last_cell - NUM_CELLS + 1, self._last_cell + 1)]
        return "".join(_LEVELS[min(len(_LEVELS) - 1, -int(-share * (len(_LEVELS) - 1) // 1))] for share in shares)


def run_top(target: Target, *, once: bool, output: Output) -> None:
    """Show the mesh until Ctrl-C, or once: also as JSON, and where standard output is no terminal.

    Raises PdmeshError if the gateway has no stream to show.
    """
    with target.client(read_timeout_s=30.0) as client:
        try:
            if once or output is Output.JSON or not sys.stdout.isatty():
                _show_once(next(_frames(client)), output)
                return
            timelines = Timelines()
            with Live(Text("waiting for the mesh"), console=_console(), screen=True, auto_refresh=False) as live:
                for frame in _frames(client):
                    timelines.take(frame["now_s"], frame["steps"])
                    live.update(view(frame, timelines, terminal_width()), refresh=True)
        except httpx.TransportError as error:
            raise PdmeshError(f"the gateway at {client.base_url} cannot be reached: {error}") from error
        except KeyboardInterrupt:
            pass


def _console() -> Console:
    return Console(markup=False, highlight=False, emoji=False)


def _show_once(frame: Frame, output: Output) -> None:
    if output is Output.JSON:
        typer.echo(json.dumps(frame, indent=2))
        return
    _console().print(view(frame, None, terminal_width()))


def _frames(client: httpx.Client) -> Iterator[Frame]:
    """What the gateway tells of the mesh. Raises PdmeshError when it stops, or will not."""
    with client.stream("GET", "/ui/events") as response:
        if response.status_code != 200:
            response.read()
            raise PdmeshError(_reason(response))
        for line in response.iter_lines():
            if line.startswith("data:"):
                frame: dict[str, Any] = json.loads(line.removeprefix("data:"))
                if "instances" not in frame:  # the gateway has no news
                    raise PdmeshError(f"the scheduler sends no updates: {frame['unready_reason']}")
                yield frame
    raise PdmeshError("the gateway ended the stream")


def _reason(response: httpx.Response) -> str:
    if response.status_code == 404:
        return "this gateway serves no page: gateway.ui is off"
    return refusal(response)


def view(frame: Frame, timelines: Timelines | None, width: int) -> RenderableType:
    """Return one frame as text of ``width`` columns; without the steps if no time was watched."""
    reason = frame["unready_reason"]
    head = Text.assemble(
        ("pdmesh ", "bold"),
        ("serving" if reason is None else reason, "green" if reason is None else "bold red"),
        f"  {frame['model']}  policy {frame['bundle']}  running {frame['num_running']}  waiting {frame['num_waiting']}",
        f"\nTTFT p50 / p99  {_percentiles(frame['ttft_s'])}   ITL p50 / p99  {_percentiles(frame['itl_s'])}",
        ("  (latest 4,096)", "dim"),
    )
    links = [Text(line, "dim") for line in link_lines(msgspec.convert(frame.get("links", ()), tuple[LinkStatus, ...]))]
    parts: list[RenderableType] = [
        _instances(frame, timelines),
        *_notes(frame),
        *links,
        Text(),
        *_requests(frame, width),
    ]
    return Group(head, Text(), *parts, *_events(frame, width))


def _notes(frame: Frame) -> Iterator[Text]:
    """Yield a sentence for each instance that does not serve, or that was restarted lately."""
    for item in frame["instances"]:
        if (note := item.get("note")) is not None:
            yield Text(note_line(item["id"], msgspec.convert(note, InstanceNote), frame["at"]), "yellow")


def _events(frame: Frame, width: int) -> Iterator[Text]:
    events = msgspec.convert(frame.get("events", ()), tuple[MeshEvent, ...])
    if events:
        yield Text()
        header, *lines = events_table(events, frame["at"], MAX_EVENTS).lines(width)
        yield Text(header, "dim")
        yield from map(Text, lines)


def _instances(frame: Frame, timelines: Timelines | None) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    steps = [] if timelines is None else [f"steps of {NUM_CELLS * CELL_S:g} s"]
    for title in ("instance", *steps, "KV blocks"):
        table.add_column(title, no_wrap=True)
    for title in ("prefills", "decodes", "queued"):
        table.add_column(title, justify="right", no_wrap=True)
    has_modes = any(item.get("batching") for item in frame["instances"])
    if has_modes:
        table.add_column("batching", no_wrap=True)
    for item in frame["instances"]:
        style = "dim" if item.get("gone") else _STYLES.get(item["role"], "")
        state = "" if item["state"] == "serving" else f" {item['state']}"
        taken, total = item["num_taken_blocks"], max(item["num_blocks"], 1)
        table.add_row(
            Text.assemble((item["id"], style), (state, "red")),
            *([] if timelines is None else [Text(timelines.of(item["id"]), style)]),
            "" if item.get("gone") else f"{_bar(taken / total)} {100 * taken / total:3.0f} %",
            str(item["num_prefilling"]),
            str(item["num_decoding"]),
            str(item["num_queued_tokens"]),
            *([_batching(item.get("batching"))] if has_modes else []),
        )
    return table


def _batching(batching: Mapping[str, Any] | None) -> str:
    """The mode, its phase, and what is predicted of `eb`."""
    if batching is None:
        return "no choice"
    phase, gain = batching.get("phase"), batching.get("gain")
    words = [batching["mode"], phase or "", "" if gain is None else f" eb {100 * gain:+.1f} %"]
    return " ".join(filter(None, words))


def _requests(frame: Frame, width: int) -> Iterator[Text]:
    """Yield a line for each request; in a narrow terminal ids and places are cut, and no other column."""
    cut = [Column("request", min_width=12), Column("where", min_width=12)]
    table = tables.Table([*cut, *(Column(title, right=True) for title in ("prompt", "progress", "age"))])
    requests = frame["requests"][:MAX_REQUESTS]
    for item in requests:
        done = item["num_planned_tokens"] / max(item["num_prompt_tokens"], 1)
        table.add(
            str(item.get("label") or item["id"])[:40],
            _where(item) or "waiting",
            str(item["num_prompt_tokens"]),
            item["phase"].replace("_", " ") if done >= 1 else f"{100 * done:.0f} %",
            f"{item['age_s']:.1f} s",
        )
    header, *lines = table.lines(width)
    yield Text(header, "dim")
    styles = ["" if item["where"] else _waiting_style(item["age_s"]) for item in requests]
    for line, style in zip_longest(lines, styles, fillvalue=""):
        yield Text(line, style)
    num_hidden = max(frame["num_running"] + frame["num_waiting"], len(frame["requests"])) - len(requests)
    if num_hidden > 0:
        yield Text(f"and {num_hidden} more; `pdmesh requests list` lists them", "dim")


def _waiting_style(age_s: float) -> str:
    return next((style for least_s, style in _WAITING_STYLES if age_s >= least_s), "")


def _where(item: Mapping[str, Any]) -> str:
    """Return the instances that compute the prompt, and the one that decodes."""
    leader, *others = item["where"] or [""]
    return " → ".join([" + ".join([leader, *item.get("helpers", ())]), *others])


def _bar(share: float, width: int = 5) -> str:
    filled = round(max(0.0, min(share, 1.0)) * width)
    return "█" * filled + "░" * (width - filled)


def _percentiles(values: Mapping[str, float] | None) -> str:
    return "-" if values is None else f"{_ms(values['p50'])} / {_ms(values['p99'])}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"
