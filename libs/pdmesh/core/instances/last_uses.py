"""Last uses of an instance's cached granules, by tenant and session, for a scheduler that does not know them.

An instance notes the user of each request that ends, and reports these users when it registers. A report lists granules
in the order of their use, so neighbours mostly have one user. Only the *runs* are reported: pairs of the index where a
run begins and the number of its user.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from typing import Final

from pdmesh.core.instances.kept_chains import KeptChains
from pdmesh.kv_layout import GRANULE_TOKENS
from pdmesh.model import CacheUser, LastUse, LastUses, PrefixHash, PrefixHashes

#: Number that stands for no user.
NO_USER: Final = -1

#: Most granules of all beginnings that `last_turns` returns.
MAX_CHAINED: Final = 1 << 18

#: Evicted granules are forgotten when twice the cached ones and this many are remembered.
_SPARE: Final = 64


class _Use:
    """The end of a request, at ``ended_s``."""

    # Not a dataclass: mypyc would leave __init__ to the interpreter.
    def __init__(self, user: CacheUser, num_prompt_tokens: int, ended_s: float) -> None:
        self.user = user
        self.num_prompt_tokens = num_prompt_tokens
        self.ended_s = ended_s


class UseLog:
    """The last uses of one instance's cached granules."""

    def __init__(self) -> None:
        self._uses: dict[PrefixHash, _Use] = {}

    def __len__(self) -> int:
        return len(self._uses)

    def ended(
        self, user: CacheUser | None, granules: Iterable[PrefixHash], num_prompt_tokens: int, now_s: float
    ) -> None:
        """Note the end of a request with these granules; without effect if it has no user."""
        if user is not None:
            self._uses.update(dict.fromkeys(granules, _Use(user, num_prompt_tokens, now_s)))

    def forget(self, kept: Container[PrefixHash], num_cached: int) -> None:
        """Forget granules that are not among the ``num_cached`` cached ones, if there are many."""
        if len(self._uses) > 2 * num_cached + _SPARE:
            self._uses = {granule: use for granule, use in self._uses.items() if granule in kept}

    def report(self, kept: Iterable[PrefixHash], now_s: float) -> LastUses:
        """Return the last uses of ``kept``, in the order of their first granules, and the runs."""
        uses: list[LastUse] = []
        numbers: dict[int, int] = {}
        runs: list[tuple[int, int]] = []
        number = NO_USER
        for index, granule in enumerate(kept):
            use, last = self._uses.get(granule), number
            if use is None:
                number = NO_USER
            elif (known := numbers.get(id(use))) is not None:
                number = known
            else:
                number = numbers[id(use)] = len(uses)
                uses.append(LastUse(use.user, use.num_prompt_tokens, max(0.0, now_s - use.ended_s)))
            if number != last:
                runs.append((index, number))
        return tuple(uses), tuple(runs)


def last_uses(num_granules: int, reported: LastUses) -> list[LastUse | None]:
    """Return the last use of each of the reported granules; None where it is unknown."""
    uses, runs = reported
    begins = dict(runs)
    found: list[LastUse | None] = []
    use: LastUse | None = None
    for index in range(num_granules):
        if (number := begins.get(index)) is not None:
            use = uses[number] if 0 <= number < len(uses) else None
        found.append(use)
    return found


def last_turns(
    chains: KeptChains, uses: Sequence[LastUse | None], most: int = MAX_CHAINED
) -> list[tuple[LastUse, PrefixHashes]]:
    """Return the last use by each session, with the cached beginning of its prompt, the earliest use first.

    The beginnings have ``most`` granules together at most. Beyond, the beginnings of earlier uses are empty.
    """
    ends: list[tuple[LastUse, int]] = []
    seen: set[int] = set()
    for index, use in enumerate(uses):
        if use is None or use.user.session is None or id(use) in seen:
            continue
        seen.add(id(use))
        ends.append((use, index))
    ends.sort(key=_ago_s)
    found: list[tuple[LastUse, PrefixHashes]] = []
    for use, index in reversed(ends):
        most -= chains.depths[index]
        chain = chains.chain(index) if most >= 0 else ()
        found.append((use, chain[: (use.num_prompt_tokens - 1) // GRANULE_TOKENS]))
    found.reverse()
    return found


def _ago_s(end: tuple[LastUse, int]) -> float:
    return -end[0].ago_s
