"""`make_policy`: from the name in the configuration to the object."""

from __future__ import annotations

from typing import assert_never

from ...runtime.config.engine_config import SchedulerConfig
from .adaptive import Adaptive
from .base import PolicyParts, SchedulePolicy
from .baselines import FifoSerial, Hrrn, Lof, RandomOrder, StaticBatch
from .dfs_weight import DfsWeight
from .fair import Fair
from .key_orders import Fcfs, Lpm, Priority, Sjf, Srtf, make_length_estimate
from .round_robin import RoundRobin


def make_policy(config: SchedulerConfig, parts: PolicyParts) -> SchedulePolicy:
    """The policy that `config.schedule_policy` names."""
    match config.schedule_policy:
        case "fcfs":
            return Fcfs()
        case "lpm":
            return Lpm(parts)
        case "dfs-weight":
            return DfsWeight(parts)
        case "lof":
            return Lof()
        case "random":
            return RandomOrder(config.policy_seed)
        case "priority":
            return _priority(config)
        case "sjf":
            return Sjf(make_length_estimate(config.length_estimate), config.length_ageing)
        case "srtf":
            return Srtf(make_length_estimate(config.length_estimate), config.length_ageing)
        case "hrrn":
            return Hrrn(parts)
        case "round-robin":
            return RoundRobin(config.tenant_quantum, parts.page_size)
        case "fair":
            return Fair(parts.page_size)
        case "adaptive":
            return Adaptive(parts, _priority(config))
        case "fifo-serial":
            return FifoSerial(parts)
        case "static":
            return StaticBatch(parts, config.static_batch_size, config.static_batch_wait)
        case _:
            assert_never(config.schedule_policy)


def _priority(config: SchedulerConfig) -> Priority:
    return Priority(config.priority_ageing, preempts=config.priority_preemption)
