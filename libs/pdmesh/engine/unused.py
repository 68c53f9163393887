"""Stored tensors that no layer reads: harmless ones are known by name, and all others are refused."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from torch import Tensor

from pdmesh.errors import ConfigError

#: Names of tensors that change no result here.
_HARMLESS = re.compile(
    "|".join(
        (
            r"(.*\.)?rotary_emb\.inv_freq",  # config.json says how heads are rotated
            r"blk\.\d+\.attn_rot_embd\.weight",  # the same, in the first GGUF files
            r"rope_(freqs|factors_long|factors_short)\.weight",  # config.json has the values
            r"(.*\.)?(attn|attention)\.(masked_)?bias",  # causal masks of GPT-2 and GPT-NeoX
            r"(model\.)?mtp\..*",  # layers that guess further tokens
            # Models of images and sounds beside the text model.
            r"(model\.)?(visual|vision_\w+|multi_modal_projector|mm_projector|embed_vision|audio_\w+|embed_audio)\..*",
            r"(.*\.)?(input|output|q|k|v|prob)_scale",  # scales of activations, which stay unquantised here
            r"(.*\.)?(input|output)_(zero_point|global_scale)",
            r"(.*\.)?weight_shape",  # config.json gives the shapes of packed weights
        )
    )
)


def check_unused(names: Iterable[str], where: str, read: Callable[[str], Tensor]) -> None:
    """Raise ConfigError if one of these tensors, which no layer reads, may change what the model computes.

    ``read`` reads one of them. A bias of zeros changes nothing, and some formats store one for every layer.
    """
    for name in sorted(names):
        if _HARMLESS.fullmatch(name) or (name.endswith(".bias") and not bool(read(name).any())):
            continue
        raise ConfigError(
            f"{where}: no layer of this architecture reads the tensor {name!r}, so answers would be wrong; the model "
            "is of another architecture, or of a variant that is not supported"
        )
