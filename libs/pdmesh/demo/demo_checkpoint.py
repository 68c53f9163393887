"""The built-in demo model: a Llama of 1.3M parameters that can answer questions about this project.

It comes with the package, so that a first `pdmesh up` shows the whole mesh at work without a download.
``examples/train_demo.py`` made it from ``examples/demo_corpus.txt``.
"""

from __future__ import annotations

from pathlib import Path

DEMO_MODEL_NAME = "pdmesh-demo"


def demo_checkpoint() -> Path:
    """The demo model's directory."""
    return Path(__file__).parent / "model"
