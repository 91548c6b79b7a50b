from __future__ import annotations

from msgspec.structs import replace

from engine.launch.child.control import SetAdapters, SetLogLevel, StartProfile, StopProfile
from engine.runtime.adapter_spec import AdapterSpec, LoadedAdapter
from engine.supervisor.runtime_overrides import RuntimeOverrides, described
from tests.launch.child.test_child import SETTINGS


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


def test_who_starts_later_has_the_adapters_that_are_loaded_now():
    one, two = (
        LoadedAdapter(number, AdapterSpec(name, f"/{name}", name * 32, 4, 100))
        for number, name in enumerate("ab", start=1)
    )
    of_the_start = replace(SETTINGS, adapters=(one,))
    orders = RuntimeOverrides()
    assert orders.applied_to(of_the_start).adapters == (one,)
    orders.take(SetAdapters((one, two)))
    assert orders.applied_to(of_the_start).adapters == (one, two)
    orders.take(SetAdapters(()))
    assert orders.applied_to(of_the_start).adapters == ()
    assert orders.applied_to(of_the_start).config == SETTINGS.config


def test_the_log_has_names_instead_of_specs():
    adapters = tuple(LoadedAdapter(1, AdapterSpec(name, "/x", "f", 4, 100)) for name in ("a", "b"))
    assert described(SetAdapters(adapters)) == "adapters a, b"
    assert described(SetAdapters(())) == "adapters none"
