"""Log-probabilities in the shapes of chats and of completions."""

from __future__ import annotations

from collections.abc import Sequence

from pdmesh.wire.messages import TokenLogprobs
from pdmesh_gateway.model_tokenizer import ModelTokenizer
from pdmesh_gateway.protocol.chat_protocol import ChatLogprobs, ChatTokenLogprob, ChatTopLogprob
from pdmesh_gateway.protocol.completions_protocol import CompletionLogprobs
from pdmesh_gateway.protocol.prompt_logprobs import PromptLogprob, PromptLogprobList
from pdmesh_gateway.protocol.sampling_fields import SamplingFields
from pdmesh_gateway.text_stream import TextStream

#: Value in place of -inf, which JSON lacks; vLLM uses the same.
MIN_LOGPROB = -9999.0


def chat_logprobs(
    tokenizer: ModelTokenizer,
    token_ids: Sequence[int],
    logprobs: Sequence[TokenLogprobs | None],
    *,
    as_ids: bool = False,
) -> ChatLogprobs:
    """Return tokens in a chat's shape: text, bytes and natural log-probability of each token and of its likeliest
    alternatives.

    ``as_ids``: tokens are named by their ids.
    """
    name = token_id_name if as_ids else tokenizer.token_text
    content: list[ChatTokenLogprob] = []
    for token_id, at in zip(token_ids, logprobs, strict=True):
        top = [
            ChatTopLogprob(name(other), _finite(logprob), list(tokenizer.token_bytes(other)))
            for other, logprob in (at.top if at is not None else ())
        ]
        content.append(
            ChatTokenLogprob(
                name(token_id),
                MIN_LOGPROB if at is None else _finite(at.logprob),
                list(tokenizer.token_bytes(token_id)),
                top,
            )
        )
    return ChatLogprobs(content)


def completion_logprobs(
    tokenizer: ModelTokenizer,
    token_ids: Sequence[int],
    logprobs: Sequence[TokenLogprobs | None],
    *,
    num_top: int,
    text_offsets: Sequence[int],
    as_ids: bool = False,
) -> CompletionLogprobs:
    """Return tokens in the shape of completions.

    ``text_offsets``: number of the choice's characters before each token. A token without log-probabilities, such as
    the first one of an echoed prompt, has null. ``as_ids``: tokens are named by their ids.
    """
    name = token_id_name if as_ids else tokenizer.token_text
    result = CompletionLogprobs([], [], [], [])
    result.text_offset.extend(text_offsets)
    for token_id, at in zip(token_ids, logprobs, strict=True):
        text = name(token_id)
        result.tokens.append(text)
        if at is None:
            result.token_logprobs.append(None)
            result.top_logprobs.append(None)
            continue
        result.token_logprobs.append(_finite(at.logprob))
        # The drawn token comes first, as in vLLM, even if it is not among the likeliest. Of two tokens with the same
        # text the likelier counts.
        top = {text: _finite(at.logprob)}
        for other, logprob in at.top[:num_top]:
            key = name(other)
            top[key] = max(top.get(key, MIN_LOGPROB), _finite(logprob))
        result.top_logprobs.append(top)
    return result


def prompt_logprobs(
    tokenizer: ModelTokenizer, request: SamplingFields, generation: TextStream, index: int = 0
) -> PromptLogprobList | None:
    """Return a choice's prompt in the shape of vLLM's ``prompt_logprobs``; None if the request does not ask for it.

    Each entry has the likeliest tokens and the prompt's own token; it is None where the generation has no
    log-probabilities.
    """
    if request.prompt_logprobs is None:
        return None
    name = token_id_name if request.return_tokens_as_token_ids else tokenizer.token_text
    prompt = generation.job.prompts[index // generation.job.n]
    result: PromptLogprobList = []
    for token_id, at in zip(prompt, generation.prompt_logprobs(index), strict=True):
        if at is None:
            result.append(None)
            continue
        entries = {
            str(other): PromptLogprob(logprob=_finite(logprob), rank=place, decoded_token=name(other))
            for place, (other, logprob) in enumerate(at.top, start=1)
        }
        own = PromptLogprob(logprob=_finite(at.logprob), rank=None, decoded_token=name(token_id))
        entries.setdefault(str(token_id), own)
        result.append(entries)
    return result


def token_id_name(token_id: int) -> str:
    """Return the name of a token by its id, for ``return_tokens_as_token_ids``: its text may be ambiguous."""
    return f"token_id:{token_id}"


def _finite(logprob: float) -> float:
    return max(logprob, MIN_LOGPROB)
