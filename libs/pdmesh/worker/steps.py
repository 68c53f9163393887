"""The step loop: the next plan if there is one, else a decode step over the residents, else wait."""

from __future__ import annotations

import time

import structlog

from pdmesh.engine.base import Engine, SliceResult
from pdmesh.worker.batch import Batch
from pdmesh.worker.instance import Instance
from pdmesh.worker.threads import EngineThread

log = structlog.get_logger()


async def run_steps(instance: Instance, engine: Engine, thread: EngineThread) -> Exception:
    """Execute batches until cancelled. If the engine breaks, end the batch's requests and return its error.

    While a step runs on the engine's thread, the event loop serves the links.
    """
    block_size = engine.kv.layout.block_size

    def execute(batch: Batch) -> tuple[list[SliceResult], float]:
        started_s = time.perf_counter()
        results = engine.execute(batch.slices, on_layer=batch.on_layer(block_size))
        return results, time.perf_counter() - started_s

    while True:
        batch = instance.next_batch()
        if batch is None:
            await instance.wait_for_work()
            continue
        try:
            results, duration_s = await thread.run(lambda batch=batch: execute(batch))  # type: ignore[misc]
        except Exception as error:
            log.exception("the engine failed")
            instance.fail_batch(batch, error)
            return error
        instance.finish_batch(batch, results, duration_s)
