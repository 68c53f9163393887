"""The thread that the engine lives on, and how many cores it may use."""

from __future__ import annotations

from pdmesh.host import num_usable_cores
from pdmesh.kv.gate import Wakeup
from pdmesh.threads import CallThread


def fair_num_threads(num_threads: int, num_ranks: int = 1) -> int:
    """Return ``num_threads``, or for 0 a rank's share of half of the process's cores.

    The other pool's instance gets the rest.
    """
    return num_threads or max(1, num_usable_cores() // 2 // num_ranks)


class EngineThread(CallThread):
    """Runs blocking calls one after the other on one thread of its own.

    Always the same thread, because native thread pools and device contexts belong to the thread that made them.
    """

    def __init__(self, name: str = "engine") -> None:
        super().__init__(name)
        self.wakeup = Wakeup()  #: for calls that wait for something
