"""The engine that the configuration names, and facts about the engine that need no measurement."""

from __future__ import annotations

import platform
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import structlog

from pdmesh.config import BLOCK_TOKENS, HOST_KV_CACHE_BYTES, InstanceDegrees, MeshConfig, WorkerConfig
from pdmesh.engine.devices import may_have_device
from pdmesh.engine.files import load_model_config, resolve_model, with_adapter
from pdmesh.engine.identity import unchanged_weights
from pdmesh.engine.levels import compiled_levels
from pdmesh.engine.model_config import DecoderShape
from pdmesh.engine.ranks.share import check_divisible, check_stages
from pdmesh.errors import ConfigError
from pdmesh.extensions import extension
from pdmesh.host import free_host_bytes
from pdmesh.kv_layout import GRANULE_TOKENS, KvLayout, cache_bytes, num_blocks_for
from pdmesh.model import MeasuredStep, Role
from pdmesh.worker.state_frames import CacheSize, divided, num_held_frames, num_steps_under_way, state_room

# Importing torch takes seconds, and numpy a third of a second.
if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from pdmesh.engine.base import Engine
    from pdmesh.engine.model_loading import LoadedModel
    from pdmesh.engine.preloaded import PreloadedModel
    from pdmesh.engine.ranks.group import RankGroup
    from pdmesh.engine.ranks.leading import Followers
    from pdmesh.engine.ranks.pipeline import Stages

log = structlog.get_logger()

#: Entry points of other distributions' engines, by the name in `worker.engine`. Each value is an `EngineMaker`.
ENTRY_POINTS = "pdmesh.engines"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """Facts for an instance's profile about model and hardware. The defaults mean unknown."""

    num_parameters: int = 0
    num_heads: int = 0
    device_name: str = ""
    measured_steps: tuple[MeasuredStep, ...] = ()


class EngineMaker(Protocol):
    """Builder of an engine from another distribution."""

    def build(self, config: MeshConfig, num_stages: int) -> Engine:
        """Build the engine on the thread that will execute its steps. Raise ConfigError for a model not served."""
        ...

    def facts(self, config: MeshConfig) -> EngineFacts:
        """Return unmeasured facts of the engine that `build` makes."""
        ...


def engine_entry(name: str) -> EntryPoint:
    """Return the entry point of another distribution's engine. Raises ConfigError if no distribution has the engine."""
    return extension(ENTRY_POINTS, name, wanted=f"worker.engine is {name}, which", install="pdmesh-testing")


def _maker(name: str) -> EngineMaker:
    maker: EngineMaker = engine_entry(name).load()
    return maker


def served_model_name(config: MeshConfig) -> str:
    """Return the model name for clients: the configured one, else the last part of the path with the adapter."""
    name = Path(config.model or config.worker.engine).name
    return config.worker.served_model_name or with_adapter(name, config.worker.lora)


def build_engine(
    config: MeshConfig,
    num_threads: int,
    ranks: Followers | Stages | None = None,
    *,
    num_stages: int = 1,
    preloaded: PreloadedModel | None = None,
) -> Engine:
    """Load the model. Blocking; run on the thread that will execute the steps.

    Raise ConfigError if it is not served or does not fit.

    ``ranks`` are the other ranks of the instance (with several stages, all ranks), which load their parts meanwhile. An
    engine of another distribution runs its ``num_stages`` in this process. ``preloaded`` is a model in memory, which is
    used if it is the one to serve.
    """
    worker = config.worker
    check_ranges(config)
    if worker.engine != "torch":
        return _maker(worker.engine).build(config, num_stages)
    if config.model is None:
        raise ConfigError("no model is set: set model (PDMESH_MODEL) to a directory or a hub id")

    from pdmesh.engine.model_loading import load_model
    from pdmesh.engine.runner import TorchEngine

    directory = resolve_model(config.model)
    model = load_model_config(directory)
    block_size = block_size_of(worker, model)
    layout = model.kv_layout(dtype=worker.dtype, block_size=block_size, frees_windows=frees_behind_windows(config))
    check_states(config, model)
    max_model_len = worker.max_model_len or model.max_model_len
    max_frames = max_frames_of(config, layout, max_model_len) if layout.window else None
    if device_name(config) == "cpu":
        if preloaded is None:
            check_memory(model, layout, num_instances=1, free_bytes=free_host_bytes())
    elif ranks is not None:
        raise _on_a_device(worker)
    return TorchEngine(
        directory,
        num_blocks=partial(
            _num_blocks, worker, max_model_len=max_model_len, max_frames=max_frames or 0, num_stages=num_stages
        ),
        max_frames=max_frames,
        device=worker.device,
        num_threads=num_threads,
        load=load_model if preloaded is None else preloaded.load,
        **_ranks_of(ranks, num_stages),
        **_compute_options(worker, block_size),
    )


