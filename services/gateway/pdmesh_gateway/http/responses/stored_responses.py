"""``/v1/responses/{response_id}``: responses in the background and stored ones."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any
from urllib.parse import parse_qs

import anyio.to_thread

from pdmesh.errors import RequestRejected
from pdmesh.model import RequestId
from pdmesh_gateway.http.body import INLINE_BYTES, read_in_pieces
from pdmesh_gateway.http.http_exchange import Exchange
from pdmesh_gateway.http.responses.background_responses import BackgroundResponse, EventLog
from pdmesh_gateway.http.responses.response_store import ResponseStore, StoredResponse
from pdmesh_gateway.http.responses.responses_protocol import InputItemList, ResponseDeleted
from pdmesh_gateway.http.responses.responses_requests import ItemObject, kind_of
from pdmesh_gateway.http.sse import KEEP_ALIVE
from pdmesh_gateway.sampling import invalid
from pdmesh_gateway.serving import Serving

#: Limit of the items on one page of ``input_items``.
MAX_PAGE = 100


class StoredResponses:
    """Endpoints of responses by tenant and id: get, stream again, cancel, delete."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self.kept = ResponseStore(serving.config.kept_responses_bytes, time.monotonic)
        #: Running responses by tenant and id.
        self.runs: dict[tuple[str, str], BackgroundResponse] = {}

    def get(self, tenant: str, response_id: str, *, status: int = 404) -> StoredResponse:
        """Return a stored response of the tenant.

        Raises RequestRejected with ``status``: 404 for a path, 400 for a body.
        """
        kept = self.kept.get(tenant, response_id)
        if kept is not None:
            return kept
        why = "Responses are kept for an hour at most, where there is room (gateway.kept_responses_bytes)"
        if not self.kept.keeps:
            why = "This server keeps no responses (gateway.kept_responses_bytes is 0)"
        elif not self._serving.generator.owns(RequestId(response_id.removeprefix("resp_"))):
            why = "Another gateway created it, and each gateway keeps its own: send a client's requests to one gateway"
        message = f"Response with id '{response_id[:100]}' not found. {why}. Send the whole conversation as `input`."
        param, code = None, "not_found"
        if status == 400:
            param, code = "previous_response_id", "previous_response_not_found"
        raise RequestRejected(message, status=status, param=param, code=code)

    async def one(self, exchange: Exchange) -> None:
        """Answer ``GET`` and ``DELETE /v1/responses/{response_id}``."""
        key = _key_of(exchange)
        run = self.runs.get(key)
        if exchange.scope["method"] == "DELETE":
            await self._delete(exchange)
        elif _query(exchange, "stream") == "true":
            log = self.get(*key).events if run is None else run.log
            if log is None:
                raise invalid("stream", "Only a response created with `background` can be streamed again.")
            number = _number_after(exchange)
            with self._serving.admission.hold(num_requests=1):
                await exchange.run_until_gone(lambda: self.tell(exchange, log, number))
        elif run is not None:
            await exchange.respond_json(run.begun)
        else:
            await exchange.respond(self.get(*key).response)

    async def cancel(self, exchange: Exchange) -> None:
        """Answer ``POST /v1/responses/{response_id}/cancel``: cancel a response in the background.

        One that has ended is unchanged.
        """
        key = _key_of(exchange)
        if (run := self.runs.get(key)) is not None:
            await run.cancel()
        kept = self.get(*key)
        if kept.events is None:
            raise invalid("response_id", "Only a response created with `background` can be cancelled.")
        await exchange.respond(kept.response)

    async def input_items(self, exchange: Exchange) -> None:
        """Answer ``GET /v1/responses/{response_id}/input_items``, page by page."""
        kept = self.get(*_key_of(exchange))
        items = [_listed(item, kept.response_id, i) for i, item in enumerate(await items_in(kept.input_items))]
        if _query(exchange, "order") != "asc":
            items.reverse()
        after = _query(exchange, "after")
        begin = next((i + 1 for i, item in enumerate(items) if item["id"] == after), 0)
        limit = _query(exchange, "limit") or "20"
        most = int(limit) if limit.isdecimal() and len(limit) < 4 else 0
        if not 1 <= most <= MAX_PAGE:
            raise invalid("limit", f"`limit` must be from 1 to {MAX_PAGE}.")
        page = items[begin : begin + most]
        await exchange.respond_json(
            InputItemList(
                data=page,
                first_id=page[0]["id"] if page else None,
                last_id=page[-1]["id"] if page else None,
                has_more=begin + most < len(items),
            )
        )

    async def tell(self, exchange: Exchange, log: EventLog, number: int) -> None:
        """Send a response's events from ``number`` on, until its end. Raises RequestRejected if they were dropped."""
        async for events in log.read(number, idle_s=self._serving.config.sse_keep_alive_s or math.inf):
            if not exchange.started:
                await exchange.start_events()
            await exchange.send_events(events or KEEP_ALIVE)
        if not exchange.started:
            # The client has all events, and no more will come.
            await exchange.start_events()
        await exchange.send_events(b"", more=False)

    async def _delete(self, exchange: Exchange) -> None:
        key = _key_of(exchange)
        if (run := self.runs.get(key)) is None:
            self.get(*key)
        else:
            # Cancelling stores the response with the output so far.
            await run.cancel()
        self.kept.delete(*key)
        await exchange.respond_json(ResponseDeleted(id=key[1]))


async def items_in(text: bytes) -> list[ItemObject]:
    """Return items from stored JSON, read on a thread if it is large."""
    items: list[ItemObject]
    if len(text) <= INLINE_BYTES:
        items = read_in_pieces(text)
    else:
        items = await anyio.to_thread.run_sync(read_in_pieces, text)
    return items


def _listed(item: ItemObject, response_id: str, index: int) -> dict[str, Any]:
    """Return an input item for a list: with an id and a type, and a message's text as parts."""
    kind = kind_of(item)
    listed = {"id": f"{kind}_{response_id.removeprefix('resp_')}-in{index}", **item, "type": kind}
    if kind == "message":
        listed.setdefault("status", "completed")
        if isinstance(content := item.get("content"), str):
            part = "output_text" if item.get("role") == "assistant" else "input_text"
            listed["content"] = [{"type": part, "text": content}]
    return listed


def _key_of(exchange: Exchange) -> tuple[str, str]:
    """Return the tenant of a request and the response that its path names."""
    return exchange.known_client.name, exchange.scope["path_params"]["response_id"]


def _number_after(exchange: Exchange) -> int:
    """Return the number of the first event that a client asks for. Raise RequestRejected if it is no number."""
    after = _query(exchange, "starting_after") or ""
    if after and not (after.isdecimal() and len(after) < 10):
        raise invalid("starting_after", "`starting_after` must be an event's `sequence_number`.")
    return int(after) + 1 if after else 0


def _query(exchange: Exchange, name: str) -> str | None:
    values: Sequence[str] = parse_qs(exchange.scope.get("query_string", b"").decode("latin-1")).get(name, [])
    return values[-1] if values else None
