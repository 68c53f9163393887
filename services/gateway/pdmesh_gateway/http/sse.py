"""Server-sent events, assembled from bytes that stay the same for a whole stream.

A chunk is written per step and choice, so only its text is encoded.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec

from pdmesh_gateway.protocol.chat_protocol import ChatDelta
from pdmesh_gateway.protocol.sampling_fields import StreamOptions
from pdmesh_gateway.protocol.usage import CompletionTokensDetails, PromptTokensDetails, Usage
from pdmesh_gateway.text_stream import TextStream

DONE = b"data: [DONE]\n\n"

#: A comment, which clients skip. It shows clients and proxies that the connection is alive.
KEEP_ALIVE = b": keep-alive\n\n"

_END = b"}\n\n"

#: Bytes before and after a choice's new text, by kind.
_AROUND_TEXT = {
    "text_completion": (b'"text":', b',"logprobs":null,"finish_reason":null}]'),
    "chat.completion.chunk": (b'"delta":{"content":', b'},"logprobs":null,"finish_reason":null}]'),
}

_encode = msgspec.json.Encoder().encode


class ChunkWriter:
    """Writer of one response's chunks. ``kind`` is the ``object``: ``chat.completion.chunk`` or ``text_completion``.

    The ``body`` of a choice is part of a JSON object, made by `text_body`, `content_body` or `delta_body`.
    """

    def __init__(self, *, kind: str, response_id: str, model: str, options: StreamOptions | None) -> None:
        self.response_id = response_id
        self.created = int(time.time())
        self.model = model
        self._with_usage = options is not None and bool(options.include_usage)
        self.continuous_usage = self._with_usage and options is not None and bool(options.continuous_usage_stats)
        head = _encode({"id": response_id, "object": kind, "created": self.created, "model": model})
        self._head = b"data: " + head[:-1] + b',"choices":['
        # With include_usage every chunk has the field, which is null except in the last chunk.
        self._plain_end = b',"usage":null' + _END if self._with_usage and not self.continuous_usage else _END
        before, behind = _AROUND_TEXT[kind]
        self._before_text = before
        self._behind_text = behind + self._plain_end
        #: Bytes before the text, by choice.
        self._text_heads: dict[int, bytes] = {}

    def role(self, index: int, *, prompt_token_ids: Sequence[int] | None = None, usage: Usage | None = None) -> bytes:
        """Return a chat choice's first chunk."""
        extra = b"" if prompt_token_ids is None else b',"prompt_token_ids":' + _encode(prompt_token_ids)
        choice = b'{"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]' % index
        return b"".join((self._head, choice, extra, self._end(usage)))

    def text(self, index: int, text: str) -> bytes:
        """Return a chunk of a choice's new text and nothing else, as most chunks are."""
        head = self._text_heads.get(index)
        if head is None:
            head = self._text_heads[index] = b'%b{"index":%d,%b' % (self._head, index, self._before_text)
        return b"".join((head, _encode(text), self._behind_text))

    def delta(
        self,
        index: int,
        body: bytes,
        *,
        finish_reason: str | None = None,
        stop_reason: int | str | None = None,
        logprobs: msgspec.Struct | None = None,
        token_ids: Sequence[int] | None = None,
        prompt_token_ids: Sequence[int] | None = None,
        usage: Usage | None = None,
    ) -> bytes:
        """Return a chunk of a choice. The last one has a ``finish_reason``."""
        parts = [
            self._head,
            b'{"index":%d,' % index,
            body,
            b',"logprobs":',
            b"null" if logprobs is None else _encode(logprobs),
        ]
        if finish_reason is None:
            parts.append(b',"finish_reason":null')
        else:
            parts += (b',"finish_reason":', _encode(finish_reason), b',"stop_reason":', _encode(stop_reason))
        if token_ids is not None:
            parts += (b',"token_ids":', _encode(token_ids))
        if prompt_token_ids is not None:
            parts += (b',"prompt_token_ids":', _encode(prompt_token_ids))
        parts += (b"}]", self._end(usage))
        return b"".join(parts)

    def tail(self, usage: Usage) -> bytes:
        """Return the end of the stream, after a chunk of usage without choices if usage was requested."""
        return b"".join((self._head, b"]", self._end(usage), DONE)) if self._with_usage else DONE

    def _end(self, usage: Usage | None) -> bytes:
        return self._plain_end if usage is None else b',"usage":' + _encode(usage) + _END


def text_body(text: str) -> bytes:
    """Return the JSON field with a completion's new text, as the ``body`` for `ChunkWriter.delta`."""
    return b'"text":' + _encode(text)


def content_body(text: str) -> bytes:
    """Return the JSON field with a chat's new text, as the ``body`` for `ChunkWriter.delta`."""
    return b'"delta":{"content":' + _encode(text) + b"}"


def delta_body(delta: ChatDelta) -> bytes:
    """Return the JSON field with any delta of a chat, as the ``body`` for `ChunkWriter.delta`."""
    return b'"delta":' + _encode(delta)


def usage_of(
    generation: TextStream, num_output_tokens: int, num_reasoning_tokens: int = 0, *, index: int | None = None
) -> Usage:
    """Return usage in tokens, as OpenAI counts them. Prompt tokens include cached tokens.

    The usage is of one choice if ``index`` is given, else of all.
    """
    job = generation.job
    num_prompt_tokens = job.num_prompt_tokens if index is None else len(job.prompts[index // job.n])
    cached = generation.num_cached_tokens if index is None else generation.num_cached_tokens_of(index)
    return Usage(
        prompt_tokens=num_prompt_tokens,
        completion_tokens=num_output_tokens,
        total_tokens=num_prompt_tokens + num_output_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=cached),
        completion_tokens_details=CompletionTokensDetails(reasoning_tokens=num_reasoning_tokens),
    )
