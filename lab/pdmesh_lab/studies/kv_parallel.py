"""A context's KV spread over several instances: how much each holds, and when one more is taken on.

Mnemosyne §4.4: new tokens go to the newest member until that holds as much as one may, then another is taken on. What
one may hold is the least of a set number and of what its decode can read within the target for a token, so a context
grows at the pace of its target however long it gets. Members hold ranges of the context, in its order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class KvSpread(NamedTuple):
    """How many tokens of one context each member holds, in the order of the context; none but the last has room."""

    limit_tokens: int
    shares: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens of the context."""
        return sum(self.shares)

    def grown_to(self, num_tokens: int) -> KvSpread:
        """Return the spread of a longer context, with as many further members as it takes."""
        left = num_tokens - sum(self.shares)
        shares = list(self.shares)
        if shares:
            taken = min(left, self.limit_tokens - shares[-1])
            shares[-1] += taken
            left -= taken
        while left > 0:
            shares.append(min(left, self.limit_tokens))
            left -= shares[-1]
        return KvSpread(self.limit_tokens, tuple(shares))

    def part_of(self, member: int) -> tuple[int, int]:
        """Return which tokens, from the first to behind the last, have to be computed again if ``member`` is lost."""
        start = sum(self.shares[:member])
        return start, start + self.shares[member]


def limit_tokens(step_s: Callable[[int], float], slo_tpot_s: float, max_kv_tokens_per_instance: int) -> int:
    """Return the most tokens of one context that a member may hold, in steps of ``step_s`` by how many it holds.

    0 if even an empty one would miss the target: then spreading does not help.
    """
    low, high = 0, max_kv_tokens_per_instance
    if step_s(high) <= slo_tpot_s:
        return high
    while low < high - 1:
        middle = (low + high) // 2
        if step_s(middle) <= slo_tpot_s:
            low = middle
        else:
            high = middle
    return low
