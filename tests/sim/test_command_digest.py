"""The core decides as it did when the digests of `benchmarks/simulation/command_digest.py` were taken."""

from __future__ import annotations

import hashlib
import json
import runpy
from pathlib import Path

import pytest

from pdmesh.policy.bundles import BUNDLE_NAMES

SCRIPT = Path(__file__).parents[2] / "benchmarks/simulation/command_digest.py"


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("bundle", BUNDLE_NAMES)
def test_random_workloads_give_the_commands_of_before(bundle: str, every: bool) -> None:
    """All 200 workloads, too: of the first 40 alone, none saw what 586f690 decides otherwise."""
    known = json.loads(SCRIPT.with_suffix(".json").read_text())
    ((name, digest),) = runpy.run_path(str(SCRIPT))["digests"]([bundle], None, None, every=every)
    assert digest == known[name], f"{name}: another digest than the baseline's"


def test_plans_of_an_epoch_that_was_started_again_are_taken_for_those_of_the_same_one_sent_again() -> None:
    """No gateway of ours sends one twice to a scheduler. A worker drops what does not follow, and the core goes on."""
    runpy.run_path(str(SCRIPT))["RandomWorkload"](176, "tetris", hashlib.sha256()).run()
