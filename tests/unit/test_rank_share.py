"""How a model is divided among ranks."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdmesh.engine.architectures import parse_model_config
from pdmesh.engine.model_config import ModelConfig
from pdmesh.engine.ranks.share import RankShare, check_divisible, check_stages
from pdmesh.errors import ConfigError

RAW: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 1000,
    "hidden_size": 96,
    "intermediate_size": 344,
    "num_hidden_layers": 2,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
_PARSED = parse_model_config(RAW, "config.json")
assert isinstance(_PARSED, ModelConfig)
MODEL = _PARSED


@given(num_outputs=st.integers(1, 5000), num_ranks=st.integers(1, 8))
def test_outputs_are_divided_without_gap(num_outputs: int, num_ranks: int) -> None:
    shares = [RankShare(rank, num_ranks) for rank in range(num_ranks)]
    parts = [share.outputs(num_outputs) for share in shares]
    assert [part.start for part in parts] == [0, *(part.stop for part in parts[:-1])]
    assert parts[-1].stop == num_outputs
    assert all(share.widths(num_outputs) == tuple(part.size for part in parts) for share in shares)
    if num_outputs >= 32 * num_ranks:
        assert all(part.start % 32 == 0 for part in parts)
        assert max(part.size for part in parts) - min(part.size for part in parts) <= 63


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 6, 12])
def test_each_query_head_is_with_its_key_value_head(num_ranks: int) -> None:
    check_divisible(MODEL, num_ranks)
    seen: list[int] = []
    for rank in range(num_ranks):
        share = RankShare(rank, num_ranks)
        heads, kv_heads = share.heads(MODEL), share.kv_heads(MODEL)
        part = share.config_of(MODEL)
        assert (part.num_heads, part.num_kv_heads) == (heads.size, kv_heads.size)
        seen += range(*heads)
        group, own_group = MODEL.num_heads // MODEL.num_kv_heads, heads.size // kv_heads.size
        for place, head in enumerate(range(*heads)):
            assert kv_heads.start + place // own_group == head // group
    assert seen == list(range(MODEL.num_heads))


@pytest.mark.parametrize(
    ("model", "num_ranks", "says"),
    [
        (MODEL, 5, "12 attention heads and 2 key-value heads, which divide among 1, 2, 4, 6, 12 ranks"),
        (MODEL, 3, "which divide among 1, 2, 4, 6, 12 ranks"),
    ],
)
def test_what_cannot_be_divided_is_one_sentence(model: ModelConfig, num_ranks: int, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        check_divisible(model, num_ranks)


@pytest.mark.parametrize(
    ("raw", "num_ranks", "says"),
    [
        ({"architectures": ["Lfm2ForCausalLM"], "layer_types": ["conv", "full_attention"]}, 2, None),
        ({"architectures": ["Lfm2ForCausalLM"], "layer_types": ["conv", "full_attention"]}, 4, "among 1, 2 ranks"),
        (
            {"architectures": ["Qwen3_5ForCausalLM"], "layer_types": ["linear_attention", "full_attention"]},
            2,
            "states and latents of a Qwen3_5ForCausalLM are not divided: set it to 1",
        ),
    ],
)
def test_each_channel_of_a_convolution_is_on_one_rank(raw: dict[str, Any], num_ranks: int, says: str | None) -> None:
    """Four ranks could share two key-value heads, but not a convolution's pages of two heads."""
    model = parse_model_config({**RAW, **raw}, "config.json")
    if says is not None:
        with pytest.raises(ConfigError, match=says):
            check_divisible(model, num_ranks)
        return
    check_divisible(model, num_ranks)
    shares = [RankShare(rank, num_ranks) for rank in range(num_ranks)]
    assert [channel for share in shares for channel in range(*share.half_channels(96))] == list(range(48))


@given(num_layers=st.integers(1, 130), num_stages=st.integers(1, 64))
def test_stages_have_all_layers_in_order_and_the_last_no_more_than_others(num_layers: int, num_stages: int) -> None:
    num_stages = min(num_stages, num_layers)
    parts = [RankShare(stage=stage, num_stages=num_stages).layers(num_layers) for stage in range(num_stages)]
    assert [layer for part in parts for layer in range(*part)] == list(range(num_layers))
    sizes = [part.size for part in parts]
    assert min(sizes) >= 1
    assert max(sizes) - min(sizes) <= 1
    assert sizes[-1] == min(sizes)


def test_more_stages_than_layers_are_one_sentence() -> None:
    with pytest.raises(
        ConfigError, match="pipeline_parallel_size is 9, but the model has 2 layers: set it to 2 at most"
    ):
        check_stages(MODEL, 9)
