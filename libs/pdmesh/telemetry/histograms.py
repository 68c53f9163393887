"""Histograms of one event loop, cheap enough for each token and each step: no locks, one look-up."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class Observations:
    """Counts and sum of the values observed for one model."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, amount: float, count: int = 1) -> None:
        """Count an amount ``count`` times."""
        self.counts[bisect_left(self._bounds, amount)] += count
        self.total += amount * count


class LoopHistogram(Collector):
    """Histogram with one series for each model."""

    def __init__(self, name: str, documentation: str, bounds: Sequence[float], registry: CollectorRegistry) -> None:
        self._name = name
        self._documentation = documentation
        self._bounds = bounds
        self._by_model: dict[str, Observations] = {}
        registry.register(self)

    def of(self, model: str) -> Observations:
        """Return the observations of a model; a new model gets empty ones."""
        return self._by_model.setdefault(model, Observations(self._bounds))

    def describe(self) -> Iterable[Metric]:
        return [HistogramMetricFamily(self._name, self._documentation)]

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self._name, self._documentation, labels=["model_name"])
        names = [*map(floatToGoString, self._bounds), "+Inf"]
        for model, observed in self._by_model.items():
            buckets = list(zip(names, accumulate(observed.counts), strict=True))
            family.add_metric([model], buckets=buckets, sum_value=observed.total)
        yield family