def preload(config: MeshConfig) -> PreloadedModel | None:
    """Load the model that `build_engine` would load on the CPU for an instance of one rank, on one thread.

    No thread is left behind, so the process can fork. Returns None if the files change meanwhile. Raises ConfigError
    and OSError.
    """
    import torch

    from pdmesh.engine.compute import ComputeOptions
    from pdmesh.engine.preloaded import preload_model

    torch.set_num_threads(1)
    worker = config.worker
    directory = resolve_model(str(config.model))
    model = load_model_config(directory)
    block_size = block_size_of(worker, model)
    layout = model.kv_layout(dtype=worker.dtype, block_size=block_size, frees_windows=frees_behind_windows(config))
    check_memory(model, layout, num_instances=1, free_bytes=free_host_bytes())
    options = ComputeOptions(
        device=torch.device("cpu"), frees_windows=layout.window > 0, **_compute_options(worker, block_size)
    )
    return preload_model(directory, options)


def _num_blocks(
    worker: WorkerConfig,
    layout: KvLayout,
    free_bytes: int | None,
    *,
    max_model_len: int,
    max_frames: int,
    num_stages: int,
) -> CacheSize:
    of = partial(
        cache_size_of,
        worker,
        free_bytes=free_bytes,
        max_model_len=max_model_len,
        host_bytes=free_host_bytes(),
        num_stages=num_stages,
    )
    size = of(layout, max_frames=max_frames if layout.window else 0)
    num_blocks, num_frames = size
    if layout.has_states:
        room = state_room(layout, size, worker.max_num_seqs, worker.cached_states_share, num_stages)
        log.info(
            "the cache has states beside KV",
            num_tokens=num_blocks * layout.block_size,
            num_states_of_requests=num_held_frames(layout, room.num_seats, num_stages),
            num_cached_states=room.num_cached,
            bytes_per_state=layout.bytes_per_frame,
        )
        if room.num_seats < worker.max_num_seqs:
            log.warning(
                "states of fewer requests than worker.max_num_seqs have room: raise worker.kv_cache_bytes",
                max_num_seqs=worker.max_num_seqs,
                num_requests=room.num_seats,
            )
    elif layout.window:
        log.info(
            "KV outside the attention windows is freed",
            num_tokens=num_blocks * layout.block_size,
            num_windowed_layers=len(layout.windowed_layers),
            num_tokens_of_these=num_frames * layout.block_size,
            num_tokens_if_all_was_held=of(replace(layout, window=0, windowed_layers=())).num_blocks * layout.block_size,
            num_cache_bytes=cache_bytes(layout, num_blocks, num_frames),
        )
    if layout.window and (num_tokens := num_blocks * layout.block_size) < max_model_len:
        log.warning(
            "the KV cache is smaller than a context: lower worker.max_num_seqs or policy.max_chunk_tokens, "
            "which reserve KV of layers with a window or states, or raise worker.kv_cache_bytes",
            num_tokens=num_tokens,
            max_model_len=max_model_len,
        )
    return size


