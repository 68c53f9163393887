"""Work counted in calls, where seconds would tell of the machine."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import FrameType


def num_calls(of: Callable[[], object], *, of_c: bool = False) -> int:
    """Calls of Python functions that ``of`` makes, a generator's next ones included; with ``of_c`` of C's, too.

    The garbage collector stands still meanwhile: the finalizers of what other tests left would be counted.
    """
    events = ("call", "c_call") if of_c else ("call",)
    count = 0

    def called(_frame: FrameType, event: str, _argument: object) -> None:
        nonlocal count
        count += event in events

    before, collects = sys.getprofile(), gc.isenabled()
    gc.disable()
    sys.setprofile(called)
    try:
        of()
    finally:
        sys.setprofile(before)
        if collects:
            gc.enable()
    return count
