"""The tables of docs/results/papers.md, by the key of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from pdmesh_lab.papers import (
    agents_rows,
    ebplus_rows,
    medha_rows,
    mnemosyne_rows,
    pecsched_rows,
    tetris_rows,
    topology_rows,
)

Cells = Sequence[str]


class Section(NamedTuple):
    """A table of the page. ``rows`` simulates and yields the rows; ``is_fast``: within some seconds."""

    heads: Cells
    rows: Callable[[], Iterator[Cells]]
    is_fast: bool = False


SECTIONS: Mapping[str, Section] = {
    "threshold": Section(ebplus_rows.THRESHOLD_HEADS, ebplus_rows.thresholds, is_fast=True),
    "prompts": Section(ebplus_rows.PROMPT_HEADS, ebplus_rows.prompt_lengths),
    "hazard": Section(ebplus_rows.HAZARD_HEADS, ebplus_rows.hazards),
    "modes-rtx": Section(ebplus_rows.REGIME_HEADS, partial(ebplus_rows.regimes, ebplus_rows.RTX)),
    "modes-h200": Section(ebplus_rows.REGIME_HEADS, partial(ebplus_rows.regimes, ebplus_rows.H200)),
    "pools-rtx": Section(ebplus_rows.POOL_HEADS, partial(ebplus_rows.pools, ebplus_rows.RTX)),
    "medha": Section(medha_rows.HEADS, medha_rows.schedulers),
    "mnemosyne": Section(mnemosyne_rows.HEADS, mnemosyne_rows.parallelism, is_fast=True),
    "tetris": Section(tetris_rows.HEADS, tetris_rows.first_tokens),
    "tetris-loads": Section(tetris_rows.LOAD_HEADS, tetris_rows.loads),
    "pecsched": Section(pecsched_rows.HEADS, pecsched_rows.claims),
    "topology": Section(topology_rows.HEADS, topology_rows.topologies),
    "agents": Section(agents_rows.HEADS, agents_rows.named_and_unnamed),
}
