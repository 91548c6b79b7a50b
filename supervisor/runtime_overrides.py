"""`RuntimeOverrides`: orders that all processes received at run time, for processes that are started later."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import assert_never

from msgspec.structs import replace

from ..launch.child.control import ForAll, SetAdapters, SetLogLevel, Settings, StartProfile, StopProfile
from ..runtime.config.server_config import LogLevel
from ..runtime.logs import with_log_level


class RuntimeOverrides:
    """The supervisor's record of these orders."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._log_level: LogLevel | None = None
        self._profile: StartProfile | None = None
        self._profile_end_s = 0.0
        self._adapters: SetAdapters | None = None

    def take(self, order: ForAll) -> None:
        """Record an order."""
        match order:
            case SetLogLevel(level=level):
                self._log_level = level
            case StartProfile():
                self._profile = order
                self._profile_end_s = self._clock() + order.duration_s
            case StopProfile():
                self._profile = None
            case SetAdapters():
                self._adapters = order
            case _:
                assert_never(order)

    def applied_to(self, settings: Settings) -> Settings:
        """The settings of a process that starts now, with the recorded orders applied."""
        if self._log_level is not None:
            settings = replace(settings, config=with_log_level(settings.config, self._log_level))
        if self._adapters is not None:
            settings = replace(settings, adapters=self._adapters.adapters)
        left_s = self._profile_end_s - self._clock()
        if self._profile is not None and left_s > 0:
            settings = replace(settings, profile=replace(self._profile, duration_s=left_s))
        return settings


def described(order: ForAll) -> str:
    """An order for the log."""
    if isinstance(order, SetAdapters):
        return "adapters " + (", ".join(adapter.spec.name for adapter in order.adapters) or "none")
    return str(order)
