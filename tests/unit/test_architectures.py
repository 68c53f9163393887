"""Every architecture that is served gives what transformers does, whatever happens to a request on its way.

An architecture is in these tests by its module in `pdmesh.engine.architectures`; what it can be in particular is listed
in `pdmesh_testing.transformers_checkpoints`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from _pytest.mark import ParameterSet
from safetensors.torch import load_file, save_file

from pdmesh.engine.architectures import parse_model_config
from pdmesh.engine.compute import ComputeOptions
from pdmesh.engine.experts import Experts
from pdmesh.engine.files import load_model_config
from pdmesh.engine.model_config import DecoderShape
from pdmesh.engine.model_loading import plan_model
from pdmesh.engine.native import NativeAttention, _NativePlan
from pdmesh.engine.ranks.share import check_divisible, check_stages
from pdmesh.engine.runner import TorchEngine
from pdmesh.errors import ConfigError
from pdmesh_testing.architectures import (
    NUM_OUTPUT_TOKENS,
    PARAMS,
    PROMPT_LENGTHS,
    assert_computes_as_transformers,
    assert_equal,
    prompt_of,
    references_of,
)
from pdmesh_testing.reference import GreedyStep
from pdmesh_testing.stepping import SteppedRequest, generate, new_sequence, separate_tables, step
from pdmesh_testing.transformers_checkpoints import (
    model_variants,
    transformers_config,
    write_transformers_checkpoint,
    write_wrapped_checkpoint,
)


def models() -> Iterator[ParameterSet]:
    """(model type, options); all but each architecture's first are slow tests."""
    for model_type, variants in model_variants().items():
        for number, options in enumerate(variants):
            marks = [pytest.mark.slow] if number else []
            yield pytest.param((model_type, options), marks=marks, id=f"{model_type}-{number}")


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module", params=models())
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model_type, options = request.param
    # With the weights of seed 1, rounding moves log-probabilities of Qwen3.5 by 0.8 of the limit.
    seed = 0 if model_type == "qwen3_5_text" else 1
    return write_transformers_checkpoint(tmp_path_factory.mktemp(model_type), model_type, seed=seed, **options)


@pytest.fixture(scope="module")
def references(checkpoint: Path) -> dict[int, list[GreedyStep]]:
    return references_of(checkpoint)


def test_greedy_tokens_and_logprobs_equal_transformers(
    checkpoint: Path, references: dict[int, list[GreedyStep]]
) -> None:
    assert_computes_as_transformers(checkpoint, references)


def test_deterministic_mode_gives_the_same_tokens(checkpoint: Path, references: dict[int, list[GreedyStep]]) -> None:
    engine = TorchEngine(checkpoint, num_blocks=32, num_threads=1, deterministic=True)
    length = PROMPT_LENGTHS[-1]
    alone = generate(engine, prompt_of(length), NUM_OUTPUT_TOKENS, chunk_tokens=30, params=PARAMS)
    assert_equal(alone.results, references[length])


@pytest.mark.parametrize("model_type", ["deepseek_v3", "glm4_moe", "glm4_moe_lite", "minimax_m2"])
def test_routers_round_as_those_of_transformers(tmp_path: Path, model_type: str) -> None:
    checkpoint = write_transformers_checkpoint(tmp_path, model_type, **model_variants()[model_type][0])
    with patch.object(Experts, "route", autospec=True, side_effect=Experts.route) as route:
        generate(TorchEngine(checkpoint, num_blocks=4, dtype="bfloat16"), prompt_of(19), 2)
    assert {call.args[1].dtype == torch.float32 for call in route.mock_calls} == {model_type != "minimax_m2"}


