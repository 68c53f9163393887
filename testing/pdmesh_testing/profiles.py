"""A profile file as `pdmesh profile` writes them."""

from __future__ import annotations

from pdmesh import __version__
from pdmesh.policy.latency_profile import Subject
from pdmesh.profiles import FORMAT, ProfileFile

SUBJECT = Subject(
    model="small",
    num_parameters=82_000_000,
    num_layers=12,
    num_kv_heads=4,
    head_dim=64,
    dtype="bfloat16",
    device="cpu",
    device_name="Abacus 9000",
)
COEFFICIENTS = {
    "a_s": 0.02,
    "b_s": 1e-4,
    "c_s": 7e-8,
    "d_s": 1e-7,
    "decode_a_s": 0.02,
    "decode_s": 0.0,
    "decode_context_s": 1e-6,
    "mixed_a_s": 0.03,
    "interference_s": 1e-5,
    "weights_s": 0.01,
}


def profile_file(subject: Subject) -> ProfileFile:
    return ProfileFile(
        format=FORMAT,
        subject=subject,
        num_threads=1,
        measured_at="2026-11-21T00:00:00+00:00",
        pdmesh_version=__version__,
        num_steps=29,
        num_held_out=15,
        mean_error=0.04,
        worst_error=0.1,
        coefficients=COEFFICIENTS,
    )
