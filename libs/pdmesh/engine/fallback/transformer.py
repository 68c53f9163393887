"""The forward pass through transformers' modules."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from pdmesh.engine.attention import AttentionPlan
from pdmesh.engine.base import LayerHook
from pdmesh.engine.fallback.fallback_attention import Attended, passing
from pdmesh.engine.kernels import store_heads
from pdmesh.engine.linear import PlainLinear
from pdmesh.engine.model_config import UndescribedModel
from pdmesh.engine.transformer_model import StepInputs, wipe_rests


class ModuleTransformer:
    """`pdmesh.engine.forward.Decoder` for a model without a description here.

    All tokens of a step go through the layers as one row, whatever their sequences. Positions are given explicitly, and
    only attention, which is ours, looks at other tokens.
    """

    def __init__(self, model: UndescribedModel, modules: Any) -> None:
        self._model = model
        self._layers = modules.base_model
        # The same modules without the layers. They score hidden states, with the model's own scales and caps.
        self._head = copy.copy(modules)
        scoring = modules.get_output_embeddings()
        self._head._modules = {
            name: _Scores(scoring) if module is scoring else module for name, module in modules._modules.items()
        } | {modules.base_model_prefix: _Given()}

    def forward(
        self, inputs: StepInputs, caches: Sequence[Tensor], attention: AttentionPlan, on_layer: LayerHook | None
    ) -> Tensor:
        """Return hidden states (num_tokens, hidden_size) after the last norm, and write the tokens' keys and values."""
        with passing(_Step(self._model, inputs, caches, attention, on_layer)):
            output = self._layers(
                input_ids=inputs.token_ids[None], position_ids=inputs.positions[None], use_cache=False
            )
        hidden: Tensor = output.last_hidden_state[0]
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        scores: Tensor = self._head(inputs_embeds=hidden[None], use_cache=False).logits[0].float()
        return scores

    def last_norm(self, hidden: Tensor) -> Tensor:
        return hidden


class _Output(BaseModelOutputWithPast):
    """Output of layers with the optional fields that heads may read, all None."""

    cross_attentions = None
    router_logits = None


class _Given(nn.Module):
    """Replacement of a model's layers that returns the given hidden states."""

    @property
    def decoder(self) -> nn.Module:
        """The replacement itself. OPT names its layers ``decoder``."""
        return self

    def forward(self, *unused: Any, inputs_embeds: Tensor, **also_unused: Any) -> _Output:
        return _Output(last_hidden_state=inputs_embeds)


class _Scores(nn.Module):
    """The last product of a model, with results in fp32."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self._linear = linear

    def forward(self, rows: Tensor) -> Tensor:
        scores = PlainLinear(self._linear.weight, None)(rows.flatten(0, -2), wide=True)
        scores = scores if self._linear.bias is None else scores + self._linear.bias
        return scores.view(*rows.shape[:-1], -1)


class _Step:
    """A step's pass through the layers. ``_number`` is the next layer's number."""

    def __init__(
        self,
        model: UndescribedModel,
        inputs: StepInputs,
        caches: Sequence[Tensor],
        attention: AttentionPlan,
        on_layer: LayerHook | None,
    ) -> None:
        self._model = model
        self._inputs = inputs
        self._caches = caches
        self._attention = attention
        self._on_layer = on_layer
        self._number = 0

    def attend(self, call: Attended) -> Tensor:
        number, self._number = self._number, self._number + 1
        cache = self._caches[number]
        wipe_rests(cache, self._inputs)
        store_heads(cache, self._inputs.slots, call.key[0].transpose(0, 1), call.value[0].transpose(0, 1))
        if self._on_layer is not None:
            self._on_layer(number)
        query = call.query[0].transpose(0, 1)
        return self._attention.attend(query, cache, window=self._model.layers[number].window).output[None]
