"""The weights identity: a digest of the tensors, the adapter and the configuration that an instance loads.

Equal files in two folders have the same identity. Files of up to `WHOLE_BYTES` in total are read whole, so that one
changed byte gives another identity. For larger checkpoints, the digest covers the headers, the sizes and blocks of each
kind of tensor, at most `WHOLE_BYTES` of blocks. This is enough because a training step changes all or many tensors of a
kind. Torch-free.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar

from pdmesh.engine.files import weight_files
from pdmesh.engine.gguf.gguf_reader import read_header
from pdmesh.engine.json_files import read_json_object
from pdmesh.errors import ConfigError

#: Largest number of bytes of weights that are read, headers aside.
WHOLE_BYTES = 64 << 20

#: Size of a block that is read from a larger file.
BLOCK_BYTES = 64 << 10

#: Largest safetensors header. The library refuses larger ones, too.
_MAX_HEADER_BYTES = 100_000_000

#: Fields of ``config.json`` about a checkpoint's origin. They change no result.
_ORIGIN = ("_name_or_path", "transformers_version", "base_model_name_or_path", "inference_mode", "revision")

_DIGITS = re.compile(r"\d+")

_Item = TypeVar("_Item")


class _Span(NamedTuple):
    """A tensor's bytes in its file."""

    name: str
    start: int
    num_bytes: int


class _Contents(NamedTuple):
    """A file's header, and the places of its tensors."""

    header: bytes
    tensors: Sequence[_Span]


def weights_identity(directory: Path, *, lora: Path | None = None, has_random_weights: bool = False) -> str:
    """Return the identity of a checkpoint's weights and adapter: 32 hexadecimal digits.

    If the weights are drawn at random, only ``config.json`` counts. Blocking: some tens of milliseconds once the files
    are in the page cache. Raise ConfigError for files that cannot be read.
    """
    facts = [_facts_of(directory / "config.json")]
    if has_random_weights:
        return _joined(b"random", *facts)
    files = [files_digest(weight_files(directory))]
    if lora is not None:
        facts.append(_facts_of(lora / "adapter_config.json"))
        files.append(files_digest([lora / "adapter_model.safetensors"]))
    return _joined(b"files", *facts, *files)


@contextmanager
def unchanged_weights(directory: Path, *, lora: Path | None = None, has_random_weights: bool = False) -> Iterator[str]:
    """Yield the identity of the files that the block loads. Raise ConfigError if the files change inside the block."""
    before = weights_identity(directory, lora=lora, has_random_weights=has_random_weights)
    yield before
    if weights_identity(directory, lora=lora, has_random_weights=has_random_weights) != before:
        raise ConfigError(
            f"the weights in {directory} changed while they were loaded: start again once the files are complete"
        )


def stand_in_identity(*facts: str) -> str:
    """Return the identity of an engine without weights, from the facts that determine its tokens."""
    return _joined(b"stand-in", *(fact.encode() for fact in facts))


def files_digest(paths: Sequence[Path]) -> bytes:
    """Return a digest of the content of weight files, independent of their names and order.

    Above `WHOLE_BYTES` in total, only headers, sizes and samples of the tensors count. Raise ConfigError if a file
    cannot be read.
    """
    try:
        sizes = [path.stat().st_size for path in paths]
        if sum(sizes) <= WHOLE_BYTES:
            digests = [_digest_of_whole(path) for path in paths]
        else:
            contents = [_contents(path) for path in paths]
            digests = _digests_of_samples(paths, sizes, contents)
    except OSError as error:
        raise ConfigError(f"{error.filename} cannot be read: {error.strerror}") from error
    return b"".join(sorted(digests))


def _joined(*parts: bytes) -> str:
    digest = hashlib.blake2b(digest_size=16, person=b"pdmesh weights")
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


def _facts_of(path: Path) -> bytes:
    """Return the fields of a configuration that may change results, in a fixed order."""
    fields: Mapping[str, Any] = read_json_object(path)
    kept = {name: value for name, value in fields.items() if name not in _ORIGIN}
    return json.dumps(kept, sort_keys=True).encode()


def _digest_of_whole(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, _blake2b).digest()


