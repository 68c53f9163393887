"""Readers of request traces, which become arrivals for the simulator and for benchmarks.

Four shapes are told apart by their first row:

* Azure 2023 CSV: ``TIMESTAMP,ContextTokens,GeneratedTokens``;
* BurstGPT CSV: ``Timestamp`` (s), ``Request tokens``, ``Response tokens``, other columns ignored;
* Mooncake JSONL: ``timestamp`` (ms), ``input_length``, ``output_length`` and perhaps ``hash_ids``, one for each 512
  tokens, which name the common beginnings of prompts; vLLM's timed-trace data sets have the same shape;
* our own JSONL: the fields of `pdmesh_lab.sim.workload.Arrival`.

An invalid row raises an error with file and line.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, replace
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from pdmesh.errors import ConfigError
from pdmesh.kv_layout import GRANULE_TOKENS
from pdmesh_lab.sim.workload import Arrival

#: Tokens in the block that one of Mooncake's ``hash_ids`` names.
MOONCAKE_BLOCK_TOKENS = 512


class TraceError(ConfigError):
    """The trace cannot be read; the message names the file and the line."""


_Row = Mapping[str, Any]


def read_trace(path: Path, *, limit: int | None = None) -> list[Arrival]:
    """Return the first ``limit`` requests of a trace, in order of arrival, the first at 0 s. Raises TraceError."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = _csv_rows(path, file) if path.suffix == ".csv" else _json_rows(path, file)
            arrivals = list(islice(rows, limit))
    except OSError as error:
        raise TraceError(f"cannot read the trace {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise TraceError(f"the trace {path} is not UTF-8 text: {error.reason} at byte {error.start}") from error
    if not arrivals:
        raise TraceError(f"the trace {path} has no rows")
    arrivals.sort(key=lambda arrival: arrival.arrival_s)
    start_s = arrivals[0].arrival_s
    return [replace(arrival, arrival_s=arrival.arrival_s - start_s) for arrival in arrivals]


# --- CSV ---


def _csv_rows(path: Path, lines: Iterator[str]) -> Iterator[Arrival]:
    reader = csv.DictReader(lines)
    header = set(reader.fieldnames or ())
    read = next((read for columns, read in _CSV_SHAPES if columns <= header), None)
    if read is None:
        raise TraceError(
            f"{path}:1: no known trace format has the columns {', '.join(reader.fieldnames or ()) or '(none)'}"
        )
    while True:
        try:
            row = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            raise TraceError(f"{path}:{reader.line_num}: {error}") from error
        yield _checked(path, reader.line_num, row, read)


def _azure(row: _Row) -> Arrival:
    # The fraction has seven digits, one more than datetime reads. There is no zone: any one does for differences.
    moment, _, fraction = str(row["TIMESTAMP"]).partition(".")
    since_epoch = datetime.fromisoformat(moment) - datetime(1970, 1, 1)
    return Arrival(
        arrival_s=since_epoch.total_seconds() + float(f"0.{fraction or 0}"),
        num_prompt_tokens=_whole(row, "ContextTokens"),
        num_output_tokens=_whole(row, "GeneratedTokens"),
    )


def _burst_gpt(row: _Row) -> Arrival:
    return Arrival(
        arrival_s=_number(row, "Timestamp"),
        num_prompt_tokens=_whole(row, "Request tokens"),
        num_output_tokens=_whole(row, "Response tokens"),
    )


_CSV_SHAPES: tuple[tuple[frozenset[str], Callable[[_Row], Arrival]], ...] = (
    (frozenset({"TIMESTAMP", "ContextTokens", "GeneratedTokens"}), _azure),
    (frozenset({"Timestamp", "Request tokens", "Response tokens"}), _burst_gpt),
)


# --- JSON lines ---


def _json_rows(path: Path, lines: Iterator[str]) -> Iterator[Arrival]:
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                row = json.loads(line)
            except ValueError as error:
                raise TraceError(f"{path}:{number}: not JSON: {error}") from error
            if not isinstance(row, dict):
                raise TraceError(f"{path}:{number}: not a JSON object")
            yield _checked(path, number, row, _mooncake if "timestamp" in row else _own)


def _mooncake(row: _Row) -> Arrival:
    return Arrival(
        arrival_s=_number(row, "timestamp") / 1e3,
        num_prompt_tokens=_whole(row, "input_length"),
        num_output_tokens=_whole(row, "output_length"),
        granules=_granules(row),
    )


def _granules(row: _Row) -> tuple[int, ...] | None:
    """Return the numbers of a prompt's granules; None without ``hash_ids``.

    Each hash names a block of tokens and all tokens before the block. Full granules of a partial last block are
    numbered, too. These numbers equal another prompt's only if that prompt ends in the same block.
    """
    if (hash_ids := row.get("hash_ids")) is None:
        return None
    num_tokens, per_block = _whole(row, "input_length"), MOONCAKE_BLOCK_TOKENS // GRANULE_TOKENS
    if not isinstance(hash_ids, list) or not all(isinstance(each, int) and each >= 0 for each in hash_ids):
        raise ValueError("hash_ids must be a list of whole numbers")
    if len(hash_ids) != -(-num_tokens // MOONCAKE_BLOCK_TOKENS):
        raise ValueError(f"{len(hash_ids)} hash_ids for {num_tokens} tokens: must be one for each 512")
    numbers = (per_block * each + part for each in hash_ids for part in range(per_block))
    return tuple(islice(numbers, num_tokens // GRANULE_TOKENS))


def _own(row: _Row) -> Arrival:
    unknown = set(row) - {field.name for field in fields(Arrival)}
    if unknown:
        raise ValueError(f"unknown field {min(unknown)}")
    return msgspec.convert(row, Arrival)


# --- all ---


def _whole(row: _Row, name: str) -> int:
    try:
        return int(str(row[name]))
    except ValueError:
        raise ValueError(f"{name} is {row[name]!r}: must be a whole number") from None


def _number(row: _Row, name: str) -> float:
    try:
        return float(str(row[name]))
    except ValueError:
        raise ValueError(f"{name} is {row[name]!r}: must be a number") from None


def _checked(path: Path, number: int, row: _Row, read: Callable[[_Row], Arrival]) -> Arrival:
    where = f"{path}:{number}"
    try:
        arrival = read(row)
    except KeyError as error:
        raise TraceError(f"{where}: {error.args[0]} is missing") from error
    except (ValueError, TypeError, OverflowError) as error:  # includes msgspec's ValidationError
        raise TraceError(f"{where}: {error}") from error
    if not math.isfinite(arrival.arrival_s):
        raise TraceError(f"{where}: the arrival time is {arrival.arrival_s} s: must be finite")
    if arrival.num_prompt_tokens < 1 or arrival.num_output_tokens < 1:
        raise TraceError(
            f"{where}: {arrival.num_prompt_tokens} prompt and {arrival.num_output_tokens} output tokens: "
            "each must be at least 1"
        )
    if arrival.max_tokens is not None and arrival.max_tokens < arrival.num_output_tokens:
        raise TraceError(
            f"{where}: {arrival.num_output_tokens} output tokens are more than max_tokens, {arrival.max_tokens}"
        )
    for name, slo_s in (("slo_ttft_s", arrival.slo_ttft_s), ("slo_tpot_s", arrival.slo_tpot_s)):
        if slo_s is not None and not 0 < slo_s < math.inf:
            raise TraceError(f"{where}: {name} is {slo_s}: must be above 0")
    return arrival
