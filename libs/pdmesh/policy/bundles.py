"""The named bundles."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from pdmesh.errors import ConfigError
from pdmesh.policy.base import Bundle, PolicyConfig
from pdmesh.policy.order import Fcfs
from pdmesh.policy.packing import StaticChunks
from pdmesh.policy.placement import Freeness, LeastQueuedTokens


def _fcfs(config: PolicyConfig) -> Bundle:
    return Bundle(
        name="fcfs",
        order=Fcfs(),
        packing=StaticChunks(config.chunk_tokens),
        prefill_placement=LeastQueuedTokens(),
        decode_placement=Freeness(),
    )


BUNDLES: Mapping[str, Callable[[PolicyConfig], Bundle]] = MappingProxyType({"fcfs": _fcfs})


def make_bundle(name: str, config: PolicyConfig) -> Bundle:
    """Build the bundle called ``name``. Raises ConfigError if there is none."""
    build = BUNDLES.get(name)
    if build is None:
        raise ConfigError(f"no policy bundle is called {name!r}: use one of {', '.join(sorted(BUNDLES))}")
    return build(config)
