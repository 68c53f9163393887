"""Small random checkpoints of any architecture, made and saved by transformers itself. Imports it late.

A model has odd sizes and, where its architecture allows them, windows shorter than the tests' prompts. Weights are
drawn so that greedy output wanders over the vocabulary, as those of `pdmesh.testing.checkpoints`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pdmesh.testing.tokenizers import write_tokenizer

#: Of every architecture, unless its options say otherwise.
_SHAPE: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "bos_token_id": 256,
    "eos_token_id": 258,
    "pad_token_id": 256,
    "tie_word_embeddings": False,
}
_GAIN, _LOGITS_STD = 1.5, 3.0


def write_transformers_checkpoint(
    directory: Path, model_type: str, *, seed: int = 0, sharded: bool = False, dtype: str = "float32", **options: Any
) -> Path:
    """Write a whole model directory and return it; ``options`` are fields of the architecture's configuration."""
    import torch
    import transformers

    hf: Any = transformers  # only partly typed
    hf.logging.disable_progress_bar()
    config = hf.AutoConfig.for_model(model_type, **{**_SHAPE, **options})
    model = hf.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.inference_mode():
        for name, parameter in model.named_parameters():
            noise = torch.empty_like(parameter).normal_(generator=generator)
            if parameter.dim() == 1:
                parameter.add_(noise, alpha=0.3 if name.endswith(".bias") else 0.1)
            else:
                is_vocabulary = parameter.shape[0] == config.vocab_size
                parameter.copy_(noise * ((_LOGITS_STD if is_vocabulary else _GAIN) / parameter.shape[-1] ** 0.5))
    model.to(getattr(torch, dtype)).save_pretrained(directory, max_shard_size="64KB" if sharded else "5GB")
    write_tokenizer(directory, vocab_size=config.vocab_size, model_max_length=config.max_position_embeddings)
    return directory
