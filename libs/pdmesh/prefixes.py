"""Hashes of token sequences, granule by granule, which show without tokens what beginnings requests share.

Each hash is made of the previous hash and the `GRANULE_TOKENS` tokens of its granule; the first one of a *root*. Equal
hashes mean equal tokens from the first on, and equal roots: the same model, weights, tenant and salt. The hashes are
keyed by the mesh's token. Without the token, no hash can be made or traced to a text.
"""

from __future__ import annotations

import hashlib

from pdmesh.kv_layout import GRANULE_TOKENS
from pdmesh.model import PrefixHash, PrefixHashes

HASH_BYTES = 16

_GRANULE_BYTES = 4 * GRANULE_TOKENS  # packed token ids: see `pdmesh.wire.messages.pack_token_ids`


class PrefixHasher:
    """Maker of a mesh's hashes, keyed by the mesh token."""

    def __init__(self, mesh_token: str) -> None:
        key = hashlib.blake2b(mesh_token.encode(), person=b"pdmesh prefix").digest()
        self._root = hashlib.blake2b(key=key, digest_size=HASH_BYTES, person=b"root")
        self._granule = hashlib.blake2b(key=key, digest_size=HASH_BYTES, person=b"granule")

    def root(self, *facts: bytes) -> bytes:
        """Return the root of all sequences that share these facts, in this order."""
        hasher = self._root.copy()
        for fact in facts:
            hasher.update(len(fact).to_bytes(8, "little") + fact)
        return hasher.digest()

    def granules(self, last: bytes, tokens: bytes) -> PrefixHashes:
        """Return the hashes of the full granules in packed ``tokens``, which follow the granule with hash ``last``.

        At the beginning of a sequence, ``last`` is the root.
        """
        hashes: list[PrefixHash] = []
        for start in range(0, len(tokens) - _GRANULE_BYTES + 1, _GRANULE_BYTES):
            hasher = self._granule.copy()
            hasher.update(last + tokens[start : start + _GRANULE_BYTES])
            last = PrefixHash(hasher.digest())
            hashes.append(last)
        return tuple(hashes)
