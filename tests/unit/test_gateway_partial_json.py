"""JSON that was cut: what there is of it."""

import json

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jiter import from_json

from pdmesh_gateway.partial_json import whole_object
from pdmesh_testing.examples import examples

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-999, 999) | st.text(max_size=6) | st.sampled_from(['"', "\\", "}", ",:"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=examples(100))
@given(value=st.dictionaries(st.text(max_size=4), VALUES, max_size=4), indent=st.sampled_from([None, 1]))
def test_a_cut_object_is_what_the_clients_make_of_it(value: object, indent: int | None) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=False)
    assert msgspec.json.decode(whole_object(text)) == value
    for end in range(1, len(text)):
        expected = from_json(text[:end].encode(), partial_mode=True)
        assert msgspec.json.decode(whole_object(text[:end])) == expected, text[:end]


@pytest.mark.parametrize(
    ("text", "whole"),
    [
        ("", b"{}"),
        ("nonsense", b"{}"),
        ("[1, 2", b"{}"),
        ('{"a": -', b"{}"),
        ('{"a": 12', b'{"a": 12}'),
        ('{"a": 12,', b'{"a": 12}'),
        ('{"a": [1, {"b": "c', b'{"a": [1, {}]}'),
        ('{"a": 1}} {"b": 2', b'{"a": 1}'),
        ('{"a": 1}]', b'{"a": 1}'),
        ("{" * 5000, b"{}"),
        ('{"a":' * 5000, b"{}"),
        ('{"a": "\ud800', b"{}"),
    ],
)
def test_what_is_no_object_is_an_empty_one(text: str, whole: bytes) -> None:
    assert whole_object(text) == whole
