"""Modelled links: every instance has one port out and one port in, whose bandwidth its transfers share.

A port gives each transfer that uses it an equal share; a transfer moves at the smaller of its two shares. What it
leaves of the larger one is not handed on to others: ports are never overcommitted, and may be a little under-used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pdmesh.model import InstanceId, RequestKey
from pdmesh.sim.agenda import Agenda, Appointment


@dataclass(slots=True, eq=False)
class _Flow:
    """A transfer with bytes to move."""

    key: RequestKey
    sender: InstanceId
    receiver: InstanceId
    num_bytes: float
    since_s: float
    bytes_per_s: float = 0.0
    end: Appointment | None = None


class SimulatedLinks:
    """Moves the bytes of KV transfers in virtual time.

    ``on_drained`` is called when a transfer has moved all that it was given so far.
    """

    def __init__(self, agenda: Agenda, port_bytes_per_s: float, on_drained: Callable[[RequestKey], None]) -> None:
        self._agenda = agenda
        self._port_bytes_per_s = port_bytes_per_s
        self._on_drained = on_drained
        self._flows: dict[RequestKey, _Flow] = {}
        self._out: dict[InstanceId, dict[RequestKey, _Flow]] = {}
        self._in: dict[InstanceId, dict[RequestKey, _Flow]] = {}

    def send(self, key: RequestKey, sender: InstanceId, receiver: InstanceId, num_bytes: float) -> None:
        """Give a transfer bytes to move, beside those it has."""
        flow = self._flows.get(key)
        if flow is not None:
            self._settle(flow)
            flow.num_bytes += num_bytes
            self._appoint(flow)
            return
        flow = self._flows[key] = _Flow(key, sender, receiver, num_bytes, self._agenda.now_s)
        self._out.setdefault(sender, {})[key] = flow
        self._in.setdefault(receiver, {})[key] = flow
        self._share(flow)

    def drop(self, key: RequestKey) -> float:
        """Stop a transfer; the bytes that it has not moved."""
        flow = self._flows.pop(key, None)
        if flow is None:
            return 0.0
        self._settle(flow)
        if flow.end is not None:
            flow.end.cancel()
        del self._out[flow.sender][key], self._in[flow.receiver][key]
        self._share(flow)
        return flow.num_bytes

    def is_moving(self, key: RequestKey) -> bool:
        return key in self._flows

    def bytes_per_s(self, key: RequestKey) -> float:
        flow = self._flows.get(key)
        return 0.0 if flow is None else flow.bytes_per_s

    def _share(self, changed: _Flow) -> None:
        """A transfer came or went: those that share a port with it get another rate."""
        out, into = self._out[changed.sender], self._in[changed.receiver]
        for flow in (out | into).values():
            num_sharing = max(len(self._out[flow.sender]), len(self._in[flow.receiver]))
            bytes_per_s = self._port_bytes_per_s / num_sharing
            if bytes_per_s != flow.bytes_per_s:
                self._settle(flow)
                flow.bytes_per_s = bytes_per_s
                self._appoint(flow)

    def _settle(self, flow: _Flow) -> None:
        now_s = self._agenda.now_s
        flow.num_bytes = max(0.0, flow.num_bytes - flow.bytes_per_s * (now_s - flow.since_s))
        flow.since_s = now_s

    def _appoint(self, flow: _Flow) -> None:
        if flow.end is not None:
            flow.end.cancel()
        end_s = self._agenda.now_s + flow.num_bytes / flow.bytes_per_s
        flow.end = self._agenda.at(end_s, lambda: self._drained(flow))

    def _drained(self, flow: _Flow) -> None:
        self.drop(flow.key)
        self._on_drained(flow.key)
