"""Routes, and the handling around every request: its id, its key, and errors in the shape of its dialect."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial

from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from pdmesh.errors import RequestRejected
from pdmesh_gateway.dialects import dialect_of
from pdmesh_gateway.http.body import ClientGone
from pdmesh_gateway.http.chat_endpoint import ChatEndpoint
from pdmesh_gateway.http.completions_endpoint import CompletionsEndpoint
from pdmesh_gateway.http.embeddings_endpoint import EmbeddingsEndpoint
from pdmesh_gateway.http.http_exchange import Exchange
from pdmesh_gateway.http.invocations import InvocationsEndpoint
from pdmesh_gateway.http.messages.messages_endpoint import MessagesEndpoint
from pdmesh_gateway.http.page_files import PageFiles
from pdmesh_gateway.http.responses.responses_endpoint import ResponsesEndpoint
from pdmesh_gateway.http.responses.stored_responses import StoredResponses
from pdmesh_gateway.http.ui import UiEndpoints
from pdmesh_gateway.http.utility import UtilityEndpoints
from pdmesh_gateway.request_failures import UNFORESEEN, failure_of
from pdmesh_gateway.serving import Serving, label_of

Handler = Callable[[Exchange], Awaitable[None]]

#: Status for the metric and the log, which no client sees: it has disconnected (nginx's number).
CLIENT_CLOSED_REQUEST = 499


def build_app(serving: Serving) -> ASGIApp:
    """Return the ASGI application of a gateway."""
    utility, docs = UtilityEndpoints(serving), PageFiles("docs")
    stored = StoredResponses(serving)
    responses, messages = ResponsesEndpoint(serving, stored), MessagesEndpoint(serving)
    chat, completions, embeddings = ChatEndpoint(serving), CompletionsEndpoint(serving), EmbeddingsEndpoint(serving)
    invocations = InvocationsEndpoint(serving, {"messages": chat, "prompt": completions, "input": embeddings})
    # Path, methods and handler, with the scope that a key needs.
    guarded: list[tuple[str, str, Handler, str]] = [
        ("/v1/chat/completions", "POST", chat, "generate"),
        ("/v1/completions", "POST", completions, "generate"),
        ("/v1/embeddings", "POST", embeddings, "generate"),
        ("/invocations", "POST", invocations, "generate"),
        ("/v1/messages", "POST", messages, "generate"),
        ("/v1/messages/count_tokens", "POST", messages.count, "tokenize"),
        ("/v1/responses", "POST", responses, "generate"),
        ("/v1/responses/input_tokens", "POST", responses.count, "tokenize"),
        ("/v1/responses/{response_id}", "GET DELETE", stored.one, "generate"),
        ("/v1/responses/{response_id}/cancel", "POST", stored.cancel, "generate"),
        ("/v1/responses/{response_id}/input_items", "GET", stored.input_items, "generate"),
        ("/v1/sessions", "GET", utility.sessions, "generate"),
        ("/v1/sessions/{name:path}", "GET DELETE", utility.session, "generate"),
        ("/v1/models", "GET", utility.models, "models"),
        ("/v1/models/{model:path}", "GET", utility.model, "models"),
        ("/tokenize", "POST", utility.tokenize, "tokenize"),
        ("/detokenize", "POST", utility.detokenize, "tokenize"),
        ("/tokenizer_info", "GET", utility.tokenizer_info, "tokenize"),
    ]
    # Probes and scrapers carry no key. These endpoints reveal nothing that a key protects.
    open_to_all: list[tuple[str, str, Handler]] = [
        ("/health", "GET", utility.ready),
        ("/ready", "GET", utility.ready),
        ("/live", "GET", utility.live),
        ("/ping", "GET", utility.ready),
        ("/metrics", "GET", utility.metrics),
        ("/load", "GET", utility.load),
        ("/version", "GET", utility.version),
        ("/docs", "GET", docs.index),
        ("/docs/{name}", "GET", docs.named),
        ("/favicon.ico", "GET", partial(docs.send, name="icon.svg")),
        ("/openapi.json", "GET", utility.openapi),
    ]
    if serving.config.ui:
        ui = UiEndpoints(serving)
        guarded += [
            ("/ui/events", "GET", ui.events, "watch"),
            ("/ui/requests/{request_id}", "GET", ui.request, "watch"),
        ]
        open_to_all += [
            ("/ui", "GET", ui.files.index),
            ("/ui/{name}", "GET", ui.files.named),
            ("/chat", "GET", partial(ui.files.send, name="chat.html")),
            *((path, "GET", ui.elsewhere) for path in ("/", "/ui/")),
        ]
    routes = [
        *(_Endpoint(serving, path, handler, scope).route(method) for path, method, handler, scope in guarded),
        *(_Endpoint(serving, path, handler).route(method) for path, method, handler in open_to_all),
    ]
    router = Router(routes, default=_Endpoint(serving, "other", _not_found), redirect_slashes=False)
    return _Below(serving.config.root_path.rstrip("/"), router) if serving.config.root_path else router


class _Below:
    """Application that may also be requested under a path prefix, which its routes do not see."""

    def __init__(self, root_path: str, app: ASGIApp) -> None:
        self._root_path = root_path
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app({**scope, "root_path": self._root_path}, receive, send)


async def _not_found(exchange: Exchange) -> None:
    if exchange.scope["type"] != "http":
        return
    method, path = exchange.scope["method"], exchange.scope["path"]
    raise RequestRejected(f"Invalid URL ({method} {path})", status=404, code="not_found")


class _Endpoint:
    """ASGI application around one handler."""

    def __init__(self, serving: Serving, path: str, handler: Handler, scope: str | None = None) -> None:
        self._serving = serving
        self._path = path
        self._handler = handler
        self._scope = scope
        self._methods: list[str] = []
        self._dialect = dialect_of(path)

    def route(self, methods: str) -> Route:
        """Return a route for some methods, separated by blanks. ``HEAD`` goes with ``GET``."""
        self._methods = methods.replace("GET", "GET HEAD").split()
        # The method is checked by `_check`, so that the error has a JSON body.
        return Route(self._path, self)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_id = self._serving.generator.new_request_id()
        exchange = Exchange(scope, receive, send, request_id, dict(scope["headers"]), self._dialect)
        metrics = self._serving.metrics
        try:
            await self._answer(exchange)
        except UNFORESEEN as error:
            failure = failure_of(error, metrics, where=self._path, request_id=exchange.request_id, label=exchange.label)
            await exchange.respond_error(failure)
        finally:
            metrics.responded(self._path, exchange.status)

    async def _answer(self, exchange: Exchange) -> None:
        try:
            if not await self._answered_preflight(exchange):
                self._check(exchange)
                await self._handler(exchange)
        except RequestRejected as error:
            await exchange.respond_error(error)
        except ClientGone:
            exchange.status = CLIENT_CLOSED_REQUEST

    def _check(self, exchange: Exchange) -> None:
        exchange.label = label_of(exchange.header("x-request-id") or "")
        if self._methods and exchange.scope["method"] not in self._methods:
            exchange.extra_headers.append((b"allow", ", ".join(self._methods).encode()))
            raise RequestRejected(
                f"Not allowed to {exchange.scope['method']} on {self._path}.", status=405, code="method_not_allowed"
            )
        if self._scope is not None:
            self._serving.origins.check(exchange.header("host"), exchange.header("origin"))
            exchange.client = self._serving.keys.check(exchange.text("authorization"), exchange.text("x-api-key"))
            exchange.client.check_scope(self._scope)

    async def _answered_preflight(self, exchange: Exchange) -> bool:
        """Add the headers that let an allowed origin's pages read the answer; return whether this was its preflight.

        A preflight is answered here. The headers of an origin that may not read are left out.
        """
        origin = exchange.header("origin")
        if origin is None or not self._serving.origins.may_read(origin):
            return False
        exchange.extra_headers += self._serving.origins.response_headers(origin)
        if exchange.scope["method"] != "OPTIONS" or exchange.header("access-control-request-method") is None:
            return False
        asked = exchange.header("access-control-request-headers")
        await exchange.respond(b"", status=204, headers=self._serving.origins.preflight_headers(asked))
        return True
