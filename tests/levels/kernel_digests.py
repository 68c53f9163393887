"""Print digests of what a library of CPU kernels computes: of every function, for bf16 and float16, as JSON.

    python kernel_digests.py LIBRARY [LIBGOMP]

Needs the standard library alone, so that an emulated Python can run it. Inputs are drawn by integers and exact
divisions, and are the same everywhere.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import json
import random
import struct
import sys
from array import array
from collections.abc import Callable, Iterator
from typing import Any

NUM_TOKENS, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, NUM_BLOCKS, START = 7, 4, 2, 24, 5, 40, 180
NUM_INPUTS, NUM_OUTPUTS, ROW_SIZE, VOCAB_SIZE = 288, 96, 55, 1003

#: Of magnitude below one, then some of other magnitudes: small ones are subnormal in float16.
SCALES = (1.0, 1.0, 1.0, 1.0, 64.0, 2.0**-16)


class Inputs:
    """Values of one format, two bytes each."""

    def __init__(self, pack: Callable[[float], bytes]) -> None:
        self._pack = pack
        self._random = random.Random(20261123)

    def draw(self, count: int, scales: tuple[float, ...] = SCALES) -> array[int]:
        """``count`` values of both signs."""
        values = array("H")
        for _ in range(count):
            number = self._random.randrange(-(2**15), 2**15) / 2**15
            values.frombytes(self._pack(number * scales[self._random.randrange(len(scales))]))
        return values


def digests(library: ctypes.CDLL, suffix: str, inputs: Inputs, num_threads: int) -> Iterator[tuple[str, str]]:
    """Names of functions, and what became of their outputs."""

    def call(name: str, *arguments: array[Any] | float, results: list[array[Any]]) -> tuple[str, str]:
        function = library[name]
        function.restype = None
        function(*(passed(argument) for argument in arguments))
        return name, hashlib.sha256(b"".join(result.tobytes() for result in results)).hexdigest()[:16]

    weight, packed = inputs.draw(NUM_OUTPUTS * NUM_INPUTS), array("H", bytes(2 * NUM_OUTPUTS * NUM_INPUTS))
    yield call("pdmesh_pack_linear", weight, packed, NUM_OUTPUTS, NUM_INPUTS, results=[packed])
    for num_rows in (1, 3, 8, 37):
        rows, bias = inputs.draw(num_rows * NUM_INPUTS), inputs.draw(NUM_OUTPUTS)
        output = array("H", bytes(2 * num_rows * NUM_OUTPUTS))
        name, digest = call(
            f"pdmesh_linear{suffix}", rows, packed, bias, output, 0, num_rows, NUM_OUTPUTS, NUM_INPUTS, num_threads,
            results=[output],
        )  # fmt: skip
        yield f"{name}, {num_rows} rows", digest
        wide = array("f", bytes(4 * num_rows * NUM_OUTPUTS))
        name, digest = call(
            f"pdmesh_linear{suffix}", rows, packed, bias, wide, 1, num_rows, NUM_OUTPUTS, NUM_INPUTS, num_threads,
            results=[wide],
        )  # fmt: skip
        yield f"{name}, {num_rows} rows in fp32", digest

    for bits, group_size, has_minima in ((4, 32, True), (5, 16, False), (6, 16, False), (8, 64, True)):
        codes = array("B", (value & ((1 << bits) - 1) for value in inputs.draw(NUM_OUTPUTS * NUM_INPUTS)))
        stored = array("B", bytes(len(codes) * bits // 8))
        name, digest = call("pdmesh_pack_codes", codes, stored, bits, NUM_OUTPUTS, NUM_INPUTS, results=[stored])
        yield f"{name}, {bits} bits{suffix}", digest
        num_factors = NUM_OUTPUTS * -(-NUM_INPUTS // group_size)
        bases, multipliers = inputs.draw(num_factors), array("b", (number % 127 for number in range(num_factors)))
        base_type = 1 if suffix else 0
        scales = [address(bases), base_type, 1, address(multipliers), 0, 0]
        minima = [address(bases) if has_minima else 0, base_type, 1, 0, 0, 0]
        packed_weight = array("q", [address(stored), bits, int(bits == 8 or not has_minima), group_size])
        packed_weight.extend([*scales, *minima, 0])
        for num_rows in (1, 3, 37):
            rows, bias = inputs.draw(num_rows * NUM_INPUTS), inputs.draw(NUM_OUTPUTS)
            output = array("H", bytes(2 * num_rows * NUM_OUTPUTS))
            name, digest = call(
                f"pdmesh_linear_packed{suffix}", rows, packed_weight, bias, output, 0, num_rows, NUM_OUTPUTS,
                NUM_INPUTS, num_threads,
                results=[output],
            )  # fmt: skip
            yield f"{name}, {bits} bits, {num_rows} rows", digest
        numbers = array("f", bytes(4 * 5 * NUM_INPUTS))
        name, digest = call(
            "pdmesh_unpack_codes", packed_weight, array("q", [0, 31, 32, 77, 95]), numbers, 5, NUM_INPUTS,
            results=[numbers],
        )  # fmt: skip
        yield f"{name}, {bits} bits{suffix}", digest

    # Numbers that are no integers: floats of 8 bits, and those of a table, whose scales are numbers of another.
    table = array("f", (number / 7 - 1 for number in range(16)))
    offsets, scale_table = (array("f", (number / 300 for number in range(count))) for count in (NUM_OUTPUTS, 256))
    for bits, kind, group_size in ((8, 3, 32), (4, 4, 32)):
        codes = array("B", (value & ((1 << bits) - 1) for value in inputs.draw(NUM_OUTPUTS * NUM_INPUTS)))
        stored = array("B", bytes(len(codes) * bits // 8))
        name, digest = call("pdmesh_pack_codes", codes, stored, bits, NUM_OUTPUTS, NUM_INPUTS, results=[stored])
        yield f"{name}, kind {kind}{suffix}", digest
        num_factors = NUM_OUTPUTS * -(-NUM_INPUTS // group_size)
        scale_bases = array("f", (number % 17 / 64 for number in range(num_factors)))
        multipliers = array("b", (number % 127 for number in range(num_factors)))
        nested = [address(multipliers), address(scale_table), address(offsets)] if kind == 4 else [0, 0, 0]
        no_minima = [0, 0, 1, 0, 0, 0]
        packed_weight = array(
            "q",
            [address(stored), bits, kind, group_size, address(scale_bases), 2, 1, *nested, *no_minima, address(table)],
        )
        for num_rows in (1, 3, 37):
            rows, bias = inputs.draw(num_rows * NUM_INPUTS), inputs.draw(NUM_OUTPUTS)
            output = array("H", bytes(2 * num_rows * NUM_OUTPUTS))
            name, digest = call(
                f"pdmesh_linear_rounded{suffix}", rows, packed_weight, bias, output, 0, num_rows, NUM_OUTPUTS,
                NUM_INPUTS, num_threads,
                results=[output],
            )  # fmt: skip
            yield f"{name}, kind {kind}, {num_rows} rows", digest
        numbers = array("f", bytes(4 * 5 * NUM_INPUTS))
        name, digest = call(
            "pdmesh_unpack_codes", packed_weight, array("q", [0, 31, 32, 77, 95]), numbers, 5, NUM_INPUTS,
            results=[numbers],
        )  # fmt: skip
        yield f"{name}, kind {kind}{suffix}", digest

    count = NUM_TOKENS * ROW_SIZE
    hidden, delta, norm = (
        array("f", (number % 201 / 64 - 1 for number in range(first, first + length)))
        for first, length in ((0, count), (77, count), (5, ROW_SIZE))
    )
    normed = array("H", bytes(2 * count))
    yield call(
        f"pdmesh_add_norm{suffix}", hidden, delta, norm, normed, NUM_TOKENS, ROW_SIZE, 1e-6, num_threads,
        results=[hidden, normed],
    )  # fmt: skip
    cases: tuple[tuple[int, array[Any]], ...] = ((0, inputs.draw(count)), (1, hidden))
    for is_wide, rows in cases:
        of_rows: array[Any] = array(rows.typecode, bytes(rows.itemsize * count))
        name, digest = call(
            f"pdmesh_norm{suffix}", rows, is_wide, norm, of_rows, NUM_TOKENS, ROW_SIZE, 1e-6, num_threads,
            results=[of_rows],
        )  # fmt: skip
        yield f"{name}, {'fp32' if is_wide else 'narrow'}", digest
    gated = array("H", bytes(2 * count))
    yield call(
        f"pdmesh_gated_silu{suffix}", inputs.draw(2 * count), gated, NUM_TOKENS, ROW_SIZE, num_threads, results=[gated]
    )

    query = inputs.draw(NUM_TOKENS * (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM)
    cache = inputs.draw(NUM_BLOCKS * 2 * NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM, scales=(1.0,))
    angles = NUM_TOKENS * HEAD_DIM // 2
    slots = array("q", range(START, START + NUM_TOKENS))
    stride = (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM
    yield call(
        f"pdmesh_rotate_and_store{suffix}", query, stride, inputs.draw(angles), inputs.draw(angles), slots, cache,
        NUM_TOKENS, NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM, num_threads,
        results=[query, cache],
    )  # fmt: skip
    gates = inputs.draw(len(query))
    yield call(
        f"pdmesh_norm_heads{suffix}", gates, stride, norm, NUM_TOKENS, NUM_HEADS, HEAD_DIM, 1e-6, num_threads,
        results=[gates],
    )  # fmt: skip
    gated = inputs.draw(NUM_TOKENS * NUM_HEADS * HEAD_DIM)
    yield call(
        f"pdmesh_gate{suffix}", gated, gates, stride, NUM_TOKENS, NUM_HEADS * HEAD_DIM, num_threads, results=[gated]
    )
    attended = array("H", bytes(2 * NUM_TOKENS * NUM_HEADS * HEAD_DIM))
    sums = array("H", bytes(4 * NUM_TOKENS * NUM_HEADS))  # of fp32
    for window, cap in ((0, 0.0), (150, 2.5)):
        name, digest = call(
            f"pdmesh_attention{suffix}", query, (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM, cache, attended, 0, sums,
            array("q", [0, NUM_TOKENS, START, 0, START + NUM_TOKENS]), 1, array("q", range(NUM_BLOCKS)),
            NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM, HEAD_DIM**-0.5, window, cap, num_threads,
            results=[attended, sums],
        )  # fmt: skip
        yield f"{name}, window {window}", digest
    # Of one key-value head; the first is beyond a segment of keys that is attended to apart.
    for head_dim, group, start, num_tokens in ((8, 3, 2060, 2), (64, 7, 130, 1), (80, 1, 40, 9)):
        num_blocks = -(-(start + num_tokens) // BLOCK_SIZE)
        query = inputs.draw(num_tokens * group * head_dim)
        cache = inputs.draw(num_blocks * 2 * BLOCK_SIZE * head_dim, scales=(1.0,))
        attended, sums = array("H", bytes(2 * len(query))), array("H", bytes(4 * num_tokens * group))
        name, digest = call(
            f"pdmesh_attention{suffix}", query, group * head_dim, cache, attended, 0, sums,
            array("q", [0, num_tokens, start, 0, start + num_tokens]), 1, array("q", range(num_blocks)),
            group, 1, 1, BLOCK_SIZE, head_dim, head_dim**-0.5, 0, 0.0, num_threads,
            results=[attended, sums],
        )  # fmt: skip
        yield f"{name}, {head_dim} dims", digest

    # Two ranges: all rows see the first, some rows see the second.

    def floats(count: int, divisor: float = 2**12) -> array[float]:
        return array("f", (number / divisor for number in inputs.draw(count)))

    merged, log_sums = array("H", bytes(2 * NUM_TOKENS * NUM_HEADS * HEAD_DIM)), floats(NUM_TOKENS * NUM_HEADS)
    parts = [(floats(len(merged)), floats(len(log_sums)), array("q", rows)) for rows in (range(NUM_TOKENS), (1, 3, 4))]
    fields = array("q")
    for outputs, sums_of_part, rows_of_part in parts:
        fields.extend([address(outputs), address(sums_of_part), address(rows_of_part), len(rows_of_part)])
        fields.append(rows_of_part[0])
    yield call(
        f"pdmesh_merge{suffix}", fields, len(parts), merged, log_sums, NUM_TOKENS, NUM_HEADS, HEAD_DIM, num_threads,
        results=[merged, log_sums],
    )  # fmt: skip

    logits = array("f", (number / 2**12 - 8 for number in inputs.draw(8 * VOCAB_SIZE)))
    rows = array("q", (address(logits) + 4 * VOCAB_SIZE * row for row in range(8)))
    settings = array("d")
    for row, (temperature, num_steps, top_k, top_p) in enumerate(
        itertools.product((0.7, 1.0), (8192, 300), (40, VOCAB_SIZE), (0.95,))
    ):
        settings.extend([temperature, num_steps, top_k, top_p, 7919 * row, -104729 * row])
    weights, tokens = array("d", (1 / (1 + step) for step in range(8193))), array("q", bytes(8 * 8))
    name, digest = call("pdmesh_draw", rows, settings, weights, tokens, 8, VOCAB_SIZE, num_threads, results=[tokens])
    yield f"{name}{suffix}", digest
    highest, top_ids = array("f", bytes(4 * 8 * 20)), array("q", bytes(8 * 8 * 20))
    name, digest = call(
        "pdmesh_top", logits, highest, top_ids, 8, VOCAB_SIZE, 20, num_threads, results=[highest, top_ids]
    )
    yield f"{name}{suffix}", digest
    allowed = array("B", (number & 255 for number in inputs.draw(-(-VOCAB_SIZE // 8))))
    name, digest = call("pdmesh_keep_allowed", logits, allowed, VOCAB_SIZE, results=[logits])
    yield f"{name}{suffix}", digest
    seen = array("i", (number % VOCAB_SIZE for number in inputs.draw(100)))
    name, digest = call("pdmesh_penalize_repetition", logits, seen, 100, VOCAB_SIZE, 1.3, results=[logits])
    yield f"{name}{suffix}", digest

    # 71 tokens, in two tiles. One key head, two heads of 20 values; states behind three tokens and behind all.
    num_channels, num_taps = 2 * 16 + 2 * 20, 3
    size = 2 * 16 * 20 + (num_taps - 1) * num_channels
    for is_additive in (0, 1):
        products = inputs.draw(71 * (40 + num_channels + (2 if is_additive else 4)))
        results = array("H", bytes(2 * 71 * 40))
        taps, rates, shift, norm, *states = (
            floats(count, 2**16) for count in (num_taps * num_channels, 2, 2, 40, size, size, size)
        )
        stops = array("q", [3, address(states[1]), 71, address(states[2])])
        name, digest = call(
            f"pdmesh_delta_net{suffix}", products, array("q", [0, 71, address(states[0]), 0, 2]), 1, stops, results, 71,
            taps, taps if is_additive else 0, array("f", map(abs, rates)), shift, norm, shift if is_additive else 0,
            num_taps, 1, 2, 16, 20, is_additive, 0, 1e-6, num_threads,
            results=[results, *states],
        )  # fmt: skip
        yield f"{name}, {'additive' if is_additive else 'delta'}", digest


def address(values: array[Any]) -> int:
    return values.buffer_info()[0]


def passed(argument: array[Any] | float) -> object:
    """The argument as C takes it: an address, a 64-bit integer, or an fp32 number."""
    if isinstance(argument, array):
        return ctypes.c_void_p(address(argument))
    return ctypes.c_float(argument) if isinstance(argument, float) else ctypes.c_int64(argument)


def bfloat16(value: float) -> bytes:
    """The upper half of the fp32 number."""
    return struct.pack("<f", value)[2:]


def main() -> None:
    path, *openmp = sys.argv[1:]
    for each in openmp:
        ctypes.CDLL(each, mode=ctypes.RTLD_GLOBAL)
    library = ctypes.CDLL(path)
    found = {
        f"{name}, {num_threads} threads": digest
        for num_threads in (1, 2)
        for suffix, pack in {"": bfloat16, "_f16": lambda value: struct.pack("<e", value)}.items()
        for name, digest in digests(library, suffix, Inputs(pack), num_threads)
    }
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
