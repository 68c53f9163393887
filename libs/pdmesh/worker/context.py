"""Shared context of an instance's parts: identity, state, and callables."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pdmesh.core.events import InstanceEvent
from pdmesh.instance.effects import CopyEvent, Effect
from pdmesh.kv.mover import KvMover
from pdmesh.model import InstanceId
from pdmesh.telemetry.tracing import Tracing
from pdmesh.worker.addresses import Addresses
from pdmesh.worker.block_tables import BlockTables
from pdmesh.worker.compiling import GrammarCompiler
from pdmesh.worker.replies import ToGateways
from pdmesh.worker.sequences import LocalRequest, Sequences
from pdmesh.worker.windows import Windows
from pdmesh.worker.worker_metrics import WorkerMetrics


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceContext:
    """The shared context of an instance's parts, made once by `pdmesh.worker.instance.Instance`.

    ``max_model_len`` and ``block_size`` count tokens.
    ``range_tokens``: tokens of each range of a spread context; 0: contexts are not spread.
    ``weights``: identity of the loaded weights.
    ``report``: reports an event to the scheduler, without blocking.
    ``do``: carries out effects of the instance's machine.
    ``drop``: ends a request that cannot continue here, with a reason.
    ``freeze``: stops drawing tokens for a moving request.
    ``hear``: handles an event of a copy.
    ``wake``: signals that the engine may have more to do.
    """

    instance_id: InstanceId
    max_model_len: int
    block_size: int
    range_tokens: int
    weights: str
    tables: BlockTables
    windows: Windows
    mover: KvMover
    sequences: Sequences
    addresses: Addresses
    report: Callable[[InstanceEvent], None]
    do: Callable[[list[Effect]], None]
    drop: Callable[[LocalRequest, str], None]
    freeze: Callable[[LocalRequest], None]
    hear: Callable[[LocalRequest, CopyEvent], None]
    gateways: ToGateways
    metrics: WorkerMetrics
    tracing: Tracing
    grammars: GrammarCompiler
    wake: Callable[[], None]