def _ranks_of(ranks: Followers | Stages | None, num_stages: int) -> dict[str, Any]:
    return {"followers" if num_stages == 1 else "stages": ranks}


def with_decided_dtype(config: MeshConfig, num_threads: int) -> MeshConfig:
    """Return settings that name the dtype, so that the ranks need not each load the whole model to choose one.

    Settings that name a dtype, no model, or another engine are returned unchanged. Blocking. Raises ConfigError.
    """
    worker = config.worker
    if worker.engine != "torch" or worker.dtype != "auto" or config.model is None:
        return config
    import torch

    from pdmesh.engine.compute import ComputeOptions
    from pdmesh.engine.model_loading import decided_dtype

    torch.set_num_threads(num_threads)
    directory = resolve_model(config.model)
    block_size = block_size_of(worker, load_model_config(directory))
    options = ComputeOptions(device=torch.device("cpu"), **_compute_options(worker, block_size))
    dtype = decided_dtype(directory, options)
    return replace(config, worker=replace(worker, dtype=dtype))


def load_rank(config: MeshConfig, num_threads: int, group: RankGroup) -> tuple[LoadedModel, str]:
    """Load one rank's part of the model. Return it and the weights' identity. Raise ConfigError if that fails."""
    import torch

    from pdmesh.engine.compute import ComputeOptions
    from pdmesh.engine.model_loading import load_model

    torch.set_num_threads(num_threads)
    share, directory = group.share, resolve_model(str(config.model))
    block_size = block_size_of(config.worker, load_model_config(directory))
    options = ComputeOptions(
        device=torch.device("cpu"),
        frees_windows=frees_behind_windows(config),
        **_compute_options(config.worker, block_size),
    )
    with unchanged_weights(directory, lora=options.lora, has_random_weights=options.has_random_weights) as weights:
        return load_model(directory, options, share, None if share.is_whole else group), weights


def _compute_options(worker: WorkerConfig, block_size: int) -> dict[str, Any]:
    """Return the arguments of `ComputeOptions` that must be equal in all ranks of an instance."""
    return {
        "block_size": block_size,
        "dtype": worker.dtype,
        "lora": worker.lora,
        "max_model_len": worker.max_model_len,
        "max_num_seqs": worker.max_num_seqs,
        "prefill_attention": worker.prefill_attention,
        "deterministic": worker.deterministic,
        "has_random_weights": worker.load_format == "dummy",
        "cpu_level": worker.cpu_level,
        "ordered": worker.deterministic,
        "range_tokens": worker.max_kv_tokens_per_instance,
    }


def frees_behind_windows(config: MeshConfig) -> bool:
    """Whether instances free KV that layers with a window no longer see. The answer holds for the whole mesh.

    Such KV is kept on a device and with an offload tier. Where contexts are spread it is kept, too, because a range is
    held in all layers.
    """
    worker = config.worker
    return (
        worker.free_behind_windows
        and not worker.max_kv_tokens_per_instance
        and not (worker.kv_offload_host_bytes or worker.kv_offload_disk_bytes)
        and device_name(config) == "cpu"
    )


