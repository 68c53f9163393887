"""Attention in ranges through windows: what attention as a whole gives, the same bits whoever holds which range."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pdmesh.engine.attention import AttentionOutput, PartialBackend, QuerySpan, TorchAttention
from pdmesh.engine.levels import load_library, processor_levels
from pdmesh.engine.merging import RangeResult, load_merge_kernel, merge_by_torch, merge_kernel
from pdmesh.engine.native import NativeAttention
from pdmesh.engine.ranged_attention import RangedAttention
from pdmesh.engine.tiled_attention import TiledAttention
from pdmesh.kv.remote_kv import RangeQuestion
from pdmesh.kv_layout import KvLayout
from pdmesh_testing.examples import examples

pytestmark = pytest.mark.usefixtures("one_thread")

HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE, SCALE = 4, 2, 32, 16, 0.3
CPU = torch.device("cpu")


class Case(NamedTuple):
    """Rows from ``start`` on, of a sequence whose ranges have so many tokens; others hold ``num_elsewhere`` of them."""

    range_tokens: int
    window: int | None
    start: int
    num_tokens: int
    num_elsewhere: int

    @property
    def end(self) -> int:
        return self.start + self.num_tokens

    @property
    def seen(self) -> list[int]:
        """The ranges elsewhere of which a row sees any, told one key after the other."""
        first = 0 if self.window is None else max(0, self.start - self.window + 1)
        return sorted({key // self.range_tokens for key in range(first, self.num_elsewhere * self.range_tokens)})


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Windows and rows whose ends lie at those of ranges, and around them; kernels divide the longest ones again."""
    size = draw(st.sampled_from([16, 32, 64, 144, 256, 4112]))
    near = st.builds(lambda ranges, more: max(1, ranges * size + more), st.integers(0, 3), st.integers(-2, 2))
    window = draw(st.one_of(st.none(), near, st.integers(1, 3 * size)))
    start = draw(st.one_of(near, st.integers(0, 4 * size)))
    num_tokens = draw(st.one_of(st.just(1), near, st.integers(1, 2 * size)))
    return Case(size, window, start, min(600, num_tokens), draw(st.integers(0, start // size)))


def backends(layout: KvLayout, window: int | None, score_cap: float | None) -> list[PartialBackend]:
    """Return the backends that promise bits. Dot kernels have neither windows nor score caps."""
    if layout.dtype == "float32":
        return [TiledAttention(layout, SCALE, score_cap)]
    levels = [level for level in processor_levels() if level.is_ordered or window is score_cap is None]
    libraries = [library for level in levels if (library := load_library(level)) is not None]
    if not libraries:
        pytest.skip("no kernels: built without a compiler")
    return [NativeAttention(library, layout, SCALE, score_cap) for library in libraries]


@dataclass(slots=True)
class HeldHere:
    """`RemoteKv` of ranges that lie in one cache; in other blocks than the sequence's own."""

    attention: RangedAttention
    cache: Tensor
    window: int | None
    tables: Sequence[Sequence[int]]
    asked: list[int] = field(default_factory=list[int])
    question: RangeQuestion | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.tables) * self.attention.range_tokens

    def ask(self, question: RangeQuestion, *, more: bool = False) -> None:
        self.question = question
        self.asked = list(range(question.first_range, len(self.tables)))

    def answers(self) -> list[bytes]:
        assert self.question is not None
        _, start, query, first = self.question
        rows = torch.frombuffer(bytearray(query), dtype=self.cache.dtype).view(-1, HEADS, HEAD_DIM)
        return [
            self.attention.attend_part(
                rows, start - number * self.attention.range_tokens, self.cache, self.tables[number], self.window
            )
            for number in range(first, len(self.tables))
        ]


@settings(deadline=None, max_examples=examples(120))
@given(
    case=cases(),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    score_cap=st.sampled_from([None, 1.5]),
    seed=st.integers(0, 2**32),
)
def test_who_holds_a_range_that_a_window_ends_in_changes_no_bit(
    case: Case, dtype: str, score_cap: float | None, seed: int
) -> None:
    layout = KvLayout(num_layers=1, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, block_size=BLOCK_SIZE, dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    num_blocks = -(-case.end // BLOCK_SIZE)
    shape = num_blocks, 2, KV_HEADS, BLOCK_SIZE, HEAD_DIM
    cache = torch.randn(shape, generator=generator).to(getattr(torch, dtype))
    query = torch.randn(case.num_tokens, HEADS, HEAD_DIM, generator=generator).to(cache.dtype)
    table = torch.randperm(num_blocks, generator=generator).tolist()
    span = QuerySpan(0, case.num_tokens, case.start, table)
    expected = (
        TorchAttention(layout, SCALE, CPU, score_cap)
        .plan([span])
        .attend(query.float(), cache.float(), window=case.window, with_lse=True)
    )

    merge = merge_by_torch if dtype == "float32" else (merge_kernel() or merge_by_torch)
    for backend in backends(layout, case.window, score_cap):
        ranged = RangedAttention(backend, case.range_tokens, BLOCK_SIZE, merge)

        def attended(spans: Sequence[QuerySpan], ranged: RangedAttention = ranged) -> AttentionOutput:
            return ranged.plan(spans).attend(query, cache, window=case.window, with_lse=True)

        alone = attended([span])
        assert alone.lse is not None
        assert expected.lse is not None
        tolerance = 1e-4 if dtype == "float32" else 2e-2
        torch.testing.assert_close(alone.output.float(), expected.output, atol=tolerance, rtol=tolerance)
        # Dot kernels sum the weights as they multiply them, rounded to bf16.
        tolerance = 1e-4 if dtype == "float32" else 4e-3
        torch.testing.assert_close(alone.lse, expected.lse, atol=tolerance, rtol=tolerance)

        blocks = case.range_tokens // BLOCK_SIZE
        tables = [table[number * blocks : (number + 1) * blocks] for number in range(case.num_elsewhere)]
        elsewhere = HeldHere(ranged, cache, case.window, tables)
        own = table[case.num_elsewhere * blocks :]
        held = QuerySpan(0, case.num_tokens, case.start, own, elsewhere=elsewhere if tables else None)
        cut = case.num_tokens // 3
        chunks = [QuerySpan(0, cut, case.start, table)] if cut else []
        chunks.append(QuerySpan(cut, case.num_tokens - cut, case.start + cut, table))
        for spans in ([held], chunks):
            found = attended(spans)
            assert torch.equal(found.output, alone.output)
            assert torch.equal(torch.as_tensor(found.lse), alone.lse)
        assert elsewhere.asked == case.seen


@settings(deadline=None, max_examples=examples(40))
@given(
    num_rows=st.integers(1, 40),
    num_parts=st.integers(1, 5),
    shape=st.tuples(st.integers(1, 5), st.sampled_from([8, 24, 64])),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
    seed=st.integers(0, 2**32),
)
def test_kernels_merge_as_torch_does_with_the_same_bits_at_every_level(
    num_rows: int, num_parts: int, shape: tuple[int, int], dtype: torch.dtype, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    parts: list[RangeResult] = []
    for number in range(num_parts):
        size = num_rows if number == 0 else int(torch.randint(1, num_rows + 1, (), generator=generator))
        rows = torch.randperm(num_rows, generator=generator)[:size].sort().values
        first = int(torch.randint(0, int(rows[0]) + 1, (), generator=generator))
        lse = 20 * torch.randn(num_rows - first, shape[0], generator=generator)
        if number:
            lse[torch.rand(lse.shape, generator=generator) < 0.2] = -torch.inf
        parts.append(RangeResult(rows.numpy(), first, torch.randn(*lse.shape, shape[1], generator=generator), lse))
    query = torch.empty(num_rows, *shape, dtype=dtype)
    expected = merge_by_torch(parts, query, with_lse=True)
    kernels = [load_merge_kernel(level) for level in processor_levels() if level.is_ordered]
    found = [kernel(parts, query, with_lse=True) for kernel in kernels if kernel is not None]
    if not found:
        pytest.skip("no kernels: built without a compiler")
    for each in found:
        torch.testing.assert_close(each.output, expected.output, atol=1e-5, rtol=1e-2)
        torch.testing.assert_close(each.lse, expected.lse, atol=1e-5, rtol=1e-5)
        assert torch.equal(each.output, found[0].output)
        assert torch.equal(torch.as_tensor(each.lse), torch.as_tensor(found[0].lse))


@settings(deadline=None, max_examples=examples(60))
@given(
    case=cases(), others=st.lists(cases(), max_size=3), score_cap=st.sampled_from([None, 1.5]), seed=st.integers(0, 99)
)
def test_torch_attends_to_parts_as_to_all(case: Case, others: list[Case], score_cap: float | None, seed: int) -> None:
    """Without promised bits, in batches of unlike sequences: `TorchAttention` groups their decodes."""
    layout = KvLayout(num_layers=1, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, block_size=BLOCK_SIZE, dtype="float32")
    generator = torch.Generator().manual_seed(seed)
    spans: list[QuerySpan] = []
    row = block = 0
    for each in (case, *others):
        num_blocks = -(-each.end // BLOCK_SIZE)
        spans.append(QuerySpan(row, each.num_tokens, each.start, list(range(block, block + num_blocks))))
        row, block = row + each.num_tokens, block + num_blocks
    cache = torch.randn(block, 2, KV_HEADS, BLOCK_SIZE, HEAD_DIM, generator=generator)
    query = torch.randn(row, HEADS, HEAD_DIM, generator=generator)
    whole = TorchAttention(layout, SCALE, CPU, score_cap)
    ranged = RangedAttention(whole, case.range_tokens, BLOCK_SIZE)
    expected = whole.plan(spans).attend(query, cache, window=case.window, with_lse=True)
    found = ranged.plan(spans).attend(query, cache, window=case.window, with_lse=True)
    torch.testing.assert_close(found.output, expected.output, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found.lse, expected.lse, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("window", [None, 80])
def test_a_decode_behind_a_range_sees_no_more_beside_a_longer_one(window: int | None) -> None:
    """Torch computes both together, over as many blocks as the longer one has."""
    layout = KvLayout(num_layers=1, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, block_size=BLOCK_SIZE, dtype="float32")
    generator = torch.Generator().manual_seed(1)
    cache = torch.randn(8, 2, KV_HEADS, BLOCK_SIZE, HEAD_DIM, generator=generator)
    query = torch.randn(2, HEADS, HEAD_DIM, generator=generator)
    behind, longer = QuerySpan(0, 1, 100, [0, 1, 2], num_keys=40), QuerySpan(1, 1, 60, [4, 5, 6, 7])
    plan = TorchAttention(layout, SCALE, CPU).plan
    alone, _ = plan([behind]).attend(query, cache, window=window, wide=True)
    together, _ = plan([behind, longer]).attend(query, cache, window=window, wide=True)
    torch.testing.assert_close(together[0], alone[0])


@pytest.mark.parametrize("window", [1, 17, 64, 65])
def test_rows_that_see_nothing_of_a_range_are_answered_with_nothing(window: int) -> None:
    """Of 100 behind a range of 64, the first window - 1 see its end, and the others add nothing."""
    layout = KvLayout(num_layers=1, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, block_size=BLOCK_SIZE, dtype="float32")
    generator = torch.Generator().manual_seed(1)
    cache = torch.randn(4, 2, KV_HEADS, BLOCK_SIZE, HEAD_DIM, generator=generator)
    query = torch.randn(100, HEADS, HEAD_DIM, generator=generator)
    answer = RangedAttention(TiledAttention(layout, SCALE), 64, BLOCK_SIZE).attend_part(
        query, 64, cache, [2, 0, 3, 1], window
    )
    values = torch.frombuffer(bytearray(answer), dtype=torch.float32)
    output, lse = values[: query.numel()].view(query.shape), values[query.numel() :].view(100, HEADS)
    assert lse[: window - 1].isfinite().all()
    assert (lse[window - 1 :] == -torch.inf).all()
    assert not output[window - 1 :].any()