def test_deterministic_mode_gives_the_same_bits(checkpoint: Path) -> None:
    """In bf16, where compiled kernels do what they can: alone, in chunks, and among others."""
    engine = TorchEngine(checkpoint, num_blocks=32, num_threads=1, deterministic=True, ordered=True, dtype="bfloat16")
    length = PROMPT_LENGTHS[-1]
    alone = generate(engine, prompt_of(length), 6, chunk_tokens=1000, params=PARAMS)
    lengths = [length + 6, 30, 40]
    requests = [
        SteppedRequest(new_sequence(prompt_of(num_tokens - 6), table, PARAMS), 6)
        for num_tokens, table in zip(lengths, separate_tables(engine, lengths), strict=True)
    ]
    while left := [request for request in requests if not request.done]:
        step(engine, [(request, 11) for request in left])
    drawn = [[result.logprobs for result in request.results if result.logprobs] for request in (alone, requests[0])]
    assert drawn[0] == drawn[1]
    assert requests[0].output_ids == alone.output_ids


MROPE = {"rope_type": "default", "rope_theta": 5e5, "mrope_section": [2, 3, 3]}
YARN = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 40, "beta_fast": 32.0,
    "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip
#: Models that see images, too, and fields of their text model, and the seed of the weights.
WRAPPED: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-vl": ("Qwen3VLForConditionalGeneration", {"model_type": "qwen3_vl_text", "rope_parameters": MROPE}),
    "qwen2.5-vl": ("Qwen2_5_VLForConditionalGeneration", {"model_type": "qwen2_5_vl_text", "rope_parameters": MROPE}),
    "qwen3-vl-moe": (
        "Qwen3VLMoeForConditionalGeneration",
        {"model_type": "qwen3_vl_moe_text", "rope_parameters": MROPE, "num_experts": 6, "num_experts_per_tok": 2,
         "moe_intermediate_size": 40},
    ),
    "gemma-4": (
        "Gemma4ForConditionalGeneration",
        {**model_variants()["gemma4_text"][0], "model_type": "gemma4_text", "use_bidirectional_attention": "vision"},
    ),
    "qwen3.5": (
        "Qwen3_5ForConditionalGeneration", {**model_variants()["qwen3_5_text"][0], "model_type": "qwen3_5_text"},
    ),
    "qwen3.5-moe": (
        "Qwen3_5MoeForConditionalGeneration",
        # With the weights of seed 0, rounding moves both sides' log-probabilities by 1.5e-4, measured against float64.
        {"seed": 2, **model_variants()["qwen3_5_moe_text"][0], "model_type": "qwen3_5_moe_text"},
    ),
    "mistral-3": ("Mistral3ForConditionalGeneration", {"model_type": "mistral", "sliding_window": None}),
    "ministral-3": (
        "Mistral3ForConditionalGeneration",
        {"model_type": "ministral3", "rope_parameters": YARN, "max_position_embeddings": 160},
    ),
}  # fmt: skip


@pytest.mark.parametrize(("name", "text"), WRAPPED.values(), ids=WRAPPED)
def test_the_text_of_a_model_that_sees_images_is_served(tmp_path: Path, name: str, text: dict[str, Any]) -> None:
    checkpoint = write_wrapped_checkpoint(tmp_path, name, **{"head_dim": 16, **text})
    assert_computes_as_transformers(checkpoint, references_of(checkpoint))


