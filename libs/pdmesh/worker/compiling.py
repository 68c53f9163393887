"""Grammars that are being compiled: what is drawn under them waits, and nothing else does."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import anyio
import anyio.to_thread
import structlog

log = structlog.get_logger()

#: Compiled at once. One that takes long does not keep others waiting; more would take the engine's cores.
NUM_THREADS = 2


class GrammarCompiler:
    """Compiles grammars on threads of their own. ``wake`` is called whenever one is ready."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._compiling: set[str] = set()
        self._new: list[str] = []
        self._has_new = anyio.Event()

    @property
    def is_idle(self) -> bool:
        """Whether all that has begun is ready."""
        return not self._compiling

    def begin(self, grammar: str) -> None:
        """Compile a grammar, unless it is empty or being compiled already. One that is compiled is ready soon."""
        if grammar and grammar not in self._compiling:
            self._compiling.add(grammar)
            self._new.append(grammar)
            self._has_new.set()

    def is_ready(self, grammar: str) -> bool:
        """Whether nothing has to wait for a grammar."""
        return grammar not in self._compiling

    async def run(self, compile: Callable[[str], None]) -> None:
        """Compile what comes by the blocking ``compile``, until cancelled."""
        limiter = anyio.CapacityLimiter(NUM_THREADS)

        async def one(grammar: str) -> None:
            try:
                await anyio.to_thread.run_sync(partial(compile, grammar), abandon_on_cancel=True, limiter=limiter)
            except Exception:  # the step that draws under it will say so
                log.exception("a grammar could not be compiled")
            self._compiling.discard(grammar)
            self._wake()

        async with anyio.create_task_group() as tasks:
            while True:
                new, self._new = self._new, []
                for grammar in new:
                    tasks.start_soon(one, grammar)
                if not new:
                    self._has_new = anyio.Event()
                    await self._has_new.wait()
