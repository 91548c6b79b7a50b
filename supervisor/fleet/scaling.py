"""`ScalePolicy`: how many replicas a fleet should have, from what waits at each. No clock and no I/O of its own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from ...runtime.config.setting_declaration import check_at_least, check_finite
from ...runtime.errors import ConfigError

MAX_REPLICAS: Final = 512


class Load(NamedTuple):
    """What one server reports in `/v1/loads`, all its ranks together.

    Attributes:
        queue_tokens: prompt tokens of the requests that wait.
        busy: the larger of two shares: KV memory in use, and running requests of those that may run at once.
    """

    queue_tokens: int = 0
    busy: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleBounds:
    """When the number of replicas changes.

    Attributes:
        min_replicas, max_replicas: it stays within these.
        queue_tokens: tokens that may wait per replica.
        up_after_s: more than that have waited for so long when replicas are added.
        down_after_s: so long has one replica less been enough when one is taken away.
        spare: what one replica less is enough for: nothing waits, and the others would be busy up to this share.
    """

    min_replicas: int
    max_replicas: int
    queue_tokens: int = 8192
    up_after_s: float = 10.0
    down_after_s: float = 300.0
    spare: float = 0.5

    def __post_init__(self) -> None:
        check_at_least("min_replicas", self.min_replicas, 1)
        check_at_least("scale_queue_tokens", self.queue_tokens, 1)
        for name, value in (("scale_up_after", self.up_after_s), ("scale_down_after", self.down_after_s)):
            check_finite(name, value, 0.0, open_end=False)
        if not self.min_replicas <= self.max_replicas <= MAX_REPLICAS:
            raise ConfigError(
                f"max_replicas is {self.max_replicas}, but it must lie in [{self.min_replicas}, {MAX_REPLICAS}], from "
                "min_replicas up"
            )

    @property
    def is_fixed(self) -> bool:
        """Whether the load changes nothing."""
        return self.min_replicas == self.max_replicas


class ScalePolicy:
    """Adds replicas soon and takes them away late, one by one.

    Two thresholds lie apart, and each must hold for a time, so that a fleet does not swing. Nothing changes while a
    replica starts: its effect is not known yet.
    """

    def __init__(self, bounds: ScaleBounds) -> None:
        self._bounds = bounds
        self._crowded_since_s: float | None = None
        self._idle_since_s: float | None = None

    def reset(self) -> None:
        """Begin to measure both times anew, after the number of replicas has changed."""
        self._crowded_since_s = self._idle_since_s = None

    def target(self, now_s: float, target: int, loads: Sequence[Load], num_pending: int) -> int:
        """The number of replicas that there should be.

        Args:
            now_s: on any monotonic clock.
            target: the number so far.
            loads: of the replicas that serve.
            num_pending: replicas that start, or wait to be started again.
        """
        bounds = self._bounds
        if bounds.is_fixed or not loads or num_pending:
            self.reset()
            return target
        waiting = sum(load.queue_tokens for load in loads)
        is_crowded = waiting > bounds.queue_tokens * len(loads)
        self._crowded_since_s = _since(is_crowded, self._crowded_since_s, now_s)
        self._idle_since_s = _since(self._is_idle(waiting, loads), self._idle_since_s, now_s)
        if _has_lasted(self._crowded_since_s, bounds.up_after_s, now_s):
            needed = math.ceil(waiting / bounds.queue_tokens)
            wanted = min(max(needed, target + 1), 2 * target, bounds.max_replicas)
        elif _has_lasted(self._idle_since_s, bounds.down_after_s, now_s):
            wanted = max(target - 1, bounds.min_replicas)
        else:
            return target
        if wanted != target:
            self.reset()
        return wanted

    def _is_idle(self, waiting: int, loads: Sequence[Load]) -> bool:
        if waiting or len(loads) < 2:
            return False
        return sum(load.busy for load in loads) / (len(loads) - 1) <= self._bounds.spare


def _since(holds: bool, since_s: float | None, now_s: float) -> float | None:
    if not holds:
        return None
    return now_s if since_s is None else since_s


def _has_lasted(since_s: float | None, needed_s: float, now_s: float) -> bool:
    return since_s is not None and now_s - since_s >= needed_s