@pytest.mark.parametrize(
    ("name", "model_type", "renamed"),
    [
        ("Gemma3ForConditionalGeneration", "gemma3_text", "language_model.{}"),
        ("Gemma3ForConditionalGeneration", "gemma3_text", "model.language_model.{}"),
        ("Mistral3ForConditionalGeneration", "mistral", "language_model.{}"),
        ("Mistral3ForConditionalGeneration", "ministral3", "language_model.{}"),
        ("Qwen3VLForConditionalGeneration", "qwen3", "model.language_model.{}"),
        ("Qwen2_5_VLForConditionalGeneration", "qwen2", "{}"),
    ],
)
def test_tensors_and_fields_are_found_as_they_are_published(
    tmp_path: Path, name: str, model_type: str, renamed: str
) -> None:
    """The first Qwen2.5-VL have their text model's fields beside the others, and say mrope."""
    options: dict[str, Any] = {"head_dim": 16} if model_type != "qwen2" else {}
    text = write_transformers_checkpoint(tmp_path / "text", model_type, tie_word_embeddings=True, **options)
    images = tmp_path / "images"
    shutil.copytree(text, images)
    tensors = load_file(text / "model.safetensors")
    moved = {
        renamed.format(key.removeprefix("model.") if "model.l" in renamed else key): t for key, t in tensors.items()
    }
    save_file({**moved, "vision_tower.patch.weight": torch.ones(3)}, images / "model.safetensors")
    fields = json.loads((text / "config.json").read_text())
    if "Qwen" in name:
        fields["rope_parameters"] = {**fields["rope_parameters"], "type": "mrope", "rope_type": "mrope"}
    wrapper = {"architectures": [name], "model_type": "x", "dtype": "float32"}
    wrapped = {**fields, **wrapper} if "Qwen2" in name else {**wrapper, "text_config": fields}
    (images / "config.json").write_text(json.dumps({**wrapped, "vision_config": {"hidden_size": 16}}))
    outputs = [generate(TorchEngine(path, num_blocks=4), prompt_of(19), 6).output_ids for path in (text, images)]
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize(
    ("model_type", "variant", "refused"),
    [("gemma4_text", 2, {check_divisible: "read the KV", check_stages: "read the KV"}),
     ("gemma4_text", 0, {}), ("lfm2", 0, {}),
     ("deepseek_v3", 0, {check_divisible: "latents"}),
     ("qwen3_5_text", 0, {check_divisible: "states"})],
)  # fmt: skip
def test_layers_that_differ_are_refused_where_they_are_not_served(
    tmp_path: Path, model_type: str, variant: int, refused: dict[Callable[[DecoderShape, int], None], str]
) -> None:
    checkpoint = write_transformers_checkpoint(tmp_path, model_type, **model_variants()[model_type][variant])
    config = load_model_config(checkpoint)
    for check in (check_divisible, check_stages):
        check(config, 1)
        if check not in refused:
            check(config, 2)
            continue
        with pytest.raises(ConfigError, match=f"_parallel_size is 2, but .*{refused[check]}.*: set it to 1"):
            check(config, 2)
    with pytest.raises(ConfigError, match=r"contexts of a .* are not spread so far: set it to 0"):
        TorchEngine(checkpoint, num_blocks=4, range_tokens=64)
    with pytest.raises(ConfigError, match=r"computed on CPUs only so far: set worker\.device to cpu"):
        plan_model(checkpoint, ComputeOptions(device=torch.device("cuda")))


@pytest.mark.parametrize(
    ("model_type", "variant", "layer", "names"),
    [("gemma4_text", 2, 5, ("v_proj", "k_norm")), ("deepseek_v3", 0, 4, ("q_a_proj", "kv_a_layernorm"))],
)
def test_tensors_that_are_published_and_not_read_are_left_alone(
    tmp_path: Path, model_type: str, variant: int, layer: int, names: tuple[str, ...]
) -> None:
    """Projections of layers that read the KV of others, and layers that guess further tokens."""
    checkpoint = write_transformers_checkpoint(tmp_path, model_type, **model_variants()[model_type][variant])
    found = generate(TorchEngine(checkpoint, num_blocks=4), prompt_of(19), 6).output_ids
    tensors = load_file(checkpoint / "model.safetensors")
    unread = {f"model.layers.{layer}.self_attn.{name}.weight": torch.ones(3) for name in names}
    assert not unread.keys() & tensors.keys()
    save_file({**tensors, **unread}, checkpoint / "model.safetensors", metadata={"format": "pt"})
    assert generate(TorchEngine(checkpoint, num_blocks=4), prompt_of(19), 6).output_ids == found
    if model_type == "deepseek_v3":
        config = checkpoint / "config.json"
        config.write_text(config.read_text().replace("num_nextn_predict_layers", "unknown"))
        with pytest.raises(ConfigError, match=r"layers\.4"):
            TorchEngine(checkpoint, num_blocks=4)


