"""Orders."""

from __future__ import annotations

import random

import pytest

from pdmesh.errors import ConfigError
from pdmesh.policy.bundles import BUNDLE_NAMES, STUDIED, installed_bundles, make_bundle
from pdmesh.policy.config import PolicyConfig
from pdmesh_lab.studies.bundles import BUNDLES as STUDIES
from pdmesh_testing.core import a_request


def test_studies_build_all_that_is_asked_of_them() -> None:
    assert tuple(sorted(STUDIES)) == STUDIED


def test_a_bundle_of_a_paper_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdmesh.policy.bundles.LABORATORY", "pdmesh_nowhere")
    with pytest.raises(ConfigError, match=r"'medha' of a paper is not installed: run `pip install 'pdmesh\[lab\]'`"):
        make_bundle("medha", PolicyConfig())
    assert set(installed_bundles()) == set(BUNDLE_NAMES) - set(STUDIED)


@pytest.mark.parametrize("bundle", BUNDLE_NAMES)
def test_a_key_stays_as_it_is_for_as_long_as_its_order_says(bundle: str) -> None:
    rng, order = random.Random(0), make_bundle(bundle, PolicyConfig()).order
    num_cached = num_moved = 0
    for number in range(300):
        began_s = rng.choice((0.0, 1e3, 1.7e9))
        request = a_request(f"r{number}", prompt=int(rng.lognormvariate(7, 2)) + 1, arrival_s=began_s)
        rank = order.rank(request, 0, rng.choice((None, began_s + 1)))
        until_s = order.keeps_key_until_s(rank)
        times_s = [began_s + rng.uniform(0, 30) for _ in range(20)] + [until_s - 1e-6, until_s + 2e-3]
        keys = {now_s: order.keys([rank], now_s)[0] for now_s in times_s if abs(now_s) < 1e12}
        kept = {key for now_s, key in keys.items() if now_s < until_s}
        assert len(kept) <= 1
        num_cached += bool(kept)
        num_moved += any(key not in kept for key in keys.values())
        assert [keys[now_s] for now_s in sorted(keys)] == sorted(keys.values(), reverse=True)  # none ever grows
    assert num_cached == (0 if bundle in ("lars", "medha") else 300)
    assert num_moved == (300 if bundle in ("lars", "medha", "pdmesh") else 0)
