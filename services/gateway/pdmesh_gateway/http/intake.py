"""From an HTTP request's body to the struct of its endpoint."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from pdmesh_gateway.http.body import decode_body
from pdmesh_gateway.http.exchange import Exchange
from pdmesh_gateway.http.unknown import HEADER, header_value
from pdmesh_gateway.serving import Serving

T = TypeVar("T")


async def read_body(exchange: Exchange, serving: Serving) -> bytes:
    """The body, within the gateway's limits. Raises RequestRejected and ClientGone."""
    config = serving.config
    return await exchange.body(serving.admission, max_bytes=config.max_body_bytes, timeout_s=config.body_timeout_s)


async def decode_request(exchange: Exchange, serving: Serving, decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    """The body as its struct; what of it was passed over is counted, and named in a header. Raises RequestRejected."""
    config = serving.config
    request, ignored = await decode_body(decoder, body, max_values=config.max_body_values, strict=config.strict_fields)
    if ignored:
        serving.metrics.ignored(len(ignored))
        exchange.extra_headers.append((HEADER, header_value(ignored)))
    return request
