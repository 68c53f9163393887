"""The engine's thread, and the number of cores that it may use."""

from __future__ import annotations

from pdmesh.host import num_usable_cores
from pdmesh.kv.gate import Wakeup
from pdmesh.threads import CallThread


def fair_num_threads(num_threads: int, num_ranks: int = 1) -> int:
    """Return ``num_threads``, or for 0 a rank's share of half of the process's cores.

    The other half is for an instance of the other pool.
    """
    return num_threads or max(1, num_usable_cores() // 2 // num_ranks)


class EngineThread(CallThread):
    """A thread that runs blocking calls one after the other. ``wakeup`` is for calls that wait.

    All calls run on one thread, because native thread pools and device contexts belong to the thread that made them.
    """

    def __init__(self, name: str = "engine") -> None:
        super().__init__(name)
        self.wakeup = Wakeup()
