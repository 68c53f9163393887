"""Web page of the running mesh: its files, its stream of frames, and the history of one request."""

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

#: Time without a frame after which a comment is sent, so that the proxy and the gateway notice a closed page.
SILENCE_S = 5.0


class UiEndpoints:
    """Handlers of the web page. Data of the mesh needs a key or, if there are no keys, a client on this machine."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self.files = PageFiles("ui")

    async def elsewhere(self, exchange: Exchange) -> None:
        """Redirect a browser to the page from the paths where people look for it.

        The redirect is relative to the request's path, because a proxy may add a prefix.
        """
        path = b"ui" if exchange.scope["path"] == "/" else b"../ui"
        await exchange.respond(b"", status=307, content_type=b"text/plain", headers=[(b"location", path)])

    async def events(self, exchange: Exchange) -> None:
        """Send frames of the mesh's activity as server-sent events, until the page closes."""
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
        """Send the history of one request, found by any of its names. Raise RequestRejected for an unknown name."""
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
        """Raise RequestRejected (403) if there are no keys and the client is not on this machine."""
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
