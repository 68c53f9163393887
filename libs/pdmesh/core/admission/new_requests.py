"""Requests come, and join the line or are refused; those that wait are given up, or wait for too long."""

from __future__ import annotations

from collections.abc import Callable

from pdmesh.core.admission.admission import Admission, work_us
from pdmesh.core.commands import Outcome
from pdmesh.core.config import CoreConfig
from pdmesh.core.events import RequestCancelled
from pdmesh.core.groups.prefill_groups import GroupPlanner
from pdmesh.core.instances.feasibility import could_place, unready_reason
from pdmesh.core.instances.reusable import reusable
from pdmesh.core.instances.revisions import have_pair
from pdmesh.core.mesh_state import MeshState
from pdmesh.core.operators.bundle_choice import BundleChoice
from pdmesh.core.operators.instance_operations import COME_BACK_S
from pdmesh.core.recovery.reconcile import Reconciler
from pdmesh.core.requests.request import RequestState
from pdmesh.model import GRANULE_TOKENS, RejectReason, Request, short_weights
from pdmesh.policy.bundle import Bundle


class NewRequests:
    """Takes note of what gateways say of their requests."""

    def __init__(
        self,
        mesh: MeshState,
        config: CoreConfig,
        admission: Admission,
        reconciler: Reconciler,
        prefill_groups: GroupPlanner,
        may_instances_come: Callable[[], bool],
    ) -> None:
        """``may_instances_come``: whether there may be more instances soon than there are now."""
        self._mesh = mesh
        self._config = config
        self._admission = admission
        self._reconciler = reconciler
        self._prefill_groups = prefill_groups
        self._may_instances_come = may_instances_come

    def arrived(self, request: Request, choice: BundleChoice, now_s: float) -> None:
        """A request comes for the first time, or again in a later epoch."""
        mesh, bundle = self._mesh, choice.bundle
        known = mesh.requests.get(request.request_id)
        owner = self._reconciler.gateway_of(request.request_id) if known is None else known.request.gateway_id
        if owner is not None and owner != request.gateway_id:
            mesh.refuse(request, "another gateway's request has this id", self._config.retry_after_s)
            return
        if known is not None:
            if known.request.epoch >= request.epoch:
                mesh.ignore("RequestArrived")  # sent again after a reconnect
                return
            mesh.end(known, Outcome.SUPERSEDED)
        reused = reusable(request, mesh.depths(request), mesh.kept_where, mesh.by_number, bundle.reuse)
        num_reused = max(reused.depths.values(), default=0) * GRANULE_TOKENS
        rank = bundle.order.rank(request, num_reused, None, num_reused)
        state = mesh.open(request, rank, work_us(request, choice.learner.model, num_reused), num_reused)
        if request.epoch > 0:
            state.resume(now_s)
        instance_id = self._reconciler.claim(state.key, request.gateway_id)
        if instance_id is not None:
            mesh.adopt(state, instance_id)
        elif self._is_full_for(state):
            message = f"{len(mesh.queue)} requests are waiting"
            retry_after_s, reject_ttl_s = self._admission.when_full(state, bundle.order, now_s)
            mesh.reject(state, RejectReason.OVERLOADED, message, retry_after_s, reject_ttl_s=reject_ttl_s)
        elif self._is_too_long(request, bundle):
            message = f"{_length(request)} fit no instance"
            mesh.reject(state, RejectReason.TOO_LONG, message, None)
        elif (refusal := self._admission.refusal(state, bundle.order, now_s)) is not None:
            message = (
                f"its first token is predicted {refusal.predicted_s:.2g} s from now, later than {refusal.limit_s:g} s"
            )
            mesh.reject(
                state, RejectReason.OVERLOADED, message, refusal.retry_after_s, reject_ttl_s=refusal.reject_ttl_s
            )
        else:
            mesh.queue.add(state, now_s + self._config.max_queue_s)
            self._prefill_groups.arrived(state, now_s)

    def _is_full_for(self, state: RequestState) -> bool:
        if state.request.epoch > 0:
            return False  # it was let in before, and half of its answer may be out
        queue = self._mesh.queue
        return (
            len(queue) >= self._config.max_queue_entries
            or queue.num_tokens + state.num_work_tokens > self._config.max_queue_tokens
        )

    def _is_too_long(self, request: Request, bundle: Bundle) -> bool:
        kinds = [each for each in self._mesh.kinds if each.may_serve(request)]
        return have_pair(kinds) and not could_place(request, kinds, by_number=False)

    def cancelled(self, event: RequestCancelled) -> None:
        was_orphan = self._reconciler.forget(event.request_id, event.gateway_id)
        state = self._mesh.requests.get(event.request_id)
        if state is not None and state.request.gateway_id == event.gateway_id and state.request.epoch <= event.epoch:
            self._mesh.end(state, Outcome.CANCELLED, num_output_tokens=event.num_output_tokens)
        elif not was_orphan:
            self._mesh.ignore("RequestCancelled")

    def expire(self, now_s: float) -> None:
        """Refuse what has waited for too long."""
        retry_after_s = self._config.retry_after_s
        while (state := self._mesh.queue.first_due(now_s)) is not None:
            unready = unready_reason(self._mesh.instances.values())
            if unready is None and self._is_without_weights(state.request):
                message = (
                    f"its answer was begun with the weights {short_weights(state.request.weights)}, which no instance "
                    "has any more: send the request again"
                )
                self._mesh.reject(state, RejectReason.WEIGHTS_GONE, message, retry_after_s)
            elif unready is None and state.resumed_s is not None:
                if self._mesh.queue.is_parked(state) and not self._may_fit_yet(state.resumed_s, now_s):
                    message = f"{_length(state.request)} fit no instances that are left or expected"
                    self._mesh.reject(state, RejectReason.TOO_LONG, message, None)
                else:
                    self._mesh.queue.postpone(state, now_s + self._config.max_queue_s)
            elif unready is None:
                message = f"no room for {self._config.max_queue_s:g} s"
                self._mesh.reject(state, RejectReason.QUEUE_TIMEOUT, message, retry_after_s)
            else:
                self._mesh.reject(state, RejectReason.NO_INSTANCE, unready, retry_after_s)

    def _is_without_weights(self, request: Request) -> bool:
        """Whether no instance could finish a request, and some could if its tokens were of their weights."""
        if not request.weights:
            return False
        return not any(
            each.may_serve(request) and each.is_open_to_begun and each.could_finish(request)
            for each in self._mesh.instances.values()
        )

    def _may_fit_yet(self, resumed_s: float, now_s: float) -> bool:
        """Whether an instance that was lost may come back in time for what has waited since ``resumed_s``."""
        return now_s < resumed_s + COME_BACK_S and self._may_instances_come()


def _length(request: Request) -> str:
    return f"{request.num_prompt_tokens} prompt tokens and {request.max_tokens} to generate"
