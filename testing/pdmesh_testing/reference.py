"""What transformers computes for a checkpoint: the reference that the engine is held to. Imports transformers late."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple


class GreedyStep(NamedTuple):
    """A greedily taken token, its log-probability, and by how much its logit beat the next one's."""

    token_id: int
    logprob: float
    margin: float


class HfReference:
    """A checkpoint run by transformers in float32, with the KV cache that ``generate`` uses, on torch's ``device``.

    Of a GGUF file, transformers reads the header and dequantises the weights itself.
    """

    def __init__(self, checkpoint: Path, device: str = "cpu") -> None:
        import torch
        import transformers

        hf: Any = transformers
        hf.logging.disable_progress_bar()
        self._device = device
        is_gguf = checkpoint.suffix == ".gguf"
        directory = checkpoint.parent if is_gguf else checkpoint
        source = {"gguf_file": checkpoint.name} if is_gguf else {}
        config = hf.AutoConfig.from_pretrained(directory, **source)
        # only what computes attention step by step caps its scores
        attention = {"attn_implementation": "eager"} if getattr(config, "attn_logit_softcapping", None) else {}
        is_wrapped = config.architectures and config.architectures[0].endswith("ForConditionalGeneration")
        kind = getattr(hf, config.architectures[0]) if is_wrapped else hf.AutoModelForCausalLM
        model = kind.from_pretrained(directory, dtype=torch.float32, **attention, **source)
        self._model: Any = model.to(device).eval()

    def greedy(self, prompt_ids: Sequence[int], max_new_tokens: int) -> list[int]:
        """Return the greedy continuation; no token ends it."""
        return [step.token_id for step in self.greedy_steps(prompt_ids, max_new_tokens)]

    def greedy_steps(self, prompt_ids: Sequence[int], max_new_tokens: int) -> list[GreedyStep]:
        """Return the greedy continuation, with the log-probability and the margin of each step."""
        import torch

        self._forget()
        steps: list[GreedyStep] = []
        cache = None
        inputs = list(prompt_ids)
        with torch.inference_mode():
            for _ in range(max_new_tokens):
                ids = torch.tensor([inputs], device=self._device)
                output = self._model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
                cache = output.past_key_values
                logits = output.logits[0, -1]
                best, second = torch.topk(logits, 2).values.tolist()
                token_id = int(logits.argmax())
                logprob = float(torch.log_softmax(logits, -1)[token_id])
                steps.append(GreedyStep(token_id, logprob, best - second))
                inputs = [token_id]
        return steps

    def logprobs(self, token_ids: Sequence[int]) -> list[list[float]]:
        """Return the log-probabilities of every next token at each position, ``[position][token]``."""
        import torch

        self._forget()
        with torch.inference_mode():
            logits = self._model(torch.tensor([list(token_ids)], device=self._device)).logits[0]
            return torch.log_softmax(logits.double(), dim=-1).tolist()

    def embedding(self, token_ids: Sequence[int]) -> list[float]:
        """Return the hidden state of the last token, behind the last norm."""
        import torch

        self._forget()
        with torch.inference_mode():
            states = self._model.model(torch.tensor([list(token_ids)], device=self._device)).last_hidden_state
            embedding: list[float] = states[0, -1].double().tolist()
            return embedding

    def _forget(self) -> None:
        """Dynamic RoPE keeps the longest length seen across calls; every call here starts afresh."""
        base = self._model.base_model
        if getattr(base, "rotary_emb", None) is not None:
            base.rotary_emb = type(base.rotary_emb)(config=self._model.config)
