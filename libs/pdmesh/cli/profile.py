"""`pdmesh profile`: measure how fast this machine runs a model, and write a profile for the scheduler."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import typer

from pdmesh import __version__
from pdmesh.cli.plan import threads_per_worker
from pdmesh.cli.progress import progress_bar
from pdmesh.config import MeshConfig
from pdmesh.engine.base import Engine
from pdmesh.errors import PdmeshError
from pdmesh.host import num_usable_cores
from pdmesh.operations import PoolCounts
from pdmesh.policy.fit import fit
from pdmesh.policy.latency import ChunkShape, LinearLatencyModel, StepShape
from pdmesh.policy.latency_profile import Subject
from pdmesh.profiles import FORMAT, ProfileFile, save_profile
from pdmesh.telemetry.log_lines import configure_logging

#: Fewest shapes for a fit: more than the model has coefficients.
_LEAST_SHAPES = 11

#: Largest number of rounds over all shapes, so that a slow minute of the machine affects all of them.
_MOST_ROUNDS = 20

#: Repeated byte of a number near 0.01, in bfloat16 and float32 alike. Memory that was never written would be read too
#: fast.
_FILL = 0x3C
_FILL_BYTES = 16 << 20


def _shapes(
    chunks: Sequence[tuple[int, int]], decodes: Sequence[tuple[int, int]], mixed: Sequence[tuple[int, int, int, int]]
) -> list[StepShape]:
    """Return shapes: chunks of (new, history) tokens, then (number of decodes, context of each), then both."""
    return [
        *(StepShape((ChunkShape(*chunk),), 0, 0) for chunk in chunks),
        *(StepShape((), number, number * context) for number, context in decodes),
        *(StepShape((ChunkShape(*chunk),), number, number * context) for *chunk, number, context in mixed),
    ]


_FITTED = _shapes(
    [(size, 0) for size in (16, 32, 64, 128, 256, 512, 1024)]
    + [(size, history) for size in (32, 128, 512) for history in (1024, 4096, 8192, 16384)],
    [(1, 64), (1, 2048), (1, 8192), (8, 128), (8, 1024), (32, 64), (32, 256)],
    [(64, 0, 8, 64), (256, 0, 8, 64), (256, 0, 32, 64), (32, 0, 8, 256), (128, 2048, 8, 256), (512, 0, 16, 128)],
)
_HELD_OUT = _shapes(
    [(24, 0), (96, 0), (384, 0), (768, 0), (48, 2000), (200, 600), (256, 3000), (384, 6000), (256, 12000)],
    [(2, 700), (4, 300), (16, 400), (2, 4000)],
    [(100, 500, 4, 300), (256, 1000, 12, 200), (48, 0, 24, 128), (160, 0, 32, 100)],
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileOptions:
    """Options of `pdmesh profile`.

    Without a `file`, its name follows from the model. In the mesh that is measured for, `pools` share the cores.
    """

    file: Path | None
    pools: PoolCounts
    limit_s: float


def run_profile(config: MeshConfig, options: ProfileOptions) -> None:
    """Measure, fit and write. Raises ConfigError for a model that cannot be loaded or a file that cannot be written.

    Raises PdmeshError if too few steps were measured in time.
    """
    from pdmesh.worker.engines import build_engine, device_name, engine_facts, served_model_name

    configure_logging("profile", replace(config.telemetry, log_level="warning"))  # the engine's logs
    num_threads = threads_per_worker(config, options.pools.total, num_usable_cores())
    typer.echo(f"pdmesh: measuring {config.model} with {num_threads} threads, as in {options.pools}", err=True)
    engine = build_engine(config, num_threads)
    facts, layout = engine_facts(config), engine.kv.layout
    subject = Subject(
        model=served_model_name(config),
        num_parameters=facts.num_parameters,
        num_layers=layout.num_layers,
        num_kv_heads=layout.num_kv_heads,
        head_dim=layout.head_dim,
        dtype=layout.dtype,
        device=device_name(config),
        device_name=facts.device_name,
    )
    with progress_bar(counts=False) as progress:
        task = progress.add_task("measuring", total=options.limit_s)
        measured = measure(
            engine, [*_FITTED, *_HELD_OUT], options.limit_s, lambda s: progress.update(task, completed=s)
        )
    fitted = [(shape, measured[shape]) for shape in _FITTED if shape in measured]
    held_out = [(shape, measured[shape]) for shape in _HELD_OUT if shape in measured]
    if len(fitted) < _LEAST_SHAPES or not held_out:
        raise PdmeshError(f"only {len(measured)} steps were measured in {options.limit_s:g} s: raise --seconds")
    model = fit(fitted)
    errors = relative_errors(model, held_out)
    file = options.file or Path(f"{subject.model.replace('/', '--')}.profile.json")
    save_profile(
        file,
        ProfileFile(
            format=FORMAT,
            subject=subject,
            num_threads=num_threads,
            measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
            pdmesh_version=__version__,
            num_steps=len(fitted),
            num_held_out=len(held_out),
            mean_error=statistics.fmean(errors),
            worst_error=max(errors),
            coefficients=dict(zip(LinearLatencyModel.__slots__, model.coefficients, strict=True)),
        ),
    )
    typer.echo(f"{subject}, {num_threads} threads")
    typer.echo(
        f"{len(held_out)} steps not used for the fit: {statistics.fmean(errors):.1%} mean error, "
        f"{max(errors):.1%} at worst"
    )
    typer.echo(f"written to {file}: use it with `pdmesh up --profile {file}`")


def measure(
    engine: Engine, shapes: Sequence[StepShape], limit_s: float, on_progress: Callable[[float], None]
) -> dict[StepShape, float]:
    """Return the median seconds of each step that fits the engine and was measured before ``limit_s``."""
    from pdmesh.worker.measuring import fits, step_s

    _fill(engine)
    possible = [shape for shape in shapes if fits(engine, shape)]
    times_s: dict[StepShape, list[float]] = {}
    step_s(engine, possible[0])  # warms up code and memory
    began_s = time.perf_counter()
    for _ in range(_MOST_ROUNDS):
        for shape in possible:
            elapsed_s = time.perf_counter() - began_s
            if elapsed_s > limit_s:
                break
            times_s.setdefault(shape, []).append(step_s(engine, shape))
            on_progress(elapsed_s)
    return {shape: statistics.median(seconds) for shape, seconds in times_s.items()}


def relative_errors(model: LinearLatencyModel, measured: Sequence[tuple[StepShape, float]]) -> list[float]:
    """Return each prediction's error relative to the measured time, without its sign."""
    return [abs(model.step_s(shape) / seconds - 1) for shape, seconds in measured]


def _fill(engine: Engine) -> None:
    layout = engine.kv.layout
    size = max(1, _FILL_BYTES // layout.max_page_bytes)  # a copy to a device takes some 0.1 ms, however small
    data = memoryview(bytearray([_FILL]) * (size * layout.max_page_bytes))
    for layer in range(layout.num_layers):
        for first in range(0, engine.kv.num_blocks, size):
            block_ids = range(first, min(first + size, engine.kv.num_blocks))
            engine.kv.scatter(layer, block_ids, data[: len(block_ids) * layout.page_bytes(layer)])
