"""The page that shows the mesh at work: its files, its stream, and one request's life."""

from __future__ import annotations

from ipaddress import ip_address

import anyio
import msgspec

from pdmesh.errors import InstanceUnavailable, PdmeshError, RequestRejected
from pdmesh.wire.admin import QuestionRefused, ask_scheduler
from pdmesh.wire.messages import GetRequest, RequestList, RequestRecord
from pdmesh_gateway.http.http_exchange import Exchange
from pdmesh_gateway.http.page_files import PageFiles
from pdmesh_gateway.serving import Serving

#: A comment goes out when there was no frame for so long, so that a proxy, and we, notice a page that is gone.
SILENCE_S = 5.0


class UiEndpoints:
    """The handlers. What they tell of the mesh needs a key, or, where there are no keys, a client on this machine."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self.files = PageFiles("ui")

    async def elsewhere(self, exchange: Exchange) -> None:
        """Send a browser to the page, from where a person who has only the address looks for it.

        By a path relative to the one asked for: a proxy may serve us under one of its own.
        """
        path = b"ui" if exchange.scope["path"] == "/" else b"../ui"
        await exchange.respond(b"", status=307, content_type=b"text/plain", headers=[(b"location", path)])

    async def events(self, exchange: Exchange) -> None:
        """Frames of the mesh's activity as server-sent events, until the page goes."""
        self._check_place(exchange)
        serving = self._serving

        async def stream() -> None:
            async with serving.activity.frames() as frames:
                await exchange.start_events()
                while True:
                    frame = b": no news\n\n"
                    with anyio.move_on_after(SILENCE_S) as silence:
                        frame = await frames.receive()
                    if silence.cancelled_caught and serving.link.unready_reason is not None:
                        frame = (
                            b"data: " + msgspec.json.encode({"unready_reason": serving.link.unready_reason}) + b"\n\n"
                        )
                    await exchange.send_events(frame)

        await exchange.run_until_gone(stream)

    async def request(self, exchange: Exchange) -> None:
        """One request's life, by any of its names."""
        self._check_place(exchange)
        name = exchange.scope["path_params"]["request_id"]
        try:
            address, security = self._serving.scheduler
            answer = await ask_scheduler(address, security, GetRequest(request_id=name))
        except (InstanceUnavailable, QuestionRefused) as error:
            raise RequestRejected(f"{error}", status=503, code="unavailable", retry_after_s=1) from error
        except PdmeshError as error:
            raise RequestRejected(f"{error}", status=404, code="not_found") from error
        record = answer.requests[0] if isinstance(answer, RequestList) and answer.requests else answer
        if not isinstance(record, RequestRecord):
            raise RequestRejected("The scheduler sent an unexpected answer.", status=500)
        await exchange.respond_json(_life(record))

    def _check_place(self, exchange: Exchange) -> None:
        """Check that the client may look: without keys, only this machine. Raises RequestRejected (403)."""
        if self._serving.keys:
            return
        client = exchange.scope.get("client")
        try:
            local = client is not None and ip_address(client[0]).is_loopback
        except ValueError:
            local = False
        if not local:
            raise RequestRejected(
                "Without API keys (security.api_keys_file) the page is available on this machine only.",
                status=403,
                code="not_local",
            )


def _life(record: RequestRecord) -> dict[str, object]:
    state = record.state or "under way"
    output = "" if record.num_output_tokens is None else f", {record.num_output_tokens} output tokens"
    ended = bool(record.entries) and record.entries[-1].what in ("ended", "released") and not record.is_under_way
    return {
        "title": f"{record.request_id}: {record.num_prompt_tokens} prompt tokens{output}, {state}",
        "ended": ended,
        "steps": [
            [entry.at_s, entry.what, entry.instance_id or "", entry.detail, entry.figures] for entry in record.entries
        ],
    }
