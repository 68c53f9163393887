"""``POST /v1/completions``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec

from pdmesh.wire.messages import TokenLogprobs
from pdmesh_gateway.choices import Delta
from pdmesh_gateway.dialects import COMPLETIONS
from pdmesh_gateway.http.generation_endpoint import GenerationEndpoint, Rendering
from pdmesh_gateway.http.http_exchange import Exchange
from pdmesh_gateway.http.logprobs import completion_logprobs, prompt_logprobs
from pdmesh_gateway.http.sse import ChunkWriter, text_body, usage_of
from pdmesh_gateway.jobs import GenerationJob
from pdmesh_gateway.model_tokenizer import ModelTokenizer
from pdmesh_gateway.prompt_inputs import prompt_ids_of, prompts_of
from pdmesh_gateway.protocol.completions_protocol import (
    DEFAULT_COMPLETION_TOKENS,
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    CompletionResponse,
)
from pdmesh_gateway.protocol.usage import Usage
from pdmesh_gateway.request_jobs import generation_job
from pdmesh_gateway.sampling import check_stream_options, num_choices, number
from pdmesh_gateway.serving import Serving
from pdmesh_gateway.text_stream import TextStream


class CompletionsEndpoint(GenerationEndpoint[CompletionRequest]):
    """``POST /v1/completions``: continuations of one or several prompts, given as text or token ids."""

    dialect = COMPLETIONS

    def __init__(self, serving: Serving) -> None:
        super().__init__(serving, CompletionRequest)

    async def prepare(self, request: CompletionRequest, exchange: Exchange) -> tuple[GenerationJob, Rendering]:
        serving = self._serving
        serving.check_model(request.model)
        check_stream_options(request)
        serving.with_defaults(request)
        n = num_choices(request, best_of=request.best_of, max_n=serving.config.max_n)
        asked = None if request.asked_tokens is msgspec.UNSET else request.asked_tokens
        name = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
        number(name, asked, low=0 if request.echo else 1)
        given = prompts_of(request.prompt, what="prompt")
        serving.check_load(num_prompts=len(given), n=n)
        prompts = await prompt_ids_of(serving, request, given, what="prompt")
        # With echo, max_tokens 0 asks for the prompt alone. Its log-probabilities still come with a first token.
        prompt_only = asked == 0
        default = serving.config.default_max_tokens
        if default is None and request.asked_tokens is msgspec.UNSET:
            default = DEFAULT_COMPLETION_TOKENS
        grammar, warnings = await serving.grammars.grammar(request)
        exchange.warn(*warnings)
        job = await generation_job(
            serving,
            request,
            self.caller(request, exchange),
            prompts,
            what="prompt",
            max_tokens=1 if prompt_only else asked,
            default_tokens=default,
            logprobs=request.logprobs,
            prompt_logprobs=request.logprobs if request.echo else None,
            grammar=grammar,
            n=n,
        )
        echoed = await self._echoed(request, prompts) if request.echo else []
        rendering = _CompletionRendering(
            request, serving.tokenizer, model=request.model or serving.model, job=job, echoed=echoed
        )
        return job, rendering

    async def _echoed(self, request: CompletionRequest, prompts: Sequence[Sequence[int]]) -> list[_Echo]:
        tokenizer = self._serving.tokenizer
        skip = request.skip_special_tokens is not False
        echoed: list[_Echo] = []
        for prompt in prompts:
            text = await tokenizer.decode(prompt, skip_special_tokens=skip)
            offsets = [] if request.logprobs is None else await tokenizer.offsets(prompt, skip_special_tokens=skip)
            echoed.append(_Echo(text, offsets))
        return echoed


@dataclass(frozen=True, slots=True)
class _Echo:
    """A prompt as text, with the offset of each token if log-probabilities are asked for."""

    text: str
    text_offsets: list[int]


class _CompletionRendering(Rendering):
    def __init__(
        self,
        request: CompletionRequest,
        tokenizer: ModelTokenizer,
        *,
        model: str,
        job: GenerationJob,
        echoed: Sequence[_Echo],
    ) -> None:
        self._request = request
        self._tokenizer = tokenizer
        #: Echoes by prompt; empty without echo.
        self._echoed = echoed
        self._prompt_only = request.asked_tokens == 0
        listed = request.logprob_token_ids
        # Listed tokens and the drawn one, or else the most likely tokens.
        self._num_top = len(listed) + 1 if listed else request.logprobs or 0
        self._writer = ChunkWriter(
            kind="text_completion",
            response_id=f"cmpl-{job.request_id}",
            model=model,
            options=request.stream_options,
        )
        self._begun = [False] * job.num_choices
        #: Whether chunks hold only text.
        self._is_plain = not (echoed or request.logprobs is not None or request.return_token_ids or self._prompt_only)
        self._is_plain = self._is_plain and not self._writer.continuous_usage

    def chunk(self, delta: Delta, generation: TextStream) -> bytes:
        index = delta.index
        if self._is_plain and delta.finish_reason is None:
            return self._writer.text(index, delta.text)
        job = generation.job
        prompt = job.prompts[index // job.n]
        is_first = not self._begun[index]
        self._begun[index] = True
        delta = self._own(delta, job)
        new_token_ids = delta.token_ids
        if is_first and self._echoed:
            delta = self._with_echo(delta, generation)
        usage: Usage | None = None
        if self._writer.continuous_usage:
            num_output_tokens = 0 if self._prompt_only else generation.num_tokens_of(index)
            usage = usage_of(generation, num_output_tokens, index=index)
        return self._writer.delta(
            index,
            text_body(delta.text),
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
            logprobs=self._logprobs(delta),
            token_ids=new_token_ids if self._request.return_token_ids else None,
            prompt_token_ids=list(prompt) if self._request.return_token_ids and is_first else None,
            usage=usage,
        )

    def tail(self, generation: TextStream) -> bytes:
        return self._writer.tail(self._usage(generation))

    def response(self, choices: Sequence[Delta], generation: TextStream) -> msgspec.Struct:
        return CompletionResponse(
            id=self._writer.response_id,
            created=self._writer.created,
            model=self._writer.model,
            choices=[self._choice(choice, generation) for choice in choices],
            usage=self._usage(generation),
        )

    def _usage(self, generation: TextStream) -> Usage:
        return usage_of(generation, 0 if self._prompt_only else generation.num_output_tokens)

    def _choice(self, choice: Delta, generation: TextStream) -> CompletionChoice:
        index = choice.index
        own = self._own(choice, generation.job)
        whole = self._with_echo(own, generation) if self._echoed else own
        with_ids = bool(self._request.return_token_ids)
        return CompletionChoice(
            index=index,
            text=whole.text,
            logprobs=self._logprobs(whole),
            finish_reason=own.finish_reason,
            stop_reason=own.stop_reason,
            token_ids=own.token_ids if with_ids else None,
            prompt_logprobs=prompt_logprobs(self._tokenizer, self._request, generation, index),
            prompt_token_ids=list(generation.job.prompts[index // generation.job.n]) if with_ids else None,
        )

    def _own(self, delta: Delta, job: GenerationJob) -> Delta:
        """Return a delta with offsets after the echoed prompt; without its token if only the prompt was asked for."""
        if self._prompt_only:
            return Delta(index=delta.index, finish_reason="length")
        if not self._echoed:
            return delta
        num_echoed = len(self._echoed[delta.index // job.n].text)
        return replace(delta, text_offsets=[num_echoed + offset for offset in delta.text_offsets])

    def _with_echo(self, delta: Delta, generation: TextStream) -> Delta:
        """Return a delta with the prompt in front."""
        job = generation.job
        i = delta.index // job.n
        echo = self._echoed[i]
        logprobs: list[TokenLogprobs | None] = []
        if self._request.logprobs is not None:
            logprobs = generation.prompt_logprobs(delta.index) + delta.logprobs
        return replace(
            delta,
            text=echo.text + delta.text,
            token_ids=[*job.prompts[i], *delta.token_ids],
            text_offsets=echo.text_offsets + delta.text_offsets,
            logprobs=logprobs,
        )

    def _logprobs(self, delta: Delta) -> CompletionLogprobs | None:
        if self._request.logprobs is None:
            return None
        return completion_logprobs(
            self._tokenizer,
            delta.token_ids,
            delta.logprobs,
            num_top=self._num_top,
            text_offsets=delta.text_offsets,
            as_ids=bool(self._request.return_tokens_as_token_ids),
        )
