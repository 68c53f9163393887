"""Modelled links: every instance has one port out and one port in, whose bandwidth its flows share.

A flow moves one request's KV between two instances: a transfer, or an exchange between members of a group. A port gives
each of its flows an equal share, and a flow moves at the smaller of its two shares. The unused rest of the larger share
goes to no other flow: ports are never overcommitted, and may be a little under-used.

If a link between two hosts is slower than the ports, its flows in one direction share it in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from pdmesh.model import InstanceId, RequestKey
from pdmesh_lab.sim.agenda import Agenda, Timer

#: The request, the sender and the receiver.
FlowId = tuple[RequestKey, InstanceId, InstanceId]


#: The sending host and the receiving host.
HostLink = tuple[str, str]


@dataclass(frozen=True, slots=True)
class HostLinks:
    """Hosts of the instances, and rates of the links between hosts. A link without a rate is not limited."""

    hosts: Mapping[InstanceId, str] = field(default_factory=dict[InstanceId, str])
    bytes_per_s: Mapping[HostLink, float] = field(default_factory=dict[HostLink, float])

    def between(self, sender: InstanceId, receiver: InstanceId) -> HostLink | None:
        """Return the limited link that two instances' flows share with others; None if there is none."""
        link = self.hosts.get(sender, ""), self.hosts.get(receiver, "")
        return link if link in self.bytes_per_s else None


@dataclass(slots=True, eq=False)
class _Flow:
    """Bytes of one flow that move at a common rate."""

    flow_id: FlowId
    num_bytes: float
    since_s: float
    link: HostLink | None = None
    bytes_per_s: float = 0.0
    end: Timer | None = None


class SimulatedLinks:
    """Movement of KV bytes in virtual time.

    ``on_drained`` is called when a flow has moved all its bytes.
    """

    def __init__(
        self,
        agenda: Agenda,
        port_bytes_per_s: float,
        on_drained: Callable[[FlowId], None],
        host_links: HostLinks | None = None,
    ) -> None:
        self._agenda = agenda
        self._port_bytes_per_s = port_bytes_per_s
        self._on_drained = on_drained
        self._host_links = host_links or HostLinks()
        self._on_link: dict[HostLink, dict[FlowId, _Flow]] = {}
        self._flows: dict[FlowId, _Flow] = {}
        self._out: dict[InstanceId, dict[FlowId, _Flow]] = {}
        self._in: dict[InstanceId, dict[FlowId, _Flow]] = {}
        self._cut_off: set[InstanceId] = set()

    def send(self, flow_id: FlowId, num_bytes: float) -> None:
        """Give a flow more bytes to move. Bytes to an instance that is cut off are lost."""
        flow = self._flows.get(flow_id)
        if flow is not None:
            self._settle(flow)
            flow.num_bytes += num_bytes
            self._appoint(flow)
            return
        _, sender, receiver = flow_id
        if receiver in self._cut_off:
            return
        link = self._host_links.between(sender, receiver)
        flow = self._flows[flow_id] = _Flow(flow_id, num_bytes, self._agenda.now_s, link)
        self._out.setdefault(sender, {})[flow_id] = flow
        self._in.setdefault(receiver, {})[flow_id] = flow
        if link is not None:
            self._on_link.setdefault(link, {})[flow_id] = flow
        self._share(flow)

    def drop(self, flow_id: FlowId) -> float:
        """Stop a flow. Return the number of bytes that it has not moved."""
        flow = self._flows.pop(flow_id, None)
        if flow is None:
            return 0.0
        self._settle(flow)
        if flow.end is not None:
            flow.end.cancel()
        _, sender, receiver = flow_id
        del self._out[sender][flow_id], self._in[receiver][flow_id]
        if flow.link is not None:
            del self._on_link[flow.link][flow_id]
        self._share(flow)
        return flow.num_bytes

    def cut_off(self, instance_id: InstanceId) -> None:
        """Stop all flows from and to an instance, and lose later ones to it, until `connect`."""
        self._cut_off.add(instance_id)
        for flow_id in [*self._out.get(instance_id, ()), *self._in.get(instance_id, ())]:
            self.drop(flow_id)

    def connect(self, instance_id: InstanceId) -> None:
        """Let flows to an instance move again after `cut_off`."""
        self._cut_off.discard(instance_id)

    def bytes_per_s(self, flow_id: FlowId) -> float:
        flow = self._flows.get(flow_id)
        return 0.0 if flow is None else flow.bytes_per_s

    def alone_s(self, sender: InstanceId, receiver: InstanceId, num_bytes: float) -> float:
        """Return how long KV takes alone on a limited link between two hosts; 0 on any other link."""
        link = self._host_links.between(sender, receiver)
        if link is None:
            return 0.0
        return num_bytes / min(self._port_bytes_per_s, self._host_links.bytes_per_s[link])

    def _share(self, changed: _Flow) -> None:
        """Set the rates of all flows that share a port or a link with a flow that was added or removed."""
        _, sender, receiver = changed.flow_id
        sharing = self._out[sender] | self._in[receiver]
        if changed.link is not None:
            sharing |= self._on_link[changed.link]
        for flow in sharing.values():
            num_sharing = max(len(self._out[flow.flow_id[1]]), len(self._in[flow.flow_id[2]]))
            bytes_per_s = self._port_bytes_per_s / num_sharing
            if flow.link is not None:
                share = self._host_links.bytes_per_s[flow.link] / len(self._on_link[flow.link])
                bytes_per_s = min(bytes_per_s, share)
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
        self.drop(flow.flow_id)
        self._on_drained(flow.flow_id)
