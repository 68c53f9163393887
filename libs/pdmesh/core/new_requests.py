"""Requests come, and join the line or are refused; those that wait are given up, or wait for too long."""

from __future__ import annotations

from pdmesh.core.admission import Admission, work_us
from pdmesh.core.books import Books
from pdmesh.core.bundle_choice import BundleChoice
from pdmesh.core.commands import Outcome
from pdmesh.core.config import CoreConfig
from pdmesh.core.events import RequestCancelled
from pdmesh.core.judging import Judge
from pdmesh.core.placing import could_place, have_pair, unready_reason
from pdmesh.core.relay import Relays
from pdmesh.core.reunion import Reunion
from pdmesh.model import RejectReason, Request
from pdmesh.policy.bundle import Bundle


class NewRequests:
    """Takes note of what gateways say of their requests."""

    def __init__(
        self,
        books: Books,
        config: CoreConfig,
        admission: Admission,
        reunion: Reunion,
        judge: Judge,
        relays: Relays,
    ) -> None:
        self._books = books
        self._config = config
        self._admission = admission
        self._reunion = reunion
        self._judge = judge
        self._relays = relays

    def arrived(self, request: Request, choice: BundleChoice, now_s: float) -> None:
        """A request comes for the first time, or again in a later epoch."""
        books, bundle = self._books, choice.bundle
        known = books.requests.get(request.request_id)
        owner = self._reunion.gateway_of(request.request_id) if known is None else known.request.gateway_id
        if owner is not None and owner != request.gateway_id:
            books.refuse(request, "another gateway's request has this id", self._config.retry_after_s)
            return
        if known is not None:
            if known.request.epoch >= request.epoch:
                books.ignore("RequestArrived")  # sent again after a reconnect
                return
            books.end(known, Outcome.SUPERSEDED)
        state = books.open(request, bundle.order.rank(request, 0, None), work_us(request, choice.learner.model))
        instance_id = self._reunion.claim(state.key, request.gateway_id)
        if instance_id is not None:
            books.adopt(state, instance_id)
        elif self._is_full_for(request):
            self._judge.refused(request, now_s)
            message = f"{len(books.queue)} requests are waiting"
            retry_after_s, closed_s = self._admission.when_full(state, bundle.order, now_s)
            books.reject(state, RejectReason.OVERLOADED, message, retry_after_s, closed_s=closed_s)
        elif self._is_too_long(request, bundle):
            message = f"{request.num_prompt_tokens} prompt tokens and {request.max_tokens} to generate fit no instance"
            books.reject(state, RejectReason.TOO_LONG, message, None)
        elif (refusal := self._admission.refusal(state, bundle.order, now_s)) is not None:
            self._judge.refused(request, now_s)
            message = (
                f"its first token is predicted {refusal.predicted_s:.2g} s from now, later than {refusal.limit_s:g} s"
            )
            books.reject(state, RejectReason.OVERLOADED, message, refusal.retry_after_s, closed_s=refusal.closed_s)
        else:
            books.queue.add(state, now_s + self._config.max_queue_s)
            self._relays.arrived(state, now_s)

    def _is_full_for(self, request: Request) -> bool:
        if request.epoch > 0:
            return False  # it was let in before, and half of its answer may be out
        queue = self._books.queue
        return (
            len(queue) >= self._config.max_queue_entries
            or queue.num_tokens + request.num_prompt_tokens > self._config.max_queue_tokens
        )

    def _is_too_long(self, request: Request, bundle: Bundle) -> bool:
        kinds = self._books.kinds
        return have_pair(kinds) and not could_place(request, kinds)

    def cancelled(self, event: RequestCancelled) -> None:
        was_orphan = self._reunion.forget(event.request_id, event.gateway_id)
        state = self._books.requests.get(event.request_id)
        if state is not None and state.request.gateway_id == event.gateway_id and state.request.epoch <= event.epoch:
            self._books.end(state, Outcome.CANCELLED, num_output_tokens=event.num_output_tokens)
        elif not was_orphan:
            self._books.ignore("RequestCancelled")

    def expire(self, now_s: float) -> None:
        """Refuse what has waited for too long."""
        retry_after_s = self._config.retry_after_s
        while (state := self._books.queue.first_due(now_s)) is not None:
            unready = unready_reason(self._books.instances.values())
            if unready is None and state.request.epoch > 0:  # it was let in before, and half of its answer may be out
                self._books.queue.postpone(state, now_s + self._config.max_queue_s)
            elif unready is None:
                self._judge.refused(state.request, now_s)
                message = f"no room for {self._config.max_queue_s:g} s"
                self._books.reject(state, RejectReason.QUEUE_TIMEOUT, message, retry_after_s)
            else:
                self._books.reject(state, RejectReason.NO_INSTANCE, unready, retry_after_s)
