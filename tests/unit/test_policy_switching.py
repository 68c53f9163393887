"""The switch cost, from when steps began and ended."""

from __future__ import annotations

import pytest

from pdmesh.policy.latency import LinearLatencyModel
from pdmesh.policy.switching import SwitchTimes

MODEL = LinearLatencyModel(a_s=0.006, b_s=1e-4, c_s=0.0, d_s=0.0)


def a_phase(times: SwitchTimes, at_s: float, *, into_s: float, between_s: float, back_s: float) -> float:
    """Decodes for a second, then two steps of prefill of 0.1 s each, with these gaps; when decodes begin again."""
    times.decoded(at_s, at_s + 1)
    for _ in range(2):
        times.prefilled(0.1)
    return at_s + 1 + into_s + 0.1 + between_s + 0.1 + back_s


def test_one_step_until_a_phase_was_seen() -> None:
    assert SwitchTimes().switch_s(MODEL) == 0.006


def test_the_whole_time_beyond_the_work_is_the_switch() -> None:
    times = SwitchTimes()
    now_s = a_phase(times, 5.0, into_s=0.004, between_s=0.001, back_s=0.007)
    times.decoded(now_s, now_s + 1)
    assert (times.num_phases, times.num_steps) == (1, 2)
    assert times.switch_s(MODEL) == pytest.approx(0.012 + 2 * 0.006)
    for into_s in (0.008, 0.012):
        now_s = a_phase(times, now_s, into_s=into_s, between_s=0.0, back_s=0.0)
    times.decoded(now_s, now_s + 1)
    assert times.overhead_s == pytest.approx((0.012 + 0.008 + 0.012) / 3)


def test_an_instance_with_nobody_to_decode_switches_nothing() -> None:
    times = SwitchTimes()
    a_phase(times, 0.0, into_s=0.0, between_s=0.0, back_s=0.0)
    times.forget()  # all residents had ended; the next ones come much later
    times.prefilled(0.1)
    times.decoded(60.0, 61.0)
    times.decoded(61.0, 62.0)  # and no prefill between these two
    assert times.num_phases == 0


def test_old_phases_are_forgotten() -> None:
    times = SwitchTimes()
    now_s = 0.0
    for overhead_s in [0.5] * 5 + [0.01] * 100:
        now_s = a_phase(times, now_s, into_s=overhead_s, between_s=0.0, back_s=0.0)
    times.decoded(now_s, now_s + 1)
    assert times.overhead_s == pytest.approx(0.01, rel=0.2)
