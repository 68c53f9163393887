"""Deviations from the model: steps with random times, and instances that die and come back."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from math import log, sqrt

from pdmesh.model import InstanceId
from pdmesh.policy.latency import LatencyModel, StepShape


@dataclass(frozen=True, slots=True)
class Death:
    """End of an instance with all its state. Another process replaces it after `away_s`."""

    instance_id: InstanceId
    at_s: float
    away_s: float


def random_deaths(
    instance_ids: Sequence[InstanceId], number: int, within_s: float, away_s: float, seed: int
) -> list[Death]:
    """Draw ``number`` deaths in the first ``within_s``, in order of time; no instance dies while it is away.

    Raises ValueError if there are no instances, or too little time.
    """
    if number and not instance_ids:
        raise ValueError("there is no instance to lose")
    if number * away_s > within_s * len(instance_ids) / 2:
        raise ValueError(
            f"{len(instance_ids)} instances cannot be lost {number} times in {within_s:g} s, each for {away_s:g} s"
        )
    rng = random.Random(f"deaths {seed}")
    deaths: list[Death] = []
    while len(deaths) < number:
        death = Death(rng.choice(instance_ids), rng.uniform(0.0, within_s), away_s)
        others = [each for each in deaths if each.instance_id == death.instance_id]
        if all(abs(each.at_s - death.at_s) > away_s for each in others):
            deaths.append(death)
    return sorted(deaths, key=lambda each: each.at_s)


@dataclass(slots=True, eq=False)
class NoisyModel:
    """Latency model that multiplies each step's time by a random factor, log-normal with mean 1.

    ``noise`` is the factor's standard deviation. Every call is a step.
    """

    model: LatencyModel
    noise: float
    rng: random.Random

    def step_s(self, shape: StepShape) -> float:
        sigma = sqrt(log(1 + self.noise**2))
        return self.model.step_s(shape) * self.rng.lognormvariate(-(sigma**2) / 2, sigma)
