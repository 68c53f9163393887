"""Conversations on a mesh with the stand-in engine, beside a hostile key. No test looks at times."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdmesh_testing import hostile_names
from pdmesh_testing.live_agents import cached_share
from pdmesh_testing.mesh import running_mesh

pytestmark = [pytest.mark.anyio, pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]


async def test_hostile_names_take_no_cached_kv_from_another_key(tmp_path: Path) -> None:
    own = hostile_names.settings(tmp_path)
    with running_mesh(tmp_path, model=None, prefill=0, decode=0, mixed=1, settings=own) as mesh:
        async with mesh.client() as ours, mesh.client() as hostile:
            load = hostile_names.Load(ours, hostile)
            await load.hostile_before(100)
            turns = await load.round(12.0, is_named=True)
    assert hostile_names.num_lost(turns) == 0
    assert cached_share(turns) > 0.5
