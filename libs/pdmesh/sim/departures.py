"""Prompts that a modelled instance computes, and their KV on its way to where they decode.

KV moves layer by layer. A chunk's KV may move from the moment its step begins, except the last layer's, which may when
the step has ended; so a transfer never lands before its prompt is computed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pdmesh.core.events import Event, TransferOffered, TransferPaused, TransferSent
from pdmesh.model import NO_TRANSFER, InstanceId, InstanceProfile, RequestKey, TransferId
from pdmesh.plans import ChunkPlan, TransferPlan
from pdmesh.sim.agenda import Agenda
from pdmesh.sim.links import FlowId, SimulatedLinks
from pdmesh.sim.result import RequestRun


@dataclass(slots=True, eq=False)
class Prefill:
    """A request whose prompt is computed here."""

    run: RequestRun
    transfer: TransferPlan | None  # that moves its KV on; None if it stays, or has no receiver yet
    moves_on: bool
    num_computed_tokens: int = 0
    last_turn: int | None = None  # the planned step that had its latest chunk
    granted: bool = False
    granted_s: float | None = None  # for the first time
    computed_s: float | None = None
    num_unsent_bytes: float = 0.0
    num_ready_bytes: float = 0.0  # those, and all that was given to its receiver


class SimulatedDepartures:
    """Transfers that leave an instance. ``land`` hears of those that moved whole, ``release`` of KV gone from here."""

    def __init__(
        self,
        profile: InstanceProfile,
        *,
        agenda: Agenda,
        links: SimulatedLinks,
        report: Callable[[Event], None],
        land: Callable[[TransferPlan, RequestKey, float], None],
        release: Callable[[RequestKey], None],
    ) -> None:
        layout = profile.kv_layout
        self.token_bytes = layout.token_bytes
        self.last_layer_share = 1 / layout.num_layers
        self.prefills: dict[RequestKey, Prefill] = {}
        self._instance_id: InstanceId = profile.instance_id
        self._agenda = agenda
        self._links = links
        self._report = report
        self._land = land
        self._release = release

    def num_kv_bytes(self, run: RequestRun) -> int:
        return run.current.num_prompt_tokens * self.token_bytes

    def offer(self, key: RequestKey, prefill: Prefill) -> None:
        """Its first chunk begins."""
        if prefill.moves_on:
            transfer_id = NO_TRANSFER if prefill.transfer is None else prefill.transfer.transfer_id
            self._report(TransferOffered(self._instance_id, *key, transfer_id))

    def began(self, key: RequestKey, prefill: Prefill, chunk: ChunkPlan) -> None:
        """A chunk of it is computed: all layers but the last one may move."""
        self._move(key, prefill, chunk.num_tokens * self.token_bytes * (1 - self.last_layer_share))

    def ended(self, key: RequestKey, prefill: Prefill, chunk: ChunkPlan) -> None:
        self._move(key, prefill, chunk.num_tokens * self.token_bytes * self.last_layer_share)

    def came(self, key: RequestKey, num_tokens: int) -> None:
        """Others computed so many tokens of it, and their KV is here now."""
        self._move(key, self.prefills[key], num_tokens * self.token_bytes)

    def forget(self, key: RequestKey) -> None:
        """Forget a prompt that ends, or decodes, where it is."""
        prefill = self.prefills.pop(key)
        if prefill.transfer is not None:
            self._links.drop(self._flow(key, prefill.transfer))

    def keep(self, key: RequestKey) -> RequestRun | None:
        """What was to move away decodes here: now, if it is computed."""
        prefill = self.prefills[key]
        assert prefill.transfer is None, f"{key}: kept, and has a receiver"
        prefill.moves_on = False
        if prefill.computed_s is None:
            return None
        self.forget(key)
        return prefill.run

    def grant(self, key: RequestKey, transfer: TransferPlan) -> None:
        prefill = self.prefills.get(key)
        if prefill is None:
            return  # the request ended with its first token while the grant was on its way
        assert prefill.last_turn is not None, f"{key}: granted without an offer"
        prefill.granted, prefill.transfer = True, transfer
        if prefill.granted_s is None:
            prefill.granted_s = self._agenda.now_s
        self._move(key, prefill, 0.0)

    def pause(self, key: RequestKey) -> None:
        prefill = self.prefills[key]
        assert prefill.granted, f"{key}: paused without a grant"
        assert prefill.transfer is not None
        prefill.granted = False
        prefill.num_unsent_bytes += self._links.drop(self._flow(key, prefill.transfer))
        self._report(TransferPaused(self._instance_id, *key, prefill.transfer.transfer_id))

    def withdraw(self, key: RequestKey, transfer_id: TransferId) -> None:
        """Its receiver is none any more: all that is computed goes to the next one."""
        prefill = self.prefills.get(key)
        if prefill is None or prefill.transfer is None or prefill.transfer.transfer_id != transfer_id:
            return
        self._links.drop(self._flow(key, prefill.transfer))
        prefill.transfer, prefill.granted, prefill.granted_s = None, False, None
        prefill.num_unsent_bytes = prefill.num_ready_bytes

    def drained(self, key: RequestKey) -> None:
        """All KV that may move so far has moved; it has landed if that is all of it."""
        prefill = self.prefills[key]
        if prefill.computed_s is None:
            return
        assert prefill.granted_s is not None
        assert prefill.transfer is not None
        plan, now_s = prefill.transfer, self._agenda.now_s
        num_bytes, duration_s = self.num_kv_bytes(prefill.run), now_s - prefill.granted_s
        prefill.run.granted_s, prefill.run.landed_s = prefill.granted_s, now_s
        prefill.run.exposed_s = now_s - prefill.computed_s
        del self.prefills[key]
        self._land(plan, key, duration_s)
        self._report(
            TransferSent(self._instance_id, *key, plan.transfer_id, num_bytes, duration_s, prefill.run.exposed_s)
        )
        self._release(key)

    def _move(self, key: RequestKey, prefill: Prefill, num_bytes: float) -> None:
        if not prefill.moves_on:
            return
        prefill.num_unsent_bytes += num_bytes
        prefill.num_ready_bytes += num_bytes
        if prefill.granted:
            assert prefill.transfer is not None
            self._links.send(self._flow(key, prefill.transfer), prefill.num_unsent_bytes)
            prefill.num_unsent_bytes = 0.0

    def _flow(self, key: RequestKey, transfer: TransferPlan) -> FlowId:
        return key, self._instance_id, transfer.destination_ids[0]
