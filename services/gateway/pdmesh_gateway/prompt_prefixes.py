"""What of prompts may be computed once and used again: the hashes that a gateway sends with them.

A gateway alone has all that goes into a hash: the tokens, whose they are, and the salt that came with them.
"""

from __future__ import annotations

from dataclasses import dataclass

import anyio.to_thread

from pdmesh.engine.files import ModelInfo
from pdmesh.model import GRANULE_TOKENS, PrefixHashes, SamplingParams
from pdmesh.prefixes import PrefixHasher

#: More are hashed on a thread: so many tokens take a millisecond or two.
INLINE_BYTES = 4 * 64 * 1024


@dataclass(frozen=True, slots=True)
class PromptPrefix:
    """The hashes of a prompt, and what those of its output are made of."""

    hasher: PrefixHasher
    root: bytes  # empty: none of its KV is used again, or kept
    granules: PrefixHashes = ()
    tail: bytes = b""  # the packed tokens behind the last full granule
    weights: str = ""  # identity of the weights that compute the KV

    def with_output(self, output: bytes) -> PrefixHashes:
        """Return the hashes of prompt and output; ``output`` is packed."""
        if not self.root:
            return ()
        last = self.granules[-1] if self.granules else self.root
        return self.granules + self.hasher.granules(last, self.tail + output)


class Prefixes:
    """Makes the hashes of one gateway's prompts.

    ``sharing`` is `GatewayConfig.prefix_reuse`: which requests share KV. ``facts`` are about the model, as it is
    served.
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
        """Return the hashes of a prompt of packed tokens; none where KV that others computed would not do.

        ``weights`` is the identity of the weights that compute the KV. A salt is mixed in beside the tenant, and never
        stands for it.
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
        if self._sharing == "off" or params.prompt_logprobs is not None:  # these come from computing all of the prompt
            return b""
        most = self._info.max_fixed_rope_tokens
        if most is not None and num_tokens > most:
            return b""
        owner = tenant if self._sharing == "tenant" else ""
        whose = (weights, self._sharing, owner, salt)
        return self._hasher.root(*self._facts, *(word.encode("utf-8", "surrogatepass") for word in whose))
