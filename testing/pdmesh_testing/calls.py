"""Work counted in calls, because seconds would depend on the machine."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import FrameType


def num_calls(of: Callable[[], object], *, of_c: bool = False) -> int:
    """Return how many calls of Python functions ``of`` makes, with each resumption of a generator.

    With ``of_c``, calls of C functions count, too. The garbage collector is off meanwhile: finalizers of other tests'
    objects would be counted.
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
