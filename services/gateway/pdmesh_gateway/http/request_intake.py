"""Reading of an HTTP request's body into the struct of its endpoint."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import TypeVar

from pdmesh.errors import RequestRejected
from pdmesh_gateway.http.body import decode_body, receive_body
from pdmesh_gateway.http.http_exchange import Exchange
from pdmesh_gateway.http.unknown import HEADER, header_value
from pdmesh_gateway.serving import Serving

T = TypeVar("T")

_JSON = re.compile(r"\s*application/([\w.-]+\+)?json\s*(;.*)?", re.IGNORECASE | re.ASCII)


async def read_body(exchange: Exchange, serving: Serving) -> bytes:
    """Return the body, within the gateway's limits. Raises RequestRejected and ClientGone.

    A content type other than JSON is refused. This includes the forms that any page may send from a browser.
    """
    content_type = exchange.header("content-type")
    if content_type is not None and not _JSON.fullmatch(content_type):
        raise RequestRejected(
            f"Content type {content_type[:60]!r} is not supported: send JSON with `Content-Type: application/json`.",
            status=415,
            code="unsupported_media_type",
        )
    config = serving.config
    with serving.admission.upload() as upload:
        body = await receive_body(
            exchange.receive,
            upload,
            content_length=exchange.content_length,
            max_bytes=config.max_body_bytes,
            timeout_s=config.body_timeout_s,
            content_encoding=exchange.header("content-encoding"),
        )
    if (encoding := json.detect_encoding(body[:4])) not in ("utf-8", "utf-8-sig"):
        raise RequestRejected(f"The request body is {encoding.upper()}: send JSON in UTF-8.", code="invalid_json")
    return body.removeprefix(codecs.BOM_UTF8)


async def decode_request(exchange: Exchange, serving: Serving, kind: type[T], body: bytes) -> T:
    """Return the body as its struct. Raise RequestRejected if it does not fit.

    Ignored fields are counted, and named in a header of the answer.
    """
    config = serving.config
    request, ignored = await decode_body(kind, body, max_values=config.max_body_values)
    if ignored:
        serving.metrics.ignored_fields.inc(len(ignored))
        exchange.extra_headers.append((HEADER, header_value(ignored)))
    return request


@asynccontextmanager
async def read_request(exchange: Exchange, serving: Serving, kind: type[T]) -> AsyncGenerator[T]:
    """Yield a request's body as its struct, and count its bytes as held by the gateway within the block.

    Raises RequestRejected and ClientGone.
    """
    body = await read_body(exchange, serving)
    with serving.admission.hold(num_bytes=len(body)):
        yield await decode_request(exchange, serving, kind, body)
