"""The share of one rank in an instance: the layers of its stage, its heads, and its part of each layer's outputs.

Linear layers are divided by outputs, never by inputs. A rank sums over all inputs in the same order as a single rank,
and ranks exchange finished values. Results therefore do not depend on the number of ranks. A stage passes on the last
layer's state unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from pdmesh.engine.model_config import DecoderShape, ExpertsConfig, ModelConfig, UndescribedModel
from pdmesh.errors import ConfigError
from pdmesh.kv_layout import IndexRange, PageShape

#: Layers' outputs are divided at multiples of this number, the width of the compiled kernels' panels. Layers with too
#: few outputs use a smaller one.
_PANEL_OUTPUTS = 32


def check_divisible(model: DecoderShape, num_ranks: int) -> None:
    """Raise ConfigError unless ``num_ranks`` ranks can share the model."""
    counts = sorted({model.page(layer).num_kv_heads for layer in model.layers if layer.attends})
    convolved = {model.page(layer).num_kv_heads for layer in model.layers if layer.conv is not None}

    def fits(number: int) -> bool:
        divides = all(kv_heads % number == 0 or number % kv_heads == 0 for kv_heads in counts)
        return divides and model.num_heads % number == 0 and all(heads % number == 0 for heads in convolved)

    if not fits(num_ranks):
        possible = [str(number) for number in range(1, model.num_heads + 1) if fits(number)]
        raise ConfigError(
            f"tensor_parallel_size is {num_ranks}, but the model has {model.num_heads} attention heads and "
            f"{' or '.join(map(str, counts))} key-value heads, which divide among {', '.join(possible)} ranks"
        )
    if num_ranks > 1 and not all(layer.delta is None and layer.latent is None for layer in model.layers):
        raise ConfigError(
            f"tensor_parallel_size is {num_ranks}, but states and latents of a {model.architecture} are not divided: "
            "set it to 1"
        )
    if num_ranks > 1 and isinstance(model, ModelConfig) and model.gates_attention:
        raise ConfigError(
            f"tensor_parallel_size is {num_ranks}, but gates of attention of a {model.architecture} are not divided: "
            "set it to 1"
        )
    _check_reads(model, "tensor_parallel_size", num_ranks)
    if num_ranks > 1 and isinstance(model, UndescribedModel):
        raise ConfigError(
            f"tensor_parallel_size is {num_ranks}, but transformers' own modules compute a {model.architecture} "
            "in one process: set it to 1"
        )


def _check_reads(model: DecoderShape, setting: str, number: int) -> None:
    """Raise ConfigError if several ranks or stages would divide layers that read other layers' KV or own embeddings."""
    if number > 1 and model.reads_across_layers:
        raise ConfigError(
            f"{setting} is {number}, but layers of a {model.architecture} read the KV of other layers or embeddings of "
            "their own, and are not divided: set it to 1"
        )


def check_stages(model: DecoderShape, num_stages: int) -> None:
    """Raise ConfigError unless each of ``num_stages`` stages can have a layer of the model."""
    _check_reads(model, "pipeline_parallel_size", num_stages)
    if num_stages > 1 and isinstance(model, UndescribedModel):
        raise ConfigError(
            f"pipeline_parallel_size is {num_stages}, but transformers' own modules compute a {model.architecture} "
            "in one process: set it to 1"
        )
    if num_stages > model.num_layers:
        raise ConfigError(
            f"pipeline_parallel_size is {num_stages}, but the model has {model.num_layers} layers: set it to "
            f"{model.num_layers} at most"
        )


