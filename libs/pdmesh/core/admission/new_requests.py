"""Arrival, refusal, cancellation and expiry of waiting requests."""

from __future__ import annotations

from collections.abc import Callable

from pdmesh.core.admission.admission import Admission, work_us
from pdmesh.core.admission.aside import Aside
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
from pdmesh.kv_layout import GRANULE_TOKENS
from pdmesh.model import RejectReason, Request, short_weights
from pdmesh.policy.bundle import Bundle

_SHORTEN = "Shorten the prompt, or ask for fewer output tokens."


class NewRequests:
    """Handler of the gateways' events about new and waiting requests."""

    def __init__(
        self,
        mesh: MeshState,
        config: CoreConfig,
        admission: Admission,
        aside: Aside,
        reconciler: Reconciler,
        prefill_groups: GroupPlanner,
        may_instances_come: Callable[[], bool],
    ) -> None:
        """``may_instances_come``: whether more instances may join soon than there are now."""
        self._mesh = mesh
        self._config = config
        self._admission = admission
        self._aside = aside
        self._reconciler = reconciler
        self._prefill_groups = prefill_groups
        self._may_instances_come = may_instances_come

    def arrived(self, request: Request, choice: BundleChoice, now_s: float) -> None:
        """Queue, adopt or reject a request that arrives for the first time or in a later epoch.

        Ignored if its epoch is known already. Refused if its id belongs to another gateway. A later epoch supersedes
        the known one. An instance that already decodes the request keeps it.
        """
        mesh, bundle = self._mesh, choice.bundle
        known = mesh.requests.get(request.request_id)
        owner = self._reconciler.gateway_of(request.request_id) if known is None else known.request.gateway_id
        if owner is not None and owner != request.gateway_id:
            mesh.refuse(request, "Another gateway's request has this id.", self._config.retry_after_s)
            return
        if known is not None:
            if known.request.epoch >= request.epoch:
                mesh.ignore("RequestArrived")
                return
            mesh.end(known, Outcome.SUPERSEDED)
        reused = reusable(request, mesh.reusable_depths(request), mesh.cache_index, mesh.by_number, bundle.reuse)
        num_reused = max(reused.depths.values(), default=0) * GRANULE_TOKENS
        rank = bundle.order.rank(request, num_reused, None, num_reused)
        instance_id = self._reconciler.claim((request.request_id, request.epoch), request.gateway_id)
        work = work_us(request, choice.learner.model, num_reused)
        state = mesh.open(request, rank, work, num_reused, is_adopted=instance_id is not None)
        if request.epoch > 0:
            state.resume(now_s)
        if instance_id is not None:
            mesh.adopt(state, instance_id)
        elif self._is_full_for(state):
            message = f"The queue is full: {len(mesh.queue)} requests are waiting. Try again later."
            retry_after_s, reject_ttl_s = self._admission.when_full(state, bundle.order, now_s)
            mesh.reject(state, RejectReason.OVERLOADED, message, retry_after_s, reject_ttl_s=reject_ttl_s)
        elif self._is_too_long(request, bundle):
            message = f"No instance can hold {_length(request)}. {_SHORTEN}"
            mesh.reject(state, RejectReason.TOO_LONG, message, None)
        elif (refusal := self._admission.refusal(state, bundle.order, now_s)) is not None:
            message = (
                f"The predicted time to first token is {refusal.predicted_s:.2g} s, above the limit of "
                f"{refusal.limit_s:g} s. Try again later."
            )
            mesh.reject(
                state, RejectReason.OVERLOADED, message, refusal.retry_after_s, reject_ttl_s=refusal.reject_ttl_s
            )
        else:
            mesh.queue.add(state, now_s + self._config.max_queue_s)
            self._aside.arrived(state)
            if state.key in mesh.queue.turns_aside:
                self._admission.forget(state)
            self._prefill_groups.arrived(state, now_s)

    def _is_full_for(self, state: RequestState) -> bool:
        if state.request.epoch > 0:
            return False
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
        """Reject or postpone each request whose time limit has passed.

        While the mesh can serve, a turn that is set aside gets another time limit. A resumed request is postponed as
        long as an instance can serve it or may still come, unless the weights of its answer are gone. Each other one is
        rejected with the reason why it found no place.
        """
        retry_after_s = self._config.retry_after_s
        while (state := self._mesh.queue.first_due(now_s)) is not None:
            unready = unready_reason(self._mesh.instances.values())
            if unready is None and self._is_without_weights(state.request):
                message = (
                    f"The answer was begun with the weights {short_weights(state.request.weights)}, which no instance "
                    "has any more. Send the request again."
                )
                self._mesh.reject(state, RejectReason.WEIGHTS_GONE, message, retry_after_s)
            elif unready is None and self._aside.keeps_waiting(state, now_s):
                pass
            elif unready is None and state.resumed_s is not None:
                if self._mesh.queue.is_parked(state) and not self._may_fit_yet(state.resumed_s, now_s):
                    message = f"No remaining or expected instance can hold {_length(state.request)}. {_SHORTEN}"
                    self._mesh.reject(state, RejectReason.TOO_LONG, message, None)
                else:
                    self._mesh.queue.postpone(state, now_s + self._config.max_queue_s)
            elif unready is None:
                message = f"No instance had room within {self._config.max_queue_s:g} s. Try again later."
                self._mesh.reject(state, RejectReason.QUEUE_TIMEOUT, message, retry_after_s)
            else:
                message = f"The mesh cannot serve requests now: {unready}."
                self._mesh.reject(state, RejectReason.NO_INSTANCE, message, retry_after_s)

    def _is_without_weights(self, request: Request) -> bool:
        """Whether the answer was begun with weights that no instance able to finish it has any more."""
        if not request.weights:
            return False
        return not any(
            each.may_serve(request) and each.is_open_to_begun and each.could_finish(request)
            for each in self._mesh.instances.values()
        )

    def _may_fit_yet(self, resumed_s: float, now_s: float) -> bool:
        """Whether a lost instance may still come back in time for a request that waits since ``resumed_s``."""
        return now_s < resumed_s + COME_BACK_S and self._may_instances_come()


def _length(request: Request) -> str:
    return f"{request.num_prompt_tokens} prompt tokens and {request.max_tokens} output tokens"
