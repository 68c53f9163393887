"""``POST /invocations``: SageMaker's requests, passed to the endpoint that fits the body."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from pdmesh.errors import RequestRejected
from pdmesh_gateway.http.computing_endpoint import ComputingEndpoint
from pdmesh_gateway.http.http_exchange import Exchange
from pdmesh_gateway.http.request_intake import read_body
from pdmesh_gateway.serving import Serving

_NULL = msgspec.Raw(b"null")


class _Shape(msgspec.Struct):
    """The fields that distinguish the endpoints, null if missing. Other fields are ignored."""

    messages: msgspec.Raw = _NULL
    prompt: msgspec.Raw = _NULL
    input: msgspec.Raw = _NULL


_decode_shape = msgspec.json.Decoder(_Shape).decode


class InvocationsEndpoint:
    """Endpoint that passes a body on by the first of ``messages``, ``prompt`` and ``input`` that is not null."""

    def __init__(self, serving: Serving, endpoints: Mapping[str, ComputingEndpoint[Any]]) -> None:
        self._serving = serving
        self._endpoints = endpoints

    async def __call__(self, exchange: Exchange) -> None:
        body = await read_body(exchange, self._serving)
        try:
            shape = _decode_shape(body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise RequestRejected(f"The body is not a JSON object: {error}", code="invalid_json") from None
        for name, endpoint in self._endpoints.items():
            if getattr(shape, name) != _NULL:
                await endpoint.take(exchange, body)
                return
        names = ", ".join(f"`{name}`" for name in self._endpoints)
        raise RequestRejected(f"The body needs one of {names}.", code="missing_required_parameter")
