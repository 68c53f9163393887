"""A cache whose reads of others can be looked at, held, and changed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import anyio.to_thread

from pdmesh.kv.sharing import HostCache, PeerCache
from pdmesh.kv_layout import IndexRange, KvLayout
from pdmesh_testing.kv import ByteStore


@dataclass
class Hooked:
    """A peer's cache; ``before`` and ``after`` are called around each read."""

    cache: PeerCache
    before: Callable[[], object]
    after: Callable[[], object]

    def read(self, layers: IndexRange, theirs: Sequence[int], ours: Sequence[int]) -> None:
        self.before()
        self.cache.read(layers, theirs, ours)
        self.after()

    def close(self) -> None:
        self.cache.close()


class HookedStore(ByteStore):
    """A cache whose reads of others can be looked at, and held."""

    inline_bytes = 64 * 1024
    kind = b"host"

    def __init__(self, layout: KvLayout, num_blocks: int, *, seed: int | None = None) -> None:
        super().__init__(layout, num_blocks, seed=seed)
        self.before: Callable[[], object] = lambda: None
        self.after: Callable[[], object] = lambda: None
        self.num_staged = 0
        self._is_held, self._goes_on = threading.Event(), threading.Event()

    def hold(self) -> None:
        """Pause every later read, each on its own thread."""

        def before() -> None:
            self._is_held.set()
            assert self._goes_on.wait(20)

        self.inline_bytes, self.before = 0, before

    async def until_held(self) -> None:
        assert await anyio.to_thread.run_sync(self._is_held.wait, 20)

    def go_on(self) -> None:
        self.before = lambda: None
        self._goes_on.set()

    @property
    def inline_copy_bytes(self) -> int:
        return self.inline_bytes

    @property
    def shared(self) -> HostCache:
        store, plain = self, super().shared

        class HookedCache(HostCache):
            kind = store.kind

            def open(self, pid: int, described: bytes) -> PeerCache:  # type: ignore[override]
                return Hooked(super().open(pid, described), lambda: store.before(), lambda: store.after())

        return HookedCache(plain._layout, plain._num_blocks, plain._layer_addresses)

    def gather(self, layer: int, block_ids: Sequence[int], out: memoryview) -> None:
        self.num_staged += 1
        super().gather(layer, block_ids, out)

    def scatter(self, layer: int, block_ids: Sequence[int], data: memoryview) -> None:
        self.num_staged += 1
        super().scatter(layer, block_ids, data)
