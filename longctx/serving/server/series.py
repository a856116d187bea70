"""Series of numbers that an engine's thread writes and a scrape reads: a few list operations, no lock.

`prometheus_client`'s own take a lock and some microseconds for each value, which a step has by the hundred. Here one
thread writes a series; whoever reads it makes families of it, which `prometheus_client` renders.
"""

import itertools
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

TTFT = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
    640,
    2560,
)
GAP = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
DURATION = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
COMPLETIONS = (1, 2, 5, 10, 20)


def one_two_five(most: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, ... up to `most`."""
    numbers = (digit * 10**power for power in itertools.count() for digit in (1, 2, 5))
    return tuple(itertools.takewhile(lambda number: number <= most, numbers))


class Histogram:
    """Counts of values up to each bound, and of those beyond the last one."""

    def __init__(self, help: str, bounds: Iterable[float]) -> None:
        self.help, self.bounds = help, tuple(map(float, bounds))
        self.counts, self.sum = [0] * (len(self.bounds) + 1), 0.0

    def observe(self, value: float, count: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += count
        self.sum += value * count

    def observe_all(self, values: Iterable[float]) -> None:
        """Observe values of which many are equal."""
        for value, count in Counter(values).items():
            self.observe(value, count)

    def family(self, name: str, labels: Mapping[str, str]) -> Metric:
        family = HistogramMetricFamily(name, self.help, labels=list(labels))
        totals = itertools.accumulate(self.counts.copy())
        bounds = [*map(str, self.bounds), "+Inf"]
        family.add_metric(list(labels.values()), list(zip(bounds, totals, strict=True)), self.sum)
        return family


def gauge(name: str, help: str, labels: Mapping[str, str], value: float) -> Metric:
    """The family of one gauge."""
    return gauges(name, help, labels, "", {"": value})


def gauges(name: str, help: str, labels: Mapping[str, str], label: str, values: Mapping[str, float]) -> Metric:
    """The family of a gauge for each value of one more label; none where `label` is empty."""
    family = GaugeMetricFamily(name, help, labels=[*labels, label] if label else list(labels))
    return _filled(family, labels, label, values)


def counter(name: str, help: str, labels: Mapping[str, str], value: float) -> Metric:
    """The family of one counter, whose name ends in `_total` when it is rendered."""
    return counters(name, help, labels, "", {"": value})


def counters(name: str, help: str, labels: Mapping[str, str], label: str, values: Mapping[str, float]) -> Metric:
    """The family of a counter for each value of one more label; none where `label` is empty."""
    family = CounterMetricFamily(name, help, labels=[*labels, label] if label else list(labels))
    return _filled(family, labels, label, values)


def table(
    kind: type[CounterMetricFamily] | type[GaugeMetricFamily],
    name: str,
    help: str,
    labels: Mapping[str, str],
    columns: Sequence[str],
    rows: Mapping[Any, float],
) -> Metric:
    """The family of counters or gauges with several more labels, whose values are the tuples of `rows`."""
    family = kind(name, help, labels=[*labels, *columns])
    for own, value in tuple(rows.items()):
        family.add_metric([*labels.values(), *own], value)
    return family


def _filled(
    family: CounterMetricFamily | GaugeMetricFamily, labels: Mapping[str, str], label: str, values: Mapping[str, float]
) -> Metric:
    for own, value in tuple(values.items()):
        family.add_metric([*labels.values(), own] if label else list(labels.values()), value)
    return family


class Window:
    """Sums of the last rows of numbers."""

    def __init__(self, length: int, width: int) -> None:
        self._rows: deque[tuple[float, ...]] = deque(maxlen=length)
        self._width = width

    def add(self, *row: float) -> None:
        self._rows.append(row)

    @property
    def sums(self) -> tuple[float, ...]:
        rows = tuple(self._rows)
        return tuple(map(sum, zip(*rows, strict=True))) if rows else (0.0,) * self._width
