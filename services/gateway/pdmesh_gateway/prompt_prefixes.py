"""Prefix hashes of prompts, which a gateway sends along so that computed KV can be reused.

Only a gateway has all inputs of a hash: the tokens, their tenant, and the salt of the request.
"""

from __future__ import annotations

from dataclasses import dataclass

import anyio.to_thread

from pdmesh.engine.files import ModelInfo
from pdmesh.kv_layout import GRANULE_TOKENS
from pdmesh.model import PrefixHashes, SamplingParams
from pdmesh.prefixes import PrefixHasher

#: Longer prompts are hashed on a thread: this many bytes take a millisecond or two.
INLINE_BYTES = 4 * 64 * 1024


@dataclass(frozen=True, slots=True)
class PromptPrefix:
    """Hashes of a prompt, and the state to continue them over its output.

    With an empty ``root`` no KV of the prompt is reused or cached. ``tail`` has the packed tokens after the last full
    granule. ``weights`` is the identity of the weights that compute the KV.
    """

    hasher: PrefixHasher
    root: bytes
    granules: PrefixHashes = ()
    tail: bytes = b""
    weights: str = ""

    def with_output(self, output: bytes) -> PrefixHashes:
        """Return the hashes of prompt and output, which is packed; empty for a prompt without hashes."""
        if not self.root:
            return ()
        last = self.granules[-1] if self.granules else self.root
        return self.granules + self.hasher.granules(last, self.tail + output)


class Prefixes:
    """Maker of the hashes of one gateway's prompts.

    ``sharing`` is `GatewayConfig.prefix_reuse`: it determines which requests share KV. ``facts`` describe the served
    model.
    """

    def __init__(self, mesh_token: str, sharing: str, info: ModelInfo, *facts: str) -> None:
        self._hasher = PrefixHasher(mesh_token)
        self._sharing = sharing
        self._info = info
        self._facts = (info.fingerprint, *(fact.encode() for fact in facts))
        self.none = PromptPrefix(self._hasher, b"")

    async def of(
        self, prompt: bytes, params: SamplingParams, *, tenant: str, salt: str, weights: str = ""
    ) -> PromptPrefix:
        """Return the hashes of a prompt of packed tokens.

        The result is empty if reuse is off, if log-probabilities of the prompt are requested, or if the prompt is
        longer than `ModelInfo.max_fixed_rope_tokens`. ``weights`` is the identity of the weights that compute the KV. A
        salt is hashed in addition to the tenant and never replaces the tenant.
        """
        root = self._root(len(prompt) // 4, params, tenant, salt, weights)
        if not root:
            return self.none
        if len(prompt) <= INLINE_BYTES:
            granules = self._hasher.granules(root, prompt)
        else:
            granules = await anyio.to_thread.run_sync(self._hasher.granules, root, prompt)
        return PromptPrefix(self._hasher, root, granules, prompt[4 * GRANULE_TOKENS * len(granules) :], weights)

    def _root(self, num_tokens: int, params: SamplingParams, tenant: str, salt: str, weights: str) -> bytes:
        if self._sharing == "off" or params.prompt_logprobs is not None:
            # Log-probabilities of the prompt require computing all of the prompt.
            return b""
        most = self._info.max_fixed_rope_tokens
        if most is not None and num_tokens > most:
            return b""
        owner = tenant if self._sharing == "tenant" else ""
        whose = (weights, self._sharing, owner, salt)
        return self._hasher.root(*self._facts, *(word.encode("utf-8", "surrogatepass") for word in whose))
