"""Grammars that are being compiled. Only draws under such a grammar wait."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import anyio
import anyio.to_thread
import structlog

log = structlog.get_logger()

#: Number of grammars compiled at once. With two, a slow one does not delay others; more would take the engine's cores.
NUM_THREADS = 2


class GrammarCompiler:
    """Compiler of grammars on separate threads. ``wake`` is called whenever a grammar is ready."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._compiling: set[str] = set()
        self._new: list[str] = []
        self._has_new = anyio.Event()

    @property
    def is_idle(self) -> bool:
        """Whether no grammar is being compiled."""
        return not self._compiling

    def begin(self, grammar: str) -> None:
        """Compile a grammar, unless it is empty or being compiled already. Compiling again is fast."""
        if grammar and grammar not in self._compiling:
            self._compiling.add(grammar)
            self._new.append(grammar)
            self._has_new.set()

    def is_ready(self, grammar: str) -> bool:
        """Whether a grammar is not being compiled, so that tokens can be drawn under it."""
        return grammar not in self._compiling

    async def run(self, compile: Callable[[str], None]) -> None:
        """Compile grammars by the blocking ``compile``, until cancelled. A failure shows in the step that draws."""
        limiter = anyio.CapacityLimiter(NUM_THREADS)

        async def one(grammar: str) -> None:
            try:
                await anyio.to_thread.run_sync(partial(compile, grammar), abandon_on_cancel=True, limiter=limiter)
            except Exception:
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
