"""Conversion of a request's checked fields to a job, for HTTP and gRPC."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pdmesh.metrics import Slo
from pdmesh.model import SamplingParams, SessionName
from pdmesh_gateway.auth import Client
from pdmesh_gateway.dialects import Dialect
from pdmesh_gateway.items import ItemParser, ItemWriter
from pdmesh_gateway.jobs import GenerationJob
from pdmesh_gateway.protocol.sampling_fields import SamplingFields
from pdmesh_gateway.sampling import cache_salt, fit_max_tokens, sampling_params, stop_strings
from pdmesh_gateway.serving import Serving, check_traceparent


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestCaller:
    """The client of a request, and the fields that its transport carries besides the body.

    ``request_id`` is the gateway's own, ``label`` the client's. ``received_at`` is Unix time in seconds.
    """

    client: Client
    dialect: Dialect
    request_id: str
    label: str
    slo: Slo
    traceparent: str | None
    received_at: float
    session: SessionName | None = None


async def generation_job(
    serving: Serving,
    fields: SamplingFields,
    caller: RequestCaller,
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
    """Return the job of prompts under a request's ``fields``. Raises RequestRejected.

    ``what`` names the prompt in errors. Without ``max_tokens`` an answer has up to ``default_tokens``; without both it
    may fill the context.
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
    caller: RequestCaller,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    *,
    n: int = 1,
    shown_ids: frozenset[int] = frozenset(),
    call_parser: Callable[[ItemWriter], ItemParser] | None = None,
) -> GenerationJob:
    """Return the job of prompts with given parameters. Raises RequestRejected for a bad target, stop string or salt."""
    client, priority = caller.client, fields.priority or 0
    client.check_service_level(priority, caller.slo)
    return GenerationJob(
        tenant=client.name,
        share=client.share,
        cache_salt=cache_salt(fields.cache_salt),
        session=caller.session,
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