@pytest.mark.parametrize("wrapped", ["qwen3-vl-moe", "qwen3.5-moe"])
def test_experts_in_one_tensor_are_found_as_they_are_published(tmp_path: Path, wrapped: str) -> None:
    """Qwen3-VL's are (experts, inputs, outputs), Qwen3.5's the reverse. Transformers writes these, or single ones."""
    name, text = WRAPPED[wrapped]
    checkpoint = write_wrapped_checkpoint(tmp_path, name, **{"head_dim": 16, **text})
    found = generate(TorchEngine(checkpoint, num_blocks=4), prompt_of(19), 6).output_ids
    tensors = load_file(checkpoint / "model.safetensors")
    published = {key: tensor for key, tensor in tensors.items() if ".experts." not in key}
    for layer in {key.partition(".experts.")[0] for key in tensors.keys() - published.keys()}:
        prefix = f"{layer}.experts"
        if wrapped == "qwen3-vl-moe":
            projections = [f"{prefix}.{end}" for end in ("gate_up_proj", "down_proj")]
            published |= {each: tensors[each].transpose(1, 2).contiguous() for each in projections}
            continue
        gate, up, down = (
            torch.stack([tensors[f"{prefix}.{number}.{end}_proj.weight"] for number in range(text["num_experts"])])
            for end in ("gate", "up", "down")
        )
        published |= {f"{prefix}.gate_up_proj": torch.cat((gate, up), dim=1), f"{prefix}.down_proj": down}
    save_file(published, checkpoint / "model.safetensors", metadata={"format": "pt"})
    assert generate(TorchEngine(checkpoint, num_blocks=4), prompt_of(19), 6).output_ids == found


def test_latents_keep_their_shape_of_pages_and_queries_of_another_width_are_refused(tmp_path: Path) -> None:
    config = load_model_config(write_transformers_checkpoint(tmp_path, "deepseek_v3"))
    num_heads, width = config.layers[0].page or (0, 0)
    layout = replace(config, num_kv_heads=num_heads, head_dim=width).kv_layout(dtype="float32", block_size=16)
    assert set(layout.pages) == {(num_heads, width)}
    plan = _NativePlan(NativeAttention(None, layout, 1.0), *torch.empty(2, 0))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=f"queries have 8 values a head, but keys {width}"):
        plan.attend(torch.zeros(1, num_heads, 8), torch.zeros(1, 2, num_heads, 16, width))


def test_parts_of_nemotron_are_those_of_its_letters_and_others_are_refused() -> None:
    options = model_variants()["nemotron_h"][0]
    raw = json.loads(transformers_config("nemotron_h", **options).to_json_string())
    listed = parse_model_config(raw, "config.json")
    without = {name: value for name, value in raw.items() if name != "layers_block_type"}
    assert parse_model_config({**without, "hybrid_override_pattern": "MME*-M"}, "config.json") == listed
    assert [(layer.has_mlp, layer.delta is None, layer.experts is None) for layer in listed.layers] == [
        (False, False, True), (True, False, False), (True, True, True), (False, False, True)
    ]  # fmt: skip
    for wrong, found in (
        ({"layers_block_type": ["moe", "linear_attention"]}, "part 0 .* follows no attention and no state"),
        ({"layers_block_type": ["full_attention", "mlp", "moe"]}, "part 2 .* follows no attention and no state"),
        ({"layers_block_type": ["full_attention", "conv"]}, "layers_block_type must list"),
        ({"layers_block_type": {"moe": 1}}, "layers_block_type must list"),
        ({"moe_latent_size": 16}, "moe_latent_size is not supported"),
        ({"time_step_limit": [0.01, 0.1]}, "time_step_limit"),
    ):
        with pytest.raises(ConfigError, match=found):
            parse_model_config({**raw, **wrong}, "config.json")
