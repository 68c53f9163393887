"""Names of sessions: which header or field counts, and what becomes of hostile ones."""

from __future__ import annotations

from typing import Any

import pytest

from pdmesh.model import SessionName
from pdmesh_gateway.session_names import HEADERS, MAX_NAME_CHARS, SessionNames, lease_s

NAMES = SessionNames("secret")


def find(headers: dict[str, str], *fields: str | None, tenant: str = "t") -> SessionName:
    found = NAMES.find(tenant, headers.get, *fields)
    assert found is not None
    return found


@pytest.mark.parametrize("header", [own for own, _ in HEADERS])
def test_each_header_names_a_session(header: str) -> None:
    assert find({header: "agent"}) == (NAMES.key("t", "agent"), None, False, 0.0)


def test_headers_precede_fields_and_the_first_of_each_counts() -> None:
    headers = {"x-correlation-id": "c", "x-session-affinity": "a"}
    assert find(headers, "key").key == NAMES.key("t", "a")
    assert find({}, None, "response", "user").key == NAMES.key("t", "response")
    nothing: dict[str, str] = {}
    assert NAMES.find("t", nothing.get, None, "", None) is None


def test_a_parent_and_the_last_request_are_named_too() -> None:
    headers = {"x-dynamo-session-id": "child", "x-dynamo-parent-session-id": "top", "x-dynamo-session-final": "True"}
    assert find(headers) == (NAMES.key("t", "child"), NAMES.key("t", "top"), True, 0.0)
    assert find({"x-session-id": "one", "x-parent-session-id": "one"}).parent is None


def test_a_subagent_is_a_child_of_its_session() -> None:
    headers = {"x-claude-code-session-id": "session", "x-claude-code-agent-id": "agent"}
    assert find(headers) == (NAMES.key("t", "agent"), NAMES.key("t", "session"), False, 0.0)
    del headers["x-claude-code-agent-id"]
    assert find(headers) == (NAMES.key("t", "session"), None, False, 0.0)


def test_two_tenants_or_two_meshes_never_share_a_session() -> None:
    own = find({"x-session-id": "s"}).key
    assert find({"x-session-id": "s"}, tenant="other").key != own
    assert SessionNames("other").key("t", "s") != own
    assert NAMES.key("ts", "") != NAMES.key("t", "s")


def test_a_name_of_any_size_or_characters_becomes_sixteen_bytes() -> None:
    for name in ("x" * (1 << 20), "\udcff", "\x00"):
        assert len(find({"x-session-id": name}).key) == 16
    assert NAMES.key("t", "x" * (1 << 20)) == NAMES.key("t", "x" * MAX_NAME_CHARS)


@pytest.mark.parametrize(
    ("cache_control", "expected_s"),
    [
        ({"type": "ephemeral"}, 300.0),
        ({"type": "ephemeral", "ttl": "1h"}, 3600.0),
        ({"type": "ephemeral", "ttl": "9h"}, 0.0),
        ({"type": "ephemeral", "ttl": ["5m"]}, 0.0),
        ({"type": "persistent", "ttl": "5m"}, 0.0),
        (None, 0.0),
        ("ephemeral", 0.0),
    ],
)
def test_an_ephemeral_cache_control_asks_for_a_lease(cache_control: Any, expected_s: float) -> None:
    assert lease_s(cache_control) == expected_s
