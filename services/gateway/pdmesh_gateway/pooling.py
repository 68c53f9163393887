"""Computation of embeddings as the checkpoint's files (sentence-transformers) describe it.

An embedding is the hidden state of a text's last token, as models with causal attention are trained for
(Qwen3-Embedding).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from pdmesh.engine.files import load_model_config
from pdmesh.engine.json_files import read_json_object
from pdmesh.errors import ConfigError, RequestRejected
from pdmesh_gateway.sampling import invalid

# A gateway without embeddings needs no numpy.
if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_LAST_TOKEN = "pooling_mode_lasttoken"
_NORM_FLOOR = 1e-12


@dataclass(frozen=True, slots=True, kw_only=True)
class Pooling:
    """Rules of a model's embeddings. ``refusal`` is the reason if there are none."""

    refusal: str = ""
    hidden_size: int
    normalizes: bool = True
    #: Sizes that the model is trained to be cut to. Empty allows any size up to ``hidden_size``; None allows no cut.
    dimensions: tuple[int, ...] | None = None

    def check(self, dimensions: int | None) -> None:
        """Raise RequestRejected if the model makes no embeddings, or none of this size. None is the full size."""
        if self.refusal:
            raise RequestRejected(self.refusal, param="model", code="unsupported_model")
        if dimensions is None or dimensions == self.hidden_size:
            return
        if self.dimensions is None:
            raise invalid(
                "dimensions",
                f"This model's embeddings have {self.hidden_size} dimensions; it was not trained for fewer "
                "(its checkpoint has no `matryoshka_dimensions`, and gateway.embeddings is not matryoshka).",
            )
        if self.dimensions and dimensions not in self.dimensions:
            allowed = ", ".join(map(str, self.dimensions))
            raise invalid("dimensions", f"`dimensions` must be one of {allowed}, got {dimensions}.")
        if not 1 <= dimensions <= self.hidden_size:
            raise invalid("dimensions", f"`dimensions` must be from 1 to {self.hidden_size}, got {dimensions}.")

    def embedding(self, hidden: bytes, dimensions: int | None) -> npt.NDArray[np.float32]:
        """Return the embedding of a text from its last token's hidden state, cut to ``dimensions`` unless None."""
        import numpy as np

        vector: npt.NDArray[np.float32] = np.frombuffer(hidden, dtype="<f4")[:dimensions]
        if self.normalizes:
            vector = vector / np.float32(max(float(np.linalg.norm(vector)), _NORM_FLOOR))
        return vector


def load_pooling(directory: Path, setting: str) -> Pooling:
    """Return the rules of a checkpoint's embeddings. Raises ConfigError for files that are broken."""
    hidden_size = load_model_config(directory).hidden_size
    if setting == "off":
        return Pooling(
            refusal="Embeddings are disabled on this server (gateway.embeddings is off).", hidden_size=hidden_size
        )
    modules = _modules(directory)
    refusal = ""
    if modules is None:
        if setting == "auto":
            refusal = (
                "This model does not provide embeddings: its checkpoint does not define their pooling (modules.json). "
                "Set gateway.embeddings to on to use the last token's hidden state."
            )
    elif not _pools_last_token(directory, modules):
        refusal = "This model does not pool embeddings from the last token, and other pooling is not supported."
    return Pooling(
        refusal=refusal,
        hidden_size=hidden_size,
        normalizes=modules is None or any(str(module.get("type")).endswith("Normalize") for module in modules),
        dimensions=() if setting == "matryoshka" else _matryoshka(directory),
    )


def _modules(directory: Path) -> list[dict[str, Any]] | None:
    """Return the modules that process a text; None if the checkpoint does not list them.

    Raise ConfigError if the list is malformed.
    """
    path = directory / "modules.json"
    if not path.exists():
        return None
    try:
        return msgspec.json.decode(path.read_bytes(), type=list[dict[str, Any]])
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error


def _pools_last_token(directory: Path, modules: list[dict[str, Any]]) -> bool:
    folders = [Path(str(module.get("path"))).name for module in modules if str(module.get("type")).endswith("Pooling")]
    if len(folders) != 1:
        return False
    config = read_json_object(directory / folders[0] / "config.json")
    modes = [name for name, is_on in config.items() if name.startswith("pooling_mode_") and is_on is True]
    return modes == [_LAST_TOKEN]


def _matryoshka(directory: Path) -> tuple[int, ...] | None:
    config = read_json_object(directory / "config.json")
    dimensions = config.get("matryoshka_dimensions")
    if isinstance(dimensions, list) and dimensions and all(isinstance(each, int) for each in dimensions):
        return tuple(sorted(dimensions))
    return () if config.get("is_matryoshka") is True else None
