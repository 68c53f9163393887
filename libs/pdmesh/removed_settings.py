"""Settings of earlier versions, with advice for a file, a variable or a flag that still gives one."""

from __future__ import annotations

from collections.abc import Mapping


def _removed() -> Mapping[str, str]:
    fixed = {
        "gateway.max_body_values": "2,000,000",
        "gateway.max_messages": "8,192",
        "gateway.max_n": "128",
        "gateway.body_timeout_s": "30 s",
        "gateway.sse_keep_alive_s": "10 s",
        "gateway.no_instance_grace_s": "5 s",
        "scheduler.plans_in_flight": "2",
        "scheduler.max_queue_bytes": "512 MiB",
        "scheduler.kv_risk": "0.01",
        "scheduler.recent_decisions": "20,000",
        "scheduler.event_log_max_bytes": "1 GiB",
        "scheduler.event_log_keep": "3",
        "scheduler.max_records": "10,000",
        "policy.slo_ttft_stretch": "2",
        "policy.max_chunk_tokens": "8,192",
        "policy.max_shared": "0.4",
        "policy.spare_slack": "0.25",
        "policy.min_share": "0.125",
        "policy.max_step_overhead": "0.05",
        "policy.max_group_step_overhead": "0.1",
        "policy.give_way": "2",
        "policy.colocate_tokens": "8,192",
        "policy.waiting_kv_share": "0.5",
        "policy.local_step_share": "0.6",
        "policy.max_stall_s": "0.2 s",
        "worker.num_speculative_tokens": "4",
        "worker.prompt_lookup_min": "2",
        "worker.prompt_lookup_max": "4",
        "worker.prefill_attention": "auto",
        "transfer.transport": "ucx",
        "transfer.num_backends": "8",
        "transfer.device_payload_bytes": "8 MiB",
        "transfer.message_bytes": "2 MiB",
        "transfer.num_send_buffers": "16",
        "transfer.num_receive_buffers": "16",
        "supervisor.hang_s": "60 s",
        "supervisor.log_max_bytes": "64 MiB",
        "supervisor.log_keep": "2",
    }
    follows = {
        "gateway.max_queued_bytes": "gateway.max_body_bytes (16 times that, at least 512 MiB)",
        "scheduler.gateway_lease_s": "scheduler.lease_s (6 times that)",
        "scheduler.heartbeat_s": "scheduler.lease_s (a fifth of that)",
        "transfer.deadline_s": "transfer.no_progress_s (12 times that)",
        "transfer.network_no_progress_s": "transfer.no_progress_s (a fifth of that)",
        "transfer.group_no_progress_s": "transfer.no_progress_s (3 times that)",
    }
    others = {
        "gateway.strict_fields": "read the response header `x-ignored-fields` instead, and delete it",
        "scheduler.admission_ttft_s": "give requests a target (`slo_ttft_ms`), or set scheduler.max_queue_s; delete it",
        "policy.eb_threshold": "give it to `pdmesh policy set eb --threshold`, and delete it",
        "policy.reserved_instances": "it belongs to the bundle `reservation` of the studies; delete it",
        "policy.prefills_locally": "to turn this off, choose another scheduler.bundle than pdmesh; delete it",
        "policy.decodes_locally": "to turn this off, choose another scheduler.bundle than pdmesh; delete it",
        "worker.kv_cache_host_share": "set worker.kv_cache_bytes, and delete it",
    }
    return {
        **{name: f"its value is fixed at {value}; delete it" for name, value in fixed.items()},
        **{name: f"it follows from {source}; set that instead" for name, source in follows.items()},
        **others,
    }


#: Advice by the name of the removed setting.
REMOVED = _removed()
