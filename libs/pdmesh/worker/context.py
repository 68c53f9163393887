"""What the parts of an instance share: its identity, what it holds, and the callables by which it reports."""

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
    """The shared context of an instance's parts, made once by `pdmesh.worker.instance.Instance`."""

    instance_id: InstanceId
    max_model_len: int  # tokens
    block_size: int  # tokens
    range_tokens: int  # that an instance holds of a context that is spread, beside its home; 0: none is
    weights: str  # the identity of what its engine loaded
    tables: BlockTables
    windows: Windows
    mover: KvMover
    sequences: Sequences
    addresses: Addresses
    report: Callable[[InstanceEvent], None]  # to the scheduler; does not block
    do: Callable[[list[Effect]], None]  # carries out what the machine asks for
    drop: Callable[[LocalRequest, str], None]  # gives up a request that cannot go on here
    freeze: Callable[[LocalRequest], None]  # lets a request that moves draw no more
    hear: Callable[[LocalRequest, CopyEvent], None]  # takes an event of a copy
    gateways: ToGateways
    metrics: WorkerMetrics
    tracing: Tracing
    grammars: GrammarCompiler
    wake: Callable[[], None]  # there may be more for the engine to do
