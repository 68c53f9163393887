"""How requests end on an instance, other than by the scheduler's order, and what the scheduler is told about it."""

from __future__ import annotations

from collections.abc import Callable

import structlog

from pdmesh.core.events import InstanceEvent, RequestDropped, TransferFailed
from pdmesh.core.instances.own_steps import OwnSteps
from pdmesh.model import FinishReason, InstanceId, TransferId
from pdmesh.worker.replies import finished
from pdmesh.worker.sequences import LocalRequest, Sequences
from pdmesh.worker.spans import DONE, ERROR, FAILED

log = structlog.get_logger()


class Endings:
    """Ends requests: each is reported, then released. ``own`` are decode steps to be reported with an end."""

    def __init__(
        self,
        instance_id: InstanceId,
        *,
        sequences: Sequences,
        own: OwnSteps,
        report: Callable[[InstanceEvent], None],
    ) -> None:
        self._instance_id = instance_id
        self._sequences = sequences
        self._own = own
        self._report = report

    def finish(self, request: LocalRequest, reason: FinishReason) -> None:
        """End a request whose last token, or the error in its place, has been sent."""
        self._report(finished(self._instance_id, request, reason, self._own.take()))
        request.end_trace(ERROR if reason is FinishReason.ERROR else DONE)
        self._sequences.release(request)

    def drop(self, request: LocalRequest, reason: str) -> None:
        """Give up a request that cannot go on here, whatever became of its KV."""
        self._report(RequestDropped(self._instance_id, request.request_id, request.epoch, reason))
        self._give_up(request, reason)

    def fail_to_receive(self, request: LocalRequest, transfer_id: TransferId, reason: str) -> None:
        """End a request whose KV cannot be received."""
        self._report(TransferFailed(self._instance_id, request.request_id, request.epoch, transfer_id, reason))
        self._give_up(request, reason)

    def _give_up(self, request: LocalRequest, reason: str) -> None:
        log.warning("request dropped", request_id=request.request_id, epoch=request.epoch, reason=reason)
        request.end_trace(FAILED)
        self._sequences.release(request)