def max_frames_of(config: MeshConfig, layout: KvLayout, max_model_len: int) -> int:
    """Return the most blocks that layers with a window hold at once.

    The sum of the windows of all decoding requests, half as much for requests that are computed, sent or resumable,
    and the largest chunk of each step. The memory decides how many states there are.
    """
    worker, policy, block_size = config.worker, config.policy, layout.block_size
    num_seen = num_blocks_for(layout.window + GRANULE_TOKENS, block_size) + 2
    chunk_tokens = min(max_model_len, max(policy.max_chunk_tokens, policy.chunk_tokens))
    num_steps = num_steps_under_way(max(config.degrees_of(role).stages for role in Role))
    return (3 * worker.max_num_seqs // 2 + 1) * num_seen + num_steps * num_blocks_for(chunk_tokens, block_size)


def block_size_of(worker: WorkerConfig, model: DecoderShape) -> int:
    """Return the number of tokens in a KV block. By default a block with states is as large as a granule."""
    return worker.block_size or (GRANULE_TOKENS if model.has_states else BLOCK_TOKENS)


def check_states(config: MeshConfig, model: DecoderShape) -> None:
    """Raise ConfigError for settings that are not served for a model whose layers have states."""
    worker = config.worker
    if not model.has_states:
        return
    name = f"a {model.architecture}, whose layers have states,"
    if worker.speculation != "off":
        raise ConfigError(f"worker.speculation is {worker.speculation}, but {name} verifies no drafts so far: set off")
    if not frees_behind_windows(config):
        raise ConfigError(
            f"{name} needs worker.free_behind_windows, a CPU and no offload tier: every block has its states"
        )
    if (block_size := block_size_of(worker, model)) < GRANULE_TOKENS:
        raise ConfigError(
            f"worker.block_size is {block_size}, but {name} has two states a block: set it to {GRANULE_TOKENS}"
        )


def check_ranges(config: MeshConfig) -> None:
    """Raise ConfigError if contexts cannot be spread as the settings say."""
    worker = config.worker
    name, limit = "worker.max_kv_tokens_per_instance", worker.max_kv_tokens_per_instance
    if not limit:
        return
    if limit % (block_size := worker.block_size or BLOCK_TOKENS):
        raise ConfigError(f"{name} is {limit}, not a multiple of worker.block_size, {block_size}")
    if worker.engine != "torch":
        raise ConfigError(f"{name} is set, but the engine {worker.engine} cannot spread contexts: set it to 0")
    if (device := device_name(config)) != "cpu":
        raise ConfigError(f"{name} is set, but the device is {device}: contexts are spread on CPUs only")


def check_ranks_can_compute(config: MeshConfig, degrees: InstanceDegrees) -> None:
    """Raise ConfigError if an instance cannot be divided into these degrees."""
    if degrees.num_ranks == 1:
        return
    if config.worker.engine != "torch":
        if degrees.tensor > 1:
            raise ConfigError(
                f"tensor_parallel_size is {degrees.tensor}, but worker.engine is {config.worker.engine}: set it to 1"
            )
        return
    if config.worker.device.startswith("cuda"):
        raise _on_a_device(config.worker)
    if config.model is not None:
        model = load_model_config(resolve_model(config.model))
        check_divisible(model, degrees.tensor)
        check_stages(model, degrees.stages)


def _on_a_device(worker: WorkerConfig) -> ConfigError:
    return ConfigError(
        f"worker.device is {worker.device}, which here is a CUDA device, but an instance of several ranks computes on "
        "CPUs only so far: set worker.device to cpu, or tensor_parallel_size and pipeline_parallel_size to 1"
    )


def check_memory(
    model: DecoderShape, layout: KvLayout, *, num_instances: int, free_bytes: int | None, kv_bytes: int = 0
) -> None:
    """Raise ConfigError if the host's memory cannot hold the weights and ``kv_bytes`` of ``num_instances``.

    Otherwise the kernel would kill instances. ``free_bytes`` is None if it is not known: nothing is checked.
    """
    weight_bytes = int(model.num_weights * _bytes_of_a_weight(model, layout))
    if free_bytes is None or num_instances * (weight_bytes + kv_bytes) <= free_bytes:
        return
    each = "" if num_instances == 1 else f", in each of {num_instances} instances"
    kv = f" and KV {_gib(kv_bytes)}" if kv_bytes else ""
    lower = "lower --kv-cache-bytes, or " if kv_bytes else ""
    raise ConfigError(
        f"the model's weights take {_gib(weight_bytes)} in {layout.dtype}{kv}{each}, and {_gib(free_bytes)} of memory "
        f"are free: {lower}add memory, or use a smaller model or fewer instances (`pdmesh up --mixed 1` starts one)"
    )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.1f} GiB"


