"""The built-in demo model: a small Llama with random weights and a real tokenizer, made on first use.

It shows the whole mesh at work without a download; its text means nothing.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from pdmesh.testing.checkpoints import CheckpointShape, write_checkpoint

DEMO_MODEL_NAME = "pdmesh-demo"

#: Part of the directory's name: a change of the recipe makes a new directory instead of mixing with an old one.
_RECIPE = "v1"
_SHAPE = CheckpointShape(
    vocab_size=1024,
    hidden_size=128,
    intermediate_size=384,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    max_position_embeddings=8192,
    tie_word_embeddings=True,
)


def demo_checkpoint(cache_dir: Path) -> Path:
    """The demo model's directory under ``cache_dir``, written if absent. Several processes may call at once."""
    directory = cache_dir / f"{DEMO_MODEL_NAME}-{_RECIPE}"
    if directory.is_dir():
        return directory
    cache_dir.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{DEMO_MODEL_NAME}-", dir=cache_dir))
    try:
        write_checkpoint(draft, shape=_SHAPE)
        os.rename(draft, directory)  # atomic: the directory is whole or absent
    except OSError:
        shutil.rmtree(draft, ignore_errors=True)
        if not directory.is_dir():  # else another process was first
            raise
    return directory