def _blake2b() -> hashlib.blake2b:
    return hashlib.blake2b(digest_size=16)


def _digests_of_samples(paths: Sequence[Path], sizes: Sequence[int], contents: Sequence[_Contents]) -> list[bytes]:
    """Return each file's digest: of its header, its size, and the blocks that `_blocks` chooses of all files' tensors.

    Names of tensors of one kind differ only in numbers, such as the query projections of all layers.
    """
    kinds: dict[str, list[tuple[int, _Span]]] = {}
    for number, each in enumerate(contents):
        for tensor in each.tensors:
            kinds.setdefault(_DIGITS.sub("#", tensor.name), []).append((number, tensor))
    num_blocks = WHOLE_BYTES // BLOCK_BYTES
    chosen: list[list[tuple[int, int]]] = [[] for _ in paths]
    some_kinds = _spread([kinds[kind] for kind in sorted(kinds)], num_blocks)
    for tensors in some_kinds:
        for number, start, size in _blocks(tensors, num_blocks // len(some_kinds)):
            chosen[number].append((start, size))
    digests: list[bytes] = []
    for path, size, each, blocks in zip(paths, sizes, contents, chosen, strict=True):
        digest = _blake2b()
        digest.update(size.to_bytes(8, "little") + each.header)
        with path.open("rb") as file:
            for start, num_bytes in sorted(blocks):
                file.seek(start)
                digest.update(file.read(num_bytes))
        digests.append(digest.digest())
    return digests


def _blocks(tensors: Sequence[tuple[int, _Span]], num_blocks: int) -> Iterator[tuple[int, int, int]]:
    """Yield file, place and size of some ``num_blocks`` blocks: one per tensor, or several if tensors are few."""
    # Sort layers by number: text would put layer 9 after layer 39, and the last layer must be read.
    tensors = sorted(tensors, key=lambda item: _DIGITS.sub(lambda digits: digits[0].zfill(12), item[1].name))
    some = _spread(tensors, num_blocks)
    each = max(1, num_blocks // len(some))
    for number, tensor in some:
        most = -(-tensor.num_bytes // BLOCK_BYTES)
        # A tensor's name chooses its block, so that not all tensors are read at their beginnings.
        first = int.from_bytes(hashlib.blake2b(tensor.name.encode(), digest_size=8).digest(), "little")
        for index in range(min(each, most)):
            block = (first + index * most // min(each, most)) % most
            start = block * BLOCK_BYTES
            yield number, tensor.start + start, min(BLOCK_BYTES, tensor.num_bytes - start)


def _spread(items: Sequence[_Item], most: int) -> Sequence[_Item]:
    """Return at most ``most`` items at even distances, with the first and the last; only the last if it is 1."""
    if len(items) <= most:
        return items
    if most == 1:
        return items[-1:]
    return [items[index * (len(items) - 1) // (most - 1)] for index in range(most)]


def _contents(path: Path) -> _Contents:
    if path.suffix == ".gguf":
        tensors = read_header(path).tensors
        spans = [_Span(name, tensor.offset, tensor.num_bytes) for name, tensor in tensors.items()]
        with path.open("rb") as file:
            return _Contents(file.read(min([_MAX_HEADER_BYTES, *(span.start for span in spans)])), spans)
    with path.open("rb") as file:
        header, begin = _safetensors_header(file, path)
        tensors_of = json.loads(header)
    spans = [
        _Span(name, begin + entry["data_offsets"][0], entry["data_offsets"][1] - entry["data_offsets"][0])
        for name, entry in tensors_of.items()
        if name != "__metadata__" and entry["data_offsets"][1] > entry["data_offsets"][0]
    ]
    return _Contents(header, spans)


def _safetensors_header(file: BinaryIO, path: Path) -> tuple[bytes, int]:
    """Return a header, which `weight_files` has checked, and the position of the first tensor after it.

    Raise ConfigError if the header has become larger than `_MAX_HEADER_BYTES`.
    """
    size = int.from_bytes(file.read(8), "little")
    if size > _MAX_HEADER_BYTES:
        raise ConfigError(f"{path} has a header of {size} bytes; download it again")
    return file.read(size), 8 + size