def _bytes_of_a_weight(model: DecoderShape, layout: KvLayout) -> float:
    """Return the bytes of a weight in a host's memory, with its part of a quantization group's scale."""
    if layout.dtype == "float32":
        return 4
    quantization = model.quantization
    if quantization is None or not compiled_levels():
        return 2
    return quantization.bits / 8 + 0.07


def device_name(config: MeshConfig) -> str:
    """Return the device on which `build_engine` computes."""
    if config.worker.engine != "torch" or config.worker.device == "cpu":
        return "cpu"
    if config.worker.device == "auto" and not may_have_device():
        return "cpu"
    from pdmesh.engine.runner import torch_device

    return str(torch_device(config.worker.device))


def engine_facts(config: MeshConfig) -> EngineFacts:
    """Return unmeasured facts of the engine that `build_engine` makes."""
    if config.worker.engine != "torch":
        return _maker(config.worker.engine).facts(config)
    if config.model is None:
        return EngineFacts()
    model = load_model_config(resolve_model(config.model))
    return EngineFacts(
        num_parameters=model.num_parameters, num_heads=model.num_heads, device_name=hardware_name(device_name(config))
    )


def hardware_name(device: str) -> str:
    """Return the vendor's name of the device or of this host's processor; its architecture if the name is unknown."""
    if device.startswith("cuda"):
        import torch

        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def cache_size_of(
    worker: WorkerConfig,
    layout: KvLayout,
    *,
    free_bytes: int | None,
    max_model_len: int,
    host_bytes: int | None = None,
    max_frames: int = 0,
    num_stages: int = 1,
) -> CacheSize:
    """Return the size of the KV cache: by the configured size, else by the free memory, else a default.

    ``free_bytes`` are free on a device after loading the weights, ``host_bytes`` on the host. Of ``host_bytes``, and
    beyond ``max_frames`` (0: no limit) blocks, no more are used than the decoding requests can fill. Layers with a
    window have at most ``max_frames`` + 1 blocks; layers with states as many as `divided` gives them. Raise ConfigError
    if there is no room for one block.
    """
    kv_cache_bytes, source = worker.kv_cache_bytes, "worker.kv_cache_bytes"
    bytes_per_block, bytes_per_frame = layout.bytes_per_block, layout.bytes_per_frame
    most_blocks = worker.max_num_seqs * num_blocks_for(max_model_len, layout.block_size)
    if kv_cache_bytes is None and free_bytes is not None:
        kv_cache_bytes = int(free_bytes * worker.kv_cache_share)
        source = f"the share of the {free_bytes} bytes that the weights leave free (worker.kv_cache_share)"
    elif kv_cache_bytes is None and host_bytes is not None:
        most_bytes = most_blocks * bytes_per_block
        kv_cache_bytes = min(most_bytes, int(host_bytes * worker.kv_cache_host_share))
        source = f"the share of the {host_bytes} bytes that the host has free"
    elif kv_cache_bytes is None:
        kv_cache_bytes = HOST_KV_CACHE_BYTES
    num_blocks, num_frames = (kv_cache_bytes - bytes_per_frame) // bytes_per_block, max_frames
    if layout.has_states and max_frames:
        num_blocks, num_frames = divided(
            layout,
            kv_cache_bytes,
            max_num_seqs=worker.max_num_seqs,
            most_blocks=most_blocks,
            cached_share=worker.cached_states_share,
            num_stages=num_stages,
        )
    elif num_blocks > max_frames > 0:
        rest = kv_cache_bytes - (max_frames + 1) * bytes_per_frame
        num_everywhere = bytes_per_block - bytes_per_frame
        num_blocks = max(max_frames, most_blocks)
        if num_everywhere:
            num_blocks = min(num_blocks, rest // num_everywhere)
    if num_blocks <= 0:
        raise ConfigError(
            f"{source} is {kv_cache_bytes}, but one block of {layout.block_size} tokens takes"
            f" {bytes_per_block} bytes in {layout.num_layers} layers: use more memory or smaller blocks"
        )
    return CacheSize(num_blocks, min(num_blocks, num_frames))
