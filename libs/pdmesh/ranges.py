"""Ranges of numbers: marks on the types of fields, which msgspec checks wherever it decodes a number.

``num_tokens: Annotated[int, COUNT]`` is a field of a frozen dataclass or struct. Marks cost nothing when code makes a
value. Values from a file or another process are checked as they are decoded.
"""

from __future__ import annotations

import sys
from typing import Annotated

from msgspec import Meta

_MAX = sys.float_info.max  # excludes infinity; NaN is in no range

ANY_COUNT = Meta(ge=0)
COUNT = Meta(ge=1)
SECONDS = Meta(ge=0.0, le=_MAX)
FINITE = Meta(ge=-_MAX, le=_MAX)
KV_RISK = Meta(ge=1e-6, le=0.5)  # the score, a quantile of a normal distribution, is infinite at 0

#: Types of settings.
AnyCount = Annotated[int, ANY_COUNT]
Count = Annotated[int, COUNT]
Port = Annotated[int, Meta(ge=0, le=65535)]
Share = Annotated[float, Meta(ge=0.0, le=1.0)]
Amount = Annotated[float, SECONDS]
Rate = Annotated[float, Meta(ge=1.0, le=_MAX)]
Duration = Annotated[float, Meta(ge=1e-3, le=_MAX)]
