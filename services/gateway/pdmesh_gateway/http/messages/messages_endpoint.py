"""``POST /v1/messages`` and ``POST /v1/messages/count_tokens``."""

from __future__ import annotations

from pdmesh_gateway.conversation_turns import built
from pdmesh_gateway.conversations import Conversation, prompt_of
from pdmesh_gateway.dialects import MESSAGES
from pdmesh_gateway.http.generation_endpoint import GenerationEndpoint, Rendering
from pdmesh_gateway.http.http_exchange import Exchange
from pdmesh_gateway.http.messages.messages_protocol import CountTokensRequest, MessagesRequest, TokenCount
from pdmesh_gateway.http.messages.messages_rendering import MessagesRendering
from pdmesh_gateway.http.messages.messages_requests import conversation_of, fields_of, is_foreign
from pdmesh_gateway.http.request_intake import read_request
from pdmesh_gateway.jobs import GenerationJob
from pdmesh_gateway.message_parts import skip_warnings
from pdmesh_gateway.sampling import number
from pdmesh_gateway.serving import Serving


class MessagesEndpoint(GenerationEndpoint[MessagesRequest]):
    """``POST /v1/messages``: one answer to a conversation of blocks."""

    dialect = MESSAGES

    def __init__(self, serving: Serving) -> None:
        super().__init__(serving, MessagesRequest)

    async def prepare(self, request: MessagesRequest, exchange: Exchange) -> tuple[GenerationJob, Rendering]:
        serving = self._serving
        serving.check_model(request.model)
        number("max_tokens", request.max_tokens, low=1)
        conversation = await _conversation(request, exchange, serving)
        job, answers = await self.conversation_job(
            conversation, fields_of(request), exchange, max_tokens=request.max_tokens, clamps=True
        )
        is_clamped = job.params.max_tokens < request.max_tokens
        return job, MessagesRendering(answers, model=request.model, job=job, is_clamped=is_clamped)

    async def count(self, exchange: Exchange) -> None:
        """Answer ``POST /v1/messages/count_tokens``: the number of tokens of a conversation's prompt."""
        serving = self._serving
        async with read_request(exchange, serving, CountTokensRequest) as request:
            serving.check_model(request.model)
            token_ids = await prompt_of(serving, await _conversation(request, exchange, serving))
        await exchange.respond_json(TokenCount(input_tokens=len(token_ids)))


async def _conversation(request: CountTokensRequest, exchange: Exchange, serving: Serving) -> Conversation:
    """Return the conversation of a request, and name skipped tools in a header. Raises RequestRejected."""
    num_parts = sum(1 if isinstance(message.content, str) else len(message.content) for message in request.messages)
    exchange.warn(*skip_warnings({tool.type or "" for tool in request.tools or [] if is_foreign(tool)}, "tools"))
    return await built(
        lambda: conversation_of(request), num_parts=num_parts, most=serving.config.max_messages, param="messages"
    )
