"""Parts that the HTTP and gRPC edges share: the served model, its limits, and the checks of requests."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import anyio
from anyio.abc import TaskGroup

from pdmesh.config import GatewayConfig, SecurityConfig
from pdmesh.engine.files import ModelInfo
from pdmesh.errors import RequestRejected
from pdmesh.wire.link import MAX_FRAME_BYTES
from pdmesh_gateway.answer_format import AnswerFormat
from pdmesh_gateway.answer_grammars import GrammarChecker
from pdmesh_gateway.auth import ApiKeys, Client
from pdmesh_gateway.gateway_metrics import GatewayMetrics
from pdmesh_gateway.gateway_session import GatewaySession
from pdmesh_gateway.generate import Generator
from pdmesh_gateway.http.origins import Origins
from pdmesh_gateway.jobs import GenerationJob
from pdmesh_gateway.limits import RequestLimiter
from pdmesh_gateway.model_tokenizer import ModelTokenizer
from pdmesh_gateway.page_activity import ActivityHub
from pdmesh_gateway.pooling import Pooling
from pdmesh_gateway.protocol.sampling_fields import SamplingFields, StreamOptions
from pdmesh_gateway.reject_cache import RejectCache
from pdmesh_gateway.sampling import Truncation, bad_token_sequences, invalid, too_long
from pdmesh_gateway.session_names import SessionNames
from pdmesh_gateway.text_stream import TextStream

MAX_LABEL_CHARS = 128
_LABEL = re.compile(rf"[A-Za-z0-9._:@/+=-]{{1,{MAX_LABEL_CHARS}}}")
_NOT_OF_LABELS = re.compile(r"[^A-Za-z0-9._:@/+=-]")

#: Limit of prompt tokens: one frame's message carries them, with room for the rest.
MAX_PROMPT_TOKENS = MAX_FRAME_BYTES // 8

#: Characters for each token of the context that are tokenized before the rest of a very long text.
PART_CHARS = 16

_TRACEPARENT = re.compile(r"00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """The parts of a gateway that its edges use.

    ``model`` is the served name; ``model_path`` is also accepted as a name, as in vLLM. ``created`` is Unix time in
    seconds. ``scheduler`` has the scheduler's address and the secrets for it. ``tasks`` runs work that outlives a
    client's connection.
    """

    config: GatewayConfig
    model: str
    model_path: str
    created: int
    info: ModelInfo
    tokenizer: ModelTokenizer
    answer_format: AnswerFormat
    pooling: Pooling
    grammars: GrammarChecker
    generator: Generator
    session_names: SessionNames
    link: GatewaySession
    admission: RequestLimiter
    reject_cache: RejectCache
    keys: ApiKeys
    origins: Origins
    metrics: GatewayMetrics
    activity: ActivityHub
    scheduler: tuple[str, SecurityConfig]
    stopping: anyio.Event
    tasks: TaskGroup

    @property
    def unready_reason(self) -> str | None:
        """The reason why no request should be sent here now; None if a request would be served."""
        return "the gateway is stopping" if self.stopping.is_set() else self.link.unready_reason

    @property
    def max_model_len(self) -> int:
        """The longest prompt and output that the model and every instance can hold."""
        own = min(self.info.max_model_len, MAX_PROMPT_TOKENS)
        return min(own, self.link.max_model_len or own)

    def check_model(self, name: str | None) -> None:
        """Raise RequestRejected (404) for a model that is not served here. None names the one served."""
        if name is not None and name not in (self.model, self.model_path) and not self._is_alias(name):
            raise RequestRejected(
                f"The model `{name[:200]}` does not exist.", status=404, param="model", code="model_not_found"
            )

    def with_defaults(self, fields: SamplingFields) -> None:
        """Apply this server's settings to a request: how tokens are named, unless given, and usage that streams must
        include.
        """
        if fields.return_tokens_as_token_ids is None:
            fields.return_tokens_as_token_ids = self.config.return_tokens_as_token_ids
        if fields.stream and self.config.force_include_usage:
            fields.stream_options = StreamOptions(include_usage=True, continuous_usage_stats=True)

    @property
    def model_names(self) -> list[str]:
        """Names of the model for clients, its own name first. Patterns are left out."""
        return [self.model, *(alias for alias in self._aliases if not alias.endswith("*"))]

    @property
    def _aliases(self) -> list[str]:
        return [alias for name in self.config.model_aliases.split(",") if (alias := name.strip())]

    def _is_alias(self, name: str) -> bool:
        return any(
            name.startswith(alias.removesuffix("*")) if alias.endswith("*") else name == alias
            for alias in self._aliases
        )

    @property
    def _most_generations(self) -> int:
        """Limit of the generations that one request may run at once, which leaves room for others."""
        return max(1, self.config.max_concurrent_requests // 4)

    def parts_of(self, prompts: Sequence[Sequence[int]]) -> Iterator[list[Sequence[int]]]:
        """Split a request's prompts into parts that `check_load` accepts, unless one prompt alone is too large."""
        part: list[Sequence[int]] = []
        num_tokens = 0
        for prompt in prompts:
            num_tokens += len(prompt)
            if part and (
                len(part) == self._most_generations or prompt_bytes(num_tokens, 1) > self.config.max_queued_bytes
            ):
                yield part
                part, num_tokens = [], len(prompt)
            part.append(prompt)
        yield part

    def check_load(self, *, num_prompts: int, n: int, num_tokens: int = 0) -> None:
        """Refuse a request that could never run, before anything is built for it. Raises RequestRejected.

        The request has ``n`` choices of each prompt; all prompts together have ``num_tokens``.
        """
        if num_prompts * n > self._most_generations:
            raise invalid(
                "n" if n > 1 else "prompt",
                f"{num_prompts} prompts with `n` = {n} exceed the limit of {self._most_generations} generations at "
                "once. Send fewer.",
            )
        if prompt_bytes(num_tokens, n) > self.config.max_queued_bytes:
            raise invalid(
                "n" if n > 1 else "prompt",
                f"{num_tokens} prompt tokens with `n` = {n} are more than this server can hold. Send fewer.",
            )

    @asynccontextmanager
    async def generation(self, client: Client, job: GenerationJob) -> AsyncGenerator[TextStream]:
        """Submit a job, count it against the limits of the gateway and the client, and yield the stream of its text.

        Leaving the block cancels the choices that have not ended. Raises RequestRejected if a limit is reached, or if
        the mesh cannot serve the job.
        """
        num_bytes = prompt_bytes(job.num_prompt_tokens, job.n)
        with (
            self.admission.hold(num_requests=job.num_choices, num_bytes=num_bytes),
            client.generating(
                num_choices=job.num_choices, num_prompt_tokens=job.num_prompt_tokens * job.n
            ) as use_tokens,
        ):
            async with self.generator.open(job) as generation:
                try:
                    yield generation
                finally:
                    use_tokens(generation.num_output_tokens)

    async def bad_token_sequences(self, words: Sequence[str] | None) -> tuple[tuple[int, ...], ...]:
        """Return the token sequences that must not be drawn, so that ``words`` do not occur. Raises RequestRejected."""
        return await bad_token_sequences(words, lambda text: self.tokenizer.encode(text, add_special_tokens=False))

    async def encode(self, text: str, *, add_special_tokens: bool, what: str) -> list[int]:
        """Return a prompt's token ids.

        Raises RequestRejected for a text that is far too long, without tokenizing all of it.
        """
        at_least = self.tokenizer.min_tokens_of(text)
        if at_least > self.max_model_len:
            raise too_long(at_least, self.max_model_len, what=what, at_least=True)
        # Text has about four characters a token. A part of a text that is far too long is enough to refuse it.
        if len(text) > (num_chars := PART_CHARS * self.max_model_len):
            part = await self.tokenizer.encode(text[:num_chars], add_special_tokens=False)
            if len(part) > 2 * self.max_model_len:
                raise too_long(len(part), self.max_model_len, what=what, at_least=True)
        return await self.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def check_prompt(
        self, token_ids: Sequence[int], *, what: str, truncation: Truncation | None = None
    ) -> Sequence[int]:
        """Check a prompt's ids, and return them cut by ``truncation``.

        Raise RequestRejected for an empty or too long prompt, or an unknown id.
        """
        if truncation is not None:
            token_ids = truncation.cut(token_ids, max_model_len=self.max_model_len)
        if not token_ids:
            raise RequestRejected(f"The {what} must not be empty.", param=what, code="invalid_value")
        if len(token_ids) >= self.max_model_len:
            raise too_long(len(token_ids), self.max_model_len, what=what)
        check_token_ids(token_ids, self.info.vocab_size, what=what)
        return token_ids


