"""The fake engine as settings ask for it (`worker.engine = "fake"`). Implements `pdmesh.worker.engines.EngineMaker`."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

from pdmesh.config import MeshConfig
from pdmesh.engine.files import load_model_info, resolve_model
from pdmesh.engine.identity import stand_in_identity
from pdmesh.errors import ConfigError
from pdmesh.kv_layout import KvLayout
from pdmesh.policy.latency import LinearLatencyModel
from pdmesh.profiles import load_profile
from pdmesh.worker.engines import EngineFacts, cache_size_of
from pdmesh_testing.fake_engine import FakeEngine, timed_by

#: Context length, unless configured.
MAX_MODEL_LEN = 32_768

#: What the engine says of itself where its steps take time, so that they are timed and learnt from like any other's.
NUM_PARAMETERS, NUM_HEADS = 100_000_000, 2

#: KV of a token. Steps that take time do so in many layers, between which others may wait or interrupt.
LAYOUT = KvLayout(num_layers=2, num_kv_heads=NUM_HEADS, head_dim=64, block_size=16, dtype="float32")
TIMED_LAYOUT = KvLayout(num_layers=16, num_kv_heads=NUM_HEADS, head_dim=16, block_size=16, dtype="bfloat16")


def build(config: MeshConfig, num_stages: int) -> FakeEngine:
    """Build the engine. Raises ConfigError."""
    worker = config.worker
    layout = LAYOUT if worker.fake_latency is None else TIMED_LAYOUT
    if worker.block_size is not None:
        layout = replace(layout, block_size=worker.block_size)
    max_model_len = worker.max_model_len or MAX_MODEL_LEN
    return FakeEngine(
        layout,
        num_blocks=cache_size_of(worker, layout, free_bytes=None, max_model_len=max_model_len).num_blocks,
        max_model_len=max_model_len,
        checks_kv=False,
        step_s=None if worker.fake_latency is None else timed_by(parse_latency(worker.fake_latency)),
        num_stages=num_stages,
        weights=_weights(config.model),
    )


def facts(config: MeshConfig) -> EngineFacts:
    """Return facts of an engine whose steps take time; one whose steps take none has no facts."""
    if config.worker.fake_latency is None:
        return EngineFacts()
    return EngineFacts(num_parameters=NUM_PARAMETERS, num_heads=NUM_HEADS, device_name="stand-in")


def _weights(model: str | None) -> str:
    """Return the identity of the engine's weights: by ``config.json`` if the model is a directory."""
    if model is None or not Path(model).expanduser().is_dir():
        return stand_in_identity()
    return stand_in_identity(load_model_info(resolve_model(model)).fingerprint.hex())


def parse_latency(text: str) -> LinearLatencyModel:
    """Return the latency model of a named profile, or of terms ``name=value,name=value`` in seconds.

    Missing terms are 0. Raises ConfigError for an unknown term or value.
    """
    if "=" not in text:
        return load_profile(text).latency
    terms: dict[str, float] = {"a_s": 0.0, "b_s": 0.0, "c_s": 0.0, "d_s": 0.0}
    for part in text.split(","):
        name, _, value = (word.strip() for word in part.partition("="))
        if name not in LinearLatencyModel.__slots__:
            raise ConfigError(
                f"{name!r} is not a term of a latency model: use {', '.join(LinearLatencyModel.__slots__)}"
            )
        try:
            terms[name] = float(value)
        except ValueError:
            raise ConfigError(f"the term {name} of a latency model is {value!r}: give seconds") from None
        if not (math.isfinite(terms[name]) and terms[name] >= 0):
            raise ConfigError(f"the term {name} of a latency model is {value}: give seconds, 0 or more")
    return LinearLatencyModel(**terms)