@dataclass(frozen=True, slots=True)
class RankShare:
    """Share of rank ``rank`` of the ``num_ranks`` that compute the layers of stage ``stage`` of ``num_stages``."""

    rank: int = 0
    num_ranks: int = 1
    stage: int = 0
    num_stages: int = 1

    @property
    def is_whole(self) -> bool:
        """Whether the rank computes each of its layers alone."""
        return self.num_ranks == 1

    @property
    def of_all_ranks(self) -> list[RankShare]:
        """Shares of all ranks of the stage, by rank."""
        return [replace(self, rank=rank) for rank in range(self.num_ranks)]

    @property
    def is_first(self) -> bool:
        """Whether tokens enter in this stage."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether this stage computes the scores of tokens."""
        return self.stage == self.num_stages - 1

    def layers(self, num_layers: int) -> IndexRange:
        """Return the stage's part of ``num_layers``. The last one, with the vocabulary, has no more than others."""
        first, end = (-(-num_layers * stage // self.num_stages) for stage in (self.stage, self.stage + 1))
        return IndexRange(first, end)

    def config_of(self, model: ModelConfig) -> ModelConfig:
        """Return the configuration of a model of this share's size."""
        if self.is_whole:
            return model
        return replace(
            model,
            num_heads=self.heads(model).size,
            num_kv_heads=self.kv_heads(model).size,
            intermediate_size=self.outputs(model.intermediate_size).size,
            layers=tuple(
                replace(layer, experts=self._experts_of(layer.experts), page=layer.page and self.page_of(layer.page))
                for layer in model.layers
            ),
        )

    def rounds_as_one(self, model: ModelConfig) -> bool:
        """Return whether torch computes one rank's bits. Its loops treat a rest of fewer than 32 values otherwise."""
        sizes = (model.hidden_size, *model.inner_sizes, model.vocab_size)
        return self.is_whole or min(sizes) >= _PANEL_OUTPUTS * self.num_ranks

    def heads(self, model: ModelConfig) -> IndexRange:
        """Return the rank's attention heads."""
        return _equal_part(model.num_heads, self.rank, self.num_ranks)

    def kv_heads(self, model: ModelConfig) -> IndexRange:
        """Return the rank's key-value heads in layers with the model's number."""
        return self.kv_heads_of(model.num_kv_heads)

    def kv_heads_of(self, num_kv_heads: int) -> IndexRange:
        """Return the rank's part of key-value heads. If there are fewer than ranks, several ranks compute the same."""
        if num_kv_heads >= self.num_ranks:
            return _equal_part(num_kv_heads, self.rank, self.num_ranks)
        head = self.rank * num_kv_heads // self.num_ranks
        return IndexRange(head, head + 1)

    def page_of(self, page: PageShape) -> PageShape:
        """Return the rank's part of a layer's pages."""
        return page._replace(num_kv_heads=self.kv_heads_of(page.num_kv_heads).size)

    def half_channels(self, num_channels: int) -> IndexRange:
        """Return the rank's channels of a convolution in each half of ``num_channels``."""
        return _equal_part(num_channels // 2, self.rank, self.num_ranks)

    def outputs(self, num_outputs: int) -> IndexRange:
        """Return the rank's outputs of a layer with ``num_outputs``."""
        return self._outputs_of(self.rank, num_outputs)

    def widths(self, num_outputs: int) -> tuple[int, ...]:
        """Return each rank's number of outputs of a layer with ``num_outputs``."""
        return tuple(self._outputs_of(rank, num_outputs).size for rank in range(self.num_ranks))

    def _experts_of(self, experts: ExpertsConfig | None) -> ExpertsConfig | None:
        """Return a layer's experts with this rank's part of each; None for a layer without experts."""
        if experts is None:
            return None
        sizes = [self.outputs(size).size for size in (experts.intermediate_size, experts.shared_size)]
        return replace(experts, intermediate_size=sizes[0], shared_size=sizes[1])

    def _outputs_of(self, rank: int, num_outputs: int) -> IndexRange:
        panel = _PANEL_OUTPUTS
        while panel > 1 and num_outputs < panel * self.num_ranks:
            panel //= 2
        num_panels = -(-num_outputs // panel)
        first, end = (min(num_outputs, panel * (num_panels * part // self.num_ranks)) for part in (rank, rank + 1))
        return IndexRange(first, end)


#: Share of an instance with one rank: all of a model.
WHOLE = RankShare()


def _equal_part(number: int, rank: int, num_ranks: int) -> IndexRange:
    size = number // num_ranks
    return IndexRange(rank * size, (rank + 1) * size)
