"""`make_policy`: from the name in the configuration to the object."""

from __future__ import annotations

from ...runtime.config import SchedulerConfig
from ...runtime.errors import ConfigError
from .base import PolicyParts, SchedulePolicy
from .fcfs import Fcfs
from .lpm import Lpm


def make_policy(config: SchedulerConfig, parts: PolicyParts) -> SchedulePolicy:
    """The policy that `config.schedule_policy` names."""
    match config.schedule_policy:
        case "fcfs":
            return Fcfs()
        case "lpm":
            return Lpm(parts)
        case other:
            raise ConfigError(f"schedule_policy {other!r} is not there yet")
