"""Makes a job of a request's checked fields, for HTTP and for gRPC."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pdmesh.metrics import Slo
from pdmesh.model import SamplingParams
from pdmesh_gateway.auth import Client
from pdmesh_gateway.dialects import Dialect
from pdmesh_gateway.items import ItemParser, ItemWriter
from pdmesh_gateway.jobs import GenerationJob
from pdmesh_gateway.protocol.sampling_fields import SamplingFields
from pdmesh_gateway.sampling import cache_salt, fit_max_tokens, sampling_params, stop_strings
from pdmesh_gateway.serving import Serving, check_traceparent


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """The client of a request, and the fields that its transport carries beside the body."""

    client: Client
    dialect: Dialect
    request_id: str  # ours
    label: str  # the client's own id
    slo: Slo
    traceparent: str | None
    received_at: float  # Unix time, seconds


async def generation_job(
    serving: Serving,
    fields: SamplingFields,
    caller: Caller,
    prompts: Sequence[Sequence[int]],
    *,
    what: str,
    max_tokens: int | None,
    default_tokens: int | None,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
    grammar: str = "",
    n: int = 1,
    shown_ids: frozenset[int] = frozenset(),
    call_parser: Callable[[ItemWriter], ItemParser] | None = None,
) -> GenerationJob:
    """Return the job of prompts that are answered as ``fields`` say. Raises RequestRejected.

    ``what`` names the prompt in errors. Without ``max_tokens`` an answer has up to ``default_tokens``, and without both
    it may fill the context.
    """
    params = sampling_params(
        fields,
        serving.info,
        max_tokens=fit_max_tokens(
            max_tokens,
            num_prompt_tokens=max(map(len, prompts)),
            max_model_len=serving.max_model_len,
            default=default_tokens,
            what=what,
        ),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        grammar=grammar,
        bad_token_sequences=await serving.bad_token_sequences(fields.bad_words),
    )
    serving.check_load(num_prompts=len(prompts), n=n, num_tokens=sum(map(len, prompts)))
    return job_of(serving, fields, caller, prompts, params, n=n, shown_ids=shown_ids, call_parser=call_parser)


def job_of(
    serving: Serving,
    fields: SamplingFields,
    caller: Caller,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    *,
    n: int = 1,
    shown_ids: frozenset[int] = frozenset(),
    call_parser: Callable[[ItemWriter], ItemParser] | None = None,
) -> GenerationJob:
    """Return the job of prompts with these parameters. Raises RequestRejected."""
    client, priority = caller.client, fields.priority or 0
    client.check_service_level(priority, caller.slo)
    return GenerationJob(
        tenant=client.name,
        share=client.share,
        cache_salt=cache_salt(fields.cache_salt),
        request_id=caller.request_id,
        label=caller.label,
        prompts=prompts,
        params=params,
        n=n,
        stop=stop_strings(fields),
        include_stop=bool(fields.include_stop_str_in_output),
        call_parser=call_parser,
        skip_special_tokens=fields.skip_special_tokens is not False,
        shown_ids=shown_ids,
        priority=priority,
        slo=caller.slo,
        traceparent=check_traceparent(caller.traceparent),
        max_wait_s=serving.config.request_timeout_s,
        dialect=caller.dialect,
        received_at=caller.received_at,
    )
