"""Endpoints without generation: models, tokenizing, probes, metrics, documents."""

from __future__ import annotations

from datetime import UTC, datetime
from importlib.metadata import version

from pdmesh.build_info import core_build
from pdmesh.errors import RequestRejected
from pdmesh.wire.messages import SessionStatus
from pdmesh_gateway.conversations import prompt_of
from pdmesh_gateway.http.chat_endpoint import conversation_of
from pdmesh_gateway.http.http_exchange import Exchange
from pdmesh_gateway.http.messages.messages_protocol import AnthropicModel, AnthropicModelList
from pdmesh_gateway.http.openapi import openapi_document
from pdmesh_gateway.http.request_intake import read_request
from pdmesh_gateway.protocol.models_protocol import ModelCard, ModelList
from pdmesh_gateway.protocol.tokens_protocol import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from pdmesh_gateway.sampling import too_long
from pdmesh_gateway.serving import Serving, check_token_ids

#: Sent by Anthropic's clients with every request.
ANTHROPIC_HEADER = "anthropic-version"
PROMETHEUS = b"text/plain; version=0.0.4; charset=utf-8"


class UtilityEndpoints:
    """Handlers of these endpoints."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    async def models(self, exchange: Exchange) -> None:
        names = self._serving.model_names
        if exchange.header(ANTHROPIC_HEADER) is None:
            await exchange.respond_json(ModelList(data=[self._card(name) for name in names]))
        else:
            infos = [self._info(name) for name in names]
            await exchange.respond_json(AnthropicModelList(data=infos, first_id=names[0], last_id=names[-1]))

    async def model(self, exchange: Exchange) -> None:
        name = exchange.scope["path_params"]["model"]
        self._serving.check_model(name)
        is_anthropic = exchange.header(ANTHROPIC_HEADER) is not None
        await exchange.respond_json(self._info(name) if is_anthropic else self._card(name))

    async def tokenize(self, exchange: Exchange) -> None:
        serving = self._serving
        async with read_request(exchange, serving, TokenizeRequest) as request:
            serving.check_model(request.model)
            if (request.prompt is None) == (request.messages is None):
                raise RequestRejected("Send either `prompt` or `messages`.", param="prompt")
            if request.messages is not None:
                token_ids = await prompt_of(serving, await conversation_of(request, request.messages, serving))
            else:
                token_ids = await serving.encode(
                    request.prompt or "", add_special_tokens=request.add_special_tokens is not False, what="prompt"
                )
        strings = await serving.tokenizer.pieces(token_ids) if request.return_token_strs else None
        await exchange.respond_json(
            TokenizeResponse(
                count=len(token_ids), max_model_len=serving.max_model_len, tokens=token_ids, token_strs=strings
            )
        )

    async def detokenize(self, exchange: Exchange) -> None:
        serving = self._serving
        async with read_request(exchange, serving, DetokenizeRequest) as request:
            serving.check_model(request.model)
            if len(request.tokens) > serving.max_model_len:
                raise too_long(len(request.tokens), serving.max_model_len, what="tokens")
            check_token_ids(request.tokens, serving.info.vocab_size, what="tokens")
            text = await serving.tokenizer.decode(request.tokens, skip_special_tokens=False)
        await exchange.respond_json(DetokenizeResponse(text))

    async def tokenizer_info(self, exchange: Exchange) -> None:
        """Send the checkpoint's ``tokenizer_config.json`` with the chat template, in vLLM's shape."""
        tokenizer = self._serving.tokenizer
        await exchange.respond_json({**tokenizer.config, "chat_template": tokenizer.template_source or None})

    async def sessions(self, exchange: Exchange) -> None:
        """Send the sessions of the client's key, the newest first. Ids are hashes: names are not stored."""
        found = await self._serving.link.sessions(exchange.known_client.name)
        await exchange.respond_json({"object": "list", "data": [_session(each) for each in found]})

    async def session(self, exchange: Exchange) -> None:
        """Send a session of the client's key, or for DELETE end it: no more of its requests are expected.

        Raises RequestRejected (404) if the session is unknown.
        """
        name, tenant, link = exchange.scope["path_params"]["name"], exchange.known_client.name, self._serving.link
        key = self._serving.session_names.key(tenant, name)
        if exchange.scope["method"] == "DELETE":
            link.end_session(key)
            await exchange.respond_json({"id": name, "object": "session", "deleted": True})
            return
        found = await link.sessions(tenant, key)
        if not found:
            raise RequestRejected(f"No session is named {name!r}.", status=404, code="not_found")
        await exchange.respond_json(_session(found[0]))

    async def load(self, exchange: Exchange) -> None:
        """Send the number of running requests, in vLLM's shape."""
        await exchange.respond_json({"server_load": self._serving.admission.num_requests})

    async def ready(self, exchange: Exchange) -> None:
        """Answer 200 if a request sent now would be served. Raises RequestRejected (503) otherwise."""
        reason = self._serving.unready_reason
        if reason is not None:
            raise RequestRejected(f"Not ready: {reason}.", status=503, code="not_ready", retry_after_s=1)
        await exchange.respond_json({"status": "ready"})

    async def live(self, exchange: Exchange) -> None:
        """Answer 200, whatever the state of the mesh."""
        await exchange.respond_json({"status": "live"})

    async def metrics(self, exchange: Exchange) -> None:
        await self._serving.link.refresh()
        await exchange.respond(self._serving.metrics.exposition(), content_type=PROMETHEUS)

    async def version(self, exchange: Exchange) -> None:
        await exchange.respond_json({"version": version("pdmesh"), "core": core_build()})

    async def openapi(self, exchange: Exchange) -> None:
        serving = self._serving
        defaults = serving.info.default_sampling.fields
        await exchange.respond_json(openapi_document(version("pdmesh"), serving.model, defaults))

    def _card(self, name: str) -> ModelCard:
        serving = self._serving
        return ModelCard(
            id=name,
            created=serving.created,
            root=serving.model_path,
            max_model_len=serving.max_model_len,
            sampling_defaults=serving.info.default_sampling.fields,
        )

    def _info(self, name: str) -> AnthropicModel:
        serving = self._serving
        created_at = datetime.fromtimestamp(serving.created, UTC).isoformat()
        length = serving.max_model_len
        return AnthropicModel(
            id=name, display_name=serving.model, created_at=created_at, max_input_tokens=length, max_tokens=length
        )


def _session(status: SessionStatus) -> dict[str, object]:
    return {
        "id": status.session,
        "object": "session",
        "state": status.state,
        "since_s": status.since_s,
        "turns": status.num_turns,
        "prompt_tokens": status.num_prompt_tokens,
        "reused_tokens": status.num_reused_tokens,
        "reusable_tokens": status.num_possible_tokens,
        "longest_aside_s": status.longest_aside_s,
    }
