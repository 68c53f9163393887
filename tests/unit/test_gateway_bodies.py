"""Large bodies are read off the loop, in pieces, and come to the same."""

from __future__ import annotations

import json
import threading
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdmesh.errors import RequestRejected
from pdmesh_gateway.http import body as bodies
from pdmesh_gateway.http.body import INLINE_BYTES, decode_body, read_in_pieces
from pdmesh_gateway.protocol.chat_protocol import ChatRequest
from pdmesh_testing.examples import examples

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda values: st.lists(values, max_size=4) | st.dictionaries(st.text(max_size=3), values, max_size=4),
    max_leaves=20,
)


@settings(max_examples=examples(200))
@given(value=JSON, most_bytes=st.integers(0, 40), depth=st.integers(0, 5), blanks=st.sampled_from(["", " \n"]))
def test_a_text_that_is_read_in_pieces_is_the_same(value: Any, most_bytes: int, depth: int, blanks: str) -> None:
    text = (blanks + json.dumps(value, indent=len(blanks) or None)).encode()
    assert read_in_pieces(text, most_bytes=most_bytes, depth=depth) == msgspec.json.decode(text)


@pytest.mark.anyio
async def test_a_large_body_is_read_off_the_loop_and_in_small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    threads: set[int] = set()
    decode = bodies._decode_value

    def noted(text: bytes | msgspec.Raw) -> Any:
        sizes.append(len(text))
        threads.add(threading.get_ident())
        return decode(text)

    monkeypatch.setattr(bodies, "_decode_value", noted)
    properties = {f"p{i}": {"type": "string", "description": "x" * 40} for i in range(200)}
    tools = [
        {"type": "function", "function": {"name": f"t{i}", "parameters": {"type": "object", "properties": properties}}}
        for i in range(100)
    ]
    body = json.dumps({"messages": [{"role": "user", "content": "a"}], "tools": tools, "odd": 1}).encode()
    request, ignored = await decode_body(ChatRequest, body, max_values=10**6)
    assert (request.tools, ignored) == (tools, ("odd",))
    assert sum(sizes) > 0.9 * len(body)
    assert max(sizes) <= INLINE_BYTES
    assert threading.get_ident() not in threads
    for wrong, message in ((body[:-1], "could not parse"), (body.replace(b'"user"', b"1"), r"messages\[0\].role")):
        with pytest.raises(RequestRejected, match=message):
            await decode_body(ChatRequest, wrong, max_values=10**6)
