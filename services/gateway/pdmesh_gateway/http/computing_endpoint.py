"""Base of the endpoints that let the mesh compute: turn a body into a request, and a request into jobs."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import ClassVar, Generic, TypeVar

import msgspec

from pdmesh.errors import RequestRejected
from pdmesh.metrics import Slo
from pdmesh.model import RejectReason
from pdmesh_gateway.dialects import Dialect
from pdmesh_gateway.http.body import INLINE_BYTES
from pdmesh_gateway.http.http_exchange import Exchange
from pdmesh_gateway.http.request_intake import decode_request, read_body
from pdmesh_gateway.protocol.sampling_fields import SamplingFields
from pdmesh_gateway.reject_cache import RequestKind
from pdmesh_gateway.request_jobs import RequestCaller
from pdmesh_gateway.sampling import target_s
from pdmesh_gateway.serving import Serving, check_label
from pdmesh_gateway.session_names import lease_s

RequestT = TypeVar("RequestT")


class _RequestHints(msgspec.Struct):
    """Fields of a body that the reject cache reads; other fields are ignored."""

    n: int | None = None
    priority: int | None = None
    slo_ttft_ms: float | None = None
    slo_tpot_ms: float | None = None
    prompt: msgspec.Raw = msgspec.Raw(b"null")
    input: msgspec.Raw = msgspec.Raw(b"null")

    @property
    def has_several_prompts(self) -> bool:
        """Whether the prompt is a list of several texts or token lists. Raise MsgspecError if it is malformed."""
        return _are_several(bytes(self.prompt)) or _are_several(bytes(self.input))


def _are_several(prompts: bytes) -> bool:
    if prompts[:1] != b"[" or prompts[1:].lstrip()[:1] not in (b'"', b"["):
        return False
    return len(_decode_list(prompts)) > 1


_decode_hints = msgspec.json.Decoder(_RequestHints).decode
_decode_list = msgspec.json.Decoder(list[msgspec.Raw]).decode


class ComputingEndpoint(ABC, Generic[RequestT]):
    """``POST`` endpoint whose requests ask the mesh to compute something."""

    dialect: ClassVar[Dialect]

    def __init__(self, serving: Serving, request_type: type[RequestT]) -> None:
        self._serving = serving
        self._request_type = request_type

    @abstractmethod
    async def answer(self, request: RequestT, exchange: Exchange) -> None:
        """Check a request and answer it. Raises RequestRejected."""

    async def __call__(self, exchange: Exchange) -> None:
        await self.take(exchange, await read_body(exchange, self._serving))

    async def take(self, exchange: Exchange, body: bytes) -> None:
        """Answer the request in a body. Raises RequestRejected and ClientGone."""
        admission = self._serving.admission
        reject_cache = self._serving.reject_cache
        try:
            if not reject_cache.is_open and (kind := self._kind(exchange, body)) is not None:
                reject_cache.check(kind)
            with admission.hold(num_bytes=len(body)):
                await exchange.run_until_gone(lambda: self._serve(exchange, body))
        except RequestRejected as error:
            if error.reject_ttl_s > 0 and (kind := self._kind(exchange, body)) is not None:
                reject_cache.refused(kind, error)
            if error.code in (RejectReason.OVERLOADED, RejectReason.QUEUE_TIMEOUT):
                self._serving.metrics.refused(RejectReason(error.code), time.time() - exchange.received_at)
            raise

    def _kind(self, exchange: Exchange, body: bytes) -> RequestKind | None:
        """Return the reject cache's kind of a request; None if the request always passes the cache."""
        if len(body) > INLINE_BYTES:
            return None
        try:
            hints = _decode_hints(body)
            slo_ttft_s = _target_s(exchange, "x-slo-ttft-ms", "slo_ttft_ms", hints.slo_ttft_ms)
            slo_tpot_s = _target_s(exchange, "x-slo-tpot-ms", "slo_tpot_ms", hints.slo_tpot_ms)
            if hints.n not in (None, 1) or hints.has_several_prompts:
                # Of several generations the last ones wait for the first, and a refusal of one ends all.
                return None
        except (RequestRejected, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            # The endpoint will report the error.
            return None
        return RequestKind(
            self.dialect.operation,
            exchange.known_client.name,
            hints.priority or 0,
            slo_ttft_s,
            slo_tpot_s,
            len(body).bit_length(),
        )

    async def _serve(self, exchange: Exchange, body: bytes) -> None:
        serving = self._serving
        await self.answer(await decode_request(exchange, serving, self._request_type, body), exchange)

    def caller(self, fields: SamplingFields, exchange: Exchange) -> RequestCaller:
        """Return the caller of a request; headers override ``fields``. Raises RequestRejected."""
        if fields.request_id is not None and not exchange.label:
            exchange.label = check_label(fields.request_id, param="request_id")
        return RequestCaller(
            client=exchange.known_client,
            dialect=self.dialect,
            request_id=exchange.request_id,
            label=exchange.label,
            slo=Slo(
                ttft_s=_target_s(exchange, "x-slo-ttft-ms", "slo_ttft_ms", fields.slo_ttft_ms),
                tpot_s=_target_s(exchange, "x-slo-tpot-ms", "slo_tpot_ms", fields.slo_tpot_ms),
            ),
            traceparent=exchange.header("traceparent"),
            received_at=exchange.received_at,
            session=self._serving.session_names.find(
                exchange.known_client.name,
                exchange.header,
                fields.prompt_cache_key,
                exchange.thread,
                _user_of(fields),
                lease_s=lease_s(fields.cache_control),
            ),
        )


def _target_s(exchange: Exchange, header: str, name: str, field: float | None) -> float | None:
    """Return a latency target in seconds, from its header or else its field; None without either.

    Raise RequestRejected if either is invalid.
    """
    own_s = target_s(name, field)
    given = exchange.header(header)
    return own_s if given is None else target_s(header, given)


def _user_of(fields: SamplingFields) -> str | None:
    """Return the name of a client's user. Anthropic's clients send one in ``metadata``."""
    user_id = (fields.metadata or {}).get("user_id")
    return fields.user or (user_id if isinstance(user_id, str) else None)
