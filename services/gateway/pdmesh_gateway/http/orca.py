"""How loaded the mesh is, in a response's header, for proxies that balance by it (ORCA, as Envoy and vLLM have it)."""

from __future__ import annotations

import json

from pdmesh.wire.messages import MeshStatus

#: A request asks with this header for the other one, as ``TEXT`` or ``JSON``.
ASKING, REPORTING = "endpoint-load-metrics-format", b"endpoint-load-metrics"


def load_report(form: str, state: MeshStatus | None) -> bytes | None:
    """Return the header's value; None for a form that is not known, or before the mesh has said anything."""
    if state is None:
        return None
    num_blocks = sum(instance.num_blocks for instance in state.instances)
    num_free = sum(instance.num_free_blocks for instance in state.instances)
    metrics = {
        "kv_cache_usage_perc": round(1 - num_free / num_blocks, 4) if num_blocks else 0.0,
        "num_requests_waiting": state.num_waiting,
        "num_requests_running": state.num_running,
    }
    match form.upper():
        case "TEXT":
            return b"TEXT " + ", ".join(f"named_metrics.{name}={value}" for name, value in metrics.items()).encode()
        case "JSON":
            return b"JSON " + json.dumps({"named_metrics": metrics}).encode()
        case _:
            return None
