"""Requests and answers of ``/v1/completions``."""

from __future__ import annotations

from typing import Annotated

import msgspec

from pdmesh_gateway.protocol.fields import neutral
from pdmesh_gateway.protocol.prompt_logprobs import PromptLogprobList
from pdmesh_gateway.protocol.sampling_fields import SamplingFields
from pdmesh_gateway.protocol.usage import Usage

#: Default of vLLM and OpenAI for completions. A chat may use the rest of the context.
DEFAULT_COMPLETION_TOKENS = 16


class CompletionRequest(SamplingFields, kw_only=True, forbid_unknown_fields=True):
    """``POST /v1/completions``.

    With ``max_tokens`` null an answer may use the rest of the context. ``max_completion_tokens`` is the name in chats
    and takes precedence.
    """

    prompt: str | list[str | int | list[int]] | None = None
    max_tokens: int | msgspec.UnsetType | None = msgspec.UNSET
    max_completion_tokens: int | None = None
    best_of: Annotated[int | None, neutral(1)] = None
    echo: Annotated[bool | None, neutral(False)] = None
    logprobs: int | None = None

    @property
    def asked_tokens(self) -> int | msgspec.UnsetType | None:
        """The limit of the completion, by whichever name it is given; None for no limit, UNSET if absent."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class CompletionLogprobs(msgspec.Struct):
    """Log-probabilities of each token; offsets are characters of the text.

    A prompt's first token has no probability.
    """

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(msgspec.Struct, kw_only=True):
    """A choice of a completion, like `ChatChoice`. With several prompts, the choices of the first prompt come first."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobList | None = None
    prompt_token_ids: list[int] | None = None


class CompletionResponse(msgspec.Struct, kw_only=True):
    """A whole answer to ``POST /v1/completions``."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
