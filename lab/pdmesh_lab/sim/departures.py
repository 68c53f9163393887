"""Prompts that a simulated instance computes, and their KV on its way to the instances that decode them.

KV moves layer by layer. A chunk's KV may move from the start of its step, except the last layer's, which may move when
the step has ended. So a transfer never lands before its prompt is computed.
"""

from __future__ import annotations

from dataclasses import dataclass

from pdmesh.instance.effects import CopySent
from pdmesh.instance.sequence import Sequence
from pdmesh.kv_layout import GRANULE_TOKENS
from pdmesh.model import RequestKey, Then
from pdmesh.plans import TransferPlan
from pdmesh_lab.sim.flows import SimulatedFlows
from pdmesh_lab.sim.result import RequestRun


@dataclass(slots=True, eq=False)
class Prefill:
    """A request whose prompt is computed here.

    `last_turn` is the planned step of its latest chunk. `granted` is the latest transfer, first granted at `granted_s`.
    `num_ready_bytes` of KV are computed and may move. Of these, `num_sent_bytes` were given to the links or reused at
    the receiver.
    """

    sequence: Sequence
    run: RequestRun
    last_turn: int | None = None
    granted: TransferPlan | None = None
    granted_s: float = 0.0
    computed_s: float | None = None
    num_ready_bytes: float = 0.0
    num_sent_bytes: float = 0.0


class SimulatedDepartures:
    """Transfers of computed prompts that leave an instance."""

    def __init__(self, flows: SimulatedFlows) -> None:
        self._flows = flows
        self.token_bytes = flows.layout.token_bytes
        self.last_layer_share = 1 / flows.layout.num_layers
        self.prefills: dict[RequestKey, Prefill] = {}

    def num_kv_bytes(self, run: RequestRun, transfer: TransferPlan) -> int:
        """Return the number of bytes that a transfer of a prompt's KV moves."""
        num_there = transfer.num_reused_granules * GRANULE_TOKENS
        return (run.current.num_prompt_tokens - num_there) * self.token_bytes

    def began(self, prefill: Prefill, num_tokens: int) -> None:
        """Note that ``num_tokens`` of a prompt are being computed: all layers but the last one may move."""
        self._move(prefill, num_tokens * self.token_bytes * (1 - self.last_layer_share))

    def ended(self, prefill: Prefill, num_tokens: int) -> None:
        self._move(prefill, num_tokens * self.token_bytes * self.last_layer_share)

    def came(self, key: RequestKey, num_tokens: int) -> None:
        """Note that KV of ``num_tokens``, computed by other instances, has arrived and may move on."""
        self._move(self.prefills[key], num_tokens * self.token_bytes)

    def forget(self, key: RequestKey) -> Prefill | None:
        """Forget a prompt that ends or decodes here, and stop its transfer. Return the prompt if it was known."""
        prefill = self.prefills.pop(key, None)
        if prefill is not None and prefill.granted is not None:
            self._flows.drop(key, prefill.granted)
        return prefill

    def send(self, sequence: Sequence, transfer: TransferPlan) -> None:
        """Send the KV that is ready under a transfer; to a new receiver, send all computed KV."""
        prefill = self.prefills[sequence.key]
        if prefill.granted is None or prefill.granted.transfer_id != transfer.transfer_id:
            prefill.granted, prefill.granted_s = transfer, self._flows.agenda.now_s
            prefill.num_sent_bytes = float(transfer.num_reused_granules * GRANULE_TOKENS * self.token_bytes)
        self._move(prefill, 0.0)

    def stop(self, key: RequestKey, transfer: TransferPlan) -> None:
        self.prefills[key].num_sent_bytes -= self._flows.drop(key, transfer)

    def drained(self, key: RequestKey) -> None:
        """Note that all KV ready so far has moved. If the prompt is computed, land its transfer.

        Of a prompt longer than this instance's room, land each whole range.
        """
        prefill = self.prefills[key]
        if prefill.computed_s is None:
            self._land_ranges(prefill)
            return
        run, transfer = prefill.run, prefill.granted
        assert transfer is not None
        now_s = self._flows.agenda.now_s
        num_bytes, duration_s = self.num_kv_bytes(run, transfer), now_s - prefill.granted_s
        run.granted_s, run.landed_s, run.exposed_s = prefill.granted_s, now_s, now_s - prefill.computed_s
        del self.prefills[key]
        self._flows.land(transfer, key, duration_s)
        sent_s = self._flows.alone_s(transfer, num_bytes)
        destination_id = transfer.destination_ids[0] if sent_s else None
        sent = CopySent(key, Then.DECODE, num_bytes, duration_s, run.exposed_s, sent_s, destination_id)
        self._flows.tell(sent)

    def _land_ranges(self, prefill: Prefill) -> None:
        sequence, prompt = prefill.sequence, prefill.sequence.prompt
        if prompt.num_blocks_at_once and sequence.transfer is not None:
            duration_s = self._flows.agenda.now_s - prefill.granted_s
            self._flows.land_ranges(sequence.transfer, sequence.key, prompt.num_computed_tokens, duration_s)

    def _move(self, prefill: Prefill, num_bytes: float) -> None:
        onward = prefill.sequence.onward
        if onward is None:
            return
        prefill.num_ready_bytes += num_bytes
        if onward.is_sending:
            assert onward.transfer is not None
            num_unsent_bytes = max(0.0, prefill.num_ready_bytes - prefill.num_sent_bytes)
            self._flows.send(prefill.sequence.key, onward.transfer, num_unsent_bytes)
            prefill.num_sent_bytes += num_unsent_bytes
