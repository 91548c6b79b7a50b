from __future__ import annotations

from engine.runtime.child.control import SetLogLevel, StartProfile, StopProfile
from engine.supervisor.runtime_overrides import RuntimeOverrides
from tests.runtime.child.test_child import SETTINGS


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_without_orders_the_settings_are_those_of_the_start():
    assert RuntimeOverrides().applied_to(SETTINGS) == SETTINGS


def test_the_last_level_is_that_of_who_starts_later():
    orders = RuntimeOverrides()
    orders.take(SetLogLevel("error"))
    orders.take(SetLogLevel("debug"))
    started = orders.applied_to(SETTINGS)
    assert started.config.log.log_level == "debug"
    assert started.config.server == SETTINGS.config.server


def test_who_starts_later_takes_part_in_the_rest_of_a_profile():
    clock = Clock()
    orders = RuntimeOverrides(clock)
    orders.take(StartProfile("profile-1", 100.0, 60.0))
    clock.now_s += 20.0
    assert orders.applied_to(SETTINGS).profile == StartProfile("profile-1", 100.0, 40.0)
    clock.now_s += 40.0
    assert orders.applied_to(SETTINGS).profile is None


def test_a_profile_that_was_ended_is_over():
    orders = RuntimeOverrides(Clock())
    orders.take(StartProfile("profile-1", 100.0, 60.0))
    orders.take(StopProfile())
    assert orders.applied_to(SETTINGS).profile is None
