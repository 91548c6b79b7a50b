"""`Histogram`, `LabeledCounter` and `sample`: the parts of a page in Prometheus' text format.

prometheus_client is not used: it takes 55 ms to import (it has an HTTP server), counts under a lock, and needs to own
the counters, which are the scheduler's.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_PREFIX: Final = "engine:"

NO_LABELS: Final[Mapping[str, str]] = {}


def head(name: str, text: str, kind: str) -> tuple[str, str]:
    """The two lines before the samples of a metric."""
    return f"# HELP {_PREFIX}{name} {text}", f"# TYPE {_PREFIX}{name} {kind}"


def sample(name: str, labels: Mapping[str, str], value: object) -> str:
    """One line with a value."""
    if not labels:
        return f"{_PREFIX}{name} {value!r}"
    shown = ",".join(f'{label}="{_escaped(text)}"' for label, text in labels.items())
    return f"{_PREFIX}{name}{{{shown}}} {value!r}"


def _escaped(value: str) -> str:
    """A label's value, escaped for the text format."""
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


class Histogram:
    """Counts observations by bucket."""

    def __init__(self, name: str, text: str, buckets: Sequence[float]) -> None:
        self._name = name
        self._text = text
        self._bounds = tuple(buckets)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Count `value` `count` times."""
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def lines(self, labels: Mapping[str, str] = NO_LABELS) -> Iterator[str]:
        """Its lines of the text format."""
        yield from head(self._name, self._text, "histogram")
        yield from buckets(self._name, self._bounds, self._counts, self._sum, labels)


def buckets(
    name: str, bounds: Sequence[float], counts: Sequence[int], total: float, labels: Mapping[str, str]
) -> Iterator[str]:
    """The samples of a histogram, which are cumulative; `counts`: one more than bounds; `total`: of all values."""
    num_below = 0
    for bound, count in zip((*bounds, float("inf")), counts, strict=True):
        num_below += count
        text = "+Inf" if bound == float("inf") else f"{bound:g}"
        yield sample(f"{name}_bucket", {**labels, "le": text}, num_below)
    yield sample(f"{name}_sum", labels, total)
    yield sample(f"{name}_count", labels, num_below)


class LabeledCounter:
    """A counter with one label of its own that has few values."""

    def __init__(self, name: str, text: str, label: str) -> None:
        self._name = name
        self._text = text
        self._label = label
        self._counts: dict[str, int] = {}

    def add(self, value: str) -> None:
        """Add 1 for this label value."""
        self._counts[value] = self._counts.get(value, 0) + 1

    def lines(self, labels: Mapping[str, str] = NO_LABELS) -> Iterator[str]:
        """Its lines of the text format."""
        yield from head(self._name, self._text, "counter")
        for value, count in sorted(self._counts.items()):
            yield sample(self._name, {**labels, self._label: value}, count)