def prompt_bytes(num_tokens: int, n: int) -> int:
    """Return the bytes that prompts of ``num_tokens`` count for: each choice's ids, once here and once in the queue."""
    return 8 * num_tokens * n


def check_token_ids(token_ids: Iterable[int], vocab_size: int, *, what: str) -> None:
    """Raise RequestRejected naming the first id outside ``[0, vocab_size)``."""
    outside = [token_id for token_id in token_ids if not 0 <= token_id < vocab_size]
    if outside:
        shown = outside[0] if abs(outside[0]) < 2**63 else "a huge number"
        raise invalid(what, f"Token id {shown} is out of vocabulary (0 to {vocab_size - 1}).")


def check_label(label: str, *, param: str) -> str:
    """Return a client's own id. Raises RequestRejected if it is not short and printable, as logs and headers need."""
    if not _LABEL.fullmatch(label):
        raise RequestRejected(
            f"`{param}` must be 1 to 128 characters of A-Z a-z 0-9 . _ : @ / + = -", param=param, code="invalid_value"
        )
    return label


def label_of(given: str) -> str:
    """Return the id in a header as a label. Proxies set any text, so other characters become ``_``."""
    return _NOT_OF_LABELS.sub("_", given.strip())[:MAX_LABEL_CHARS]


def check_traceparent(traceparent: str | None) -> str | None:
    """Return a W3C trace context; None if it is broken, because the standard says to ignore it."""
    return traceparent if traceparent is not None and _TRACEPARENT.fullmatch(traceparent) else None
