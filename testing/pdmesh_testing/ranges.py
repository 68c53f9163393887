"""Spread contexts on engines without instances: each engine holds a range. For tests of the computed attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pdmesh.engine.runner import TorchEngine
from pdmesh.kv.remote_kv import RangeQuestion
from pdmesh_testing.stepping import SteppedRequest

RANGE_TOKENS = 64


@dataclass(slots=True)
class HeldByEngines:
    """Ranges of one sequence on other engines, each in blocks of its own."""

    members: Sequence[tuple[TorchEngine, list[int]]]
    asked: list[RangeQuestion] = field(default_factory=list[RangeQuestion])

    @property
    def num_tokens(self) -> int:
        return len(self.members) * RANGE_TOKENS

    def ask(self, question: RangeQuestion, *, more: bool = False) -> None:
        self.asked.append(question)

    def answers(self) -> list[bytes]:
        question = self.asked[-1]
        return [
            engine.attend_part(number, blocks, question)
            for number, (engine, blocks) in enumerate(self.members)
            if number >= question.first_range
        ]


def spread(request: SteppedRequest, engines: Sequence[TorchEngine], first_block: int = 0) -> None:
    """Move the full computed ranges of a request to other engines, into blocks from ``first_block`` on.

    The last range stays on the first engine. Ranges that moved before stay on their engines.
    """
    table, home, before = request.sequence.block_table, engines[0], request.sequence.elsewhere
    size, layout = RANGE_TOKENS // home.kv.layout.block_size, home.kv.layout
    num_parts = request.num_computed // RANGE_TOKENS
    members: list[tuple[TorchEngine, list[int]]] = [*before.members] if isinstance(before, HeldByEngines) else []
    for number in range(len(members), num_parts):
        blocks, member = table[:size], engines[1 + number % (len(engines) - 1)]
        taken = [first_block + number * size + index for index in reversed(range(size))]
        for layer in range(layout.num_layers):
            data = memoryview(bytearray(size * layout.max_page_bytes))
            home.kv.gather(layer, blocks, data)
            member.kv.scatter(layer, taken, data)
            # Blocks that must not be read any more.
            home.kv.scatter(layer, blocks, memoryview(bytearray(b"\x7e") * len(data)))
        members.append((member, taken))
        del table[:size]
    if members:
        request.sequence.elsewhere = HeldByEngines(members)
