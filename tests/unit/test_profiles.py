"""Profile files, and which instances a profile says nothing of."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pdmesh.errors import ConfigError
from pdmesh.policy.latency import PROFILES
from pdmesh.policy.latency_profile import Subject
from pdmesh.profiles import load_profile, save_profile
from pdmesh_testing.profiles import COEFFICIENTS, SUBJECT, profile_file

CONTENT = profile_file(SUBJECT)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "small.json"
    save_profile(path, CONTENT)
    return path


def test_a_profile_is_read_as_it_was_written(file: Path) -> None:
    profile = load_profile(str(file))
    assert profile.subject == SUBJECT
    assert dict(zip(COEFFICIENTS, profile.latency.coefficients, strict=True)) == COEFFICIENTS


def test_a_profile_of_an_earlier_pdmesh_is_read_as_a_sum(file: Path) -> None:
    content = json.loads(file.read_text())
    del content["coefficients"]["weights_s"]
    file.write_text(json.dumps(content))
    latency = load_profile(str(file)).latency
    assert latency.coefficients == (*list(COEFFICIENTS.values())[:-1], 0.0)


def test_built_in_profiles_are_of_gpus() -> None:
    for name in PROFILES:
        profile = load_profile(name)
        assert profile.latency is PROFILES[name]
        assert profile.mismatch(SUBJECT) is not None
    subject = Subject(
        model="meta-llama/Llama-3.1-8B",
        num_parameters=7_504_924_672,
        num_layers=32,
        num_kv_heads=8,
        head_dim=128,
        dtype="bfloat16",
        device="cuda:0",
        device_name="NVIDIA A100-SXM4-80GB",
    )
    assert load_profile("a100-llama3-8b").mismatch(subject) is None
    assert load_profile("h100-llama3-8b").mismatch(subject) is not None


@pytest.mark.parametrize(
    "other",
    [
        {"num_parameters": 83_000_000},
        {"num_layers": 13},
        {"dtype": "float32"},
        {"device": "cuda:0"},
        {"device_name": "Abacus 8000"},
    ],
)
def test_another_model_or_device_is_refused_in_a_sentence_that_names_both(file: Path, other: dict[str, Any]) -> None:
    profile = load_profile(str(file))
    problem = profile.mismatch(replace(SUBJECT, model="large", **other))
    assert problem is not None
    assert str(SUBJECT) in problem
    assert str(replace(SUBJECT, model="large", **other)) in problem
    assert "\n" not in problem


def test_what_is_not_known_and_what_a_model_is_called_do_not_matter(file: Path) -> None:
    profile = load_profile(str(file))
    assert profile.mismatch(replace(SUBJECT, model="alias")) is None
    assert profile.mismatch(replace(SUBJECT, num_parameters=0, device_name="", dtype="")) is None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"coefficients": {**COEFFICIENTS, "a_s": -0.1}}, ">= 0"),
        ({"coefficients": {**COEFFICIENTS, "a_s": "fast"}}, "float"),
        ({"coefficients": {**COEFFICIENTS, "a_s": None}}, "float"),
        ({"coefficients": {**COEFFICIENTS, "a_s": 0, "b_s": 0}}, "no time"),
        ({"coefficients": {"a_s": 0.1}}, "decode_context_s"),
        ({"coefficients": {}}, "missing"),
        ({"coefficients": {**COEFFICIENTS, "mixed_s": 0.1}}, "mixed_a_s"),
        ({"format": "pdmesh-profile-1"}, "pdmesh-profile-1"),
        ({"format": "other-9"}, "other-9"),
        ({"subject": 3}, "object"),
        ({"extra": 1}, "extra"),
        ({"num_steps": 0}, ">= 1"),
    ],
)
def test_a_malformed_file_is_refused_by_name(file: Path, change: dict[str, Any], said: str) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ConfigError, match=said) as refused:
        load_profile(str(file))
    assert str(file) in str(refused.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "\x00", '{"a_s": NaN}', '{"a_s": 1e999}'])
def test_no_json_is_no_profile(file: Path, text: str) -> None:
    file.write_text(text)
    with pytest.raises(ConfigError, match="is not a latency profile"):
        load_profile(str(file))


def test_not_a_number_is_refused(file: Path) -> None:
    file.write_text(file.read_text().replace("0.02", "NaN", 1))
    with pytest.raises(ConfigError, match="is not a latency profile"):
        load_profile(str(file))


def test_neither_name_nor_file() -> None:
    with pytest.raises(ConfigError, match=r"'abacus'.*h200-llama3-8b"):
        load_profile("abacus")


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        load_profile(str(tmp_path))
    with pytest.raises(ConfigError, match="cannot write"):
        save_profile(tmp_path, CONTENT)
