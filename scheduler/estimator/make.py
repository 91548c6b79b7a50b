"""`make_estimator`: from the name in the configuration to the object."""

from __future__ import annotations

from typing import assert_never

from ...runtime.config.engine_config import SchedulerConfig
from .base import OutputEstimator
from .beta import BetaReservation
from .full import FullReservation
from .none import GrowOnDemand
from .ratio import NewTokenRatio


def make_estimator(config: SchedulerConfig, page_size: int) -> OutputEstimator:
    """The rule that `config.admission_estimator` names."""
    match config.admission_estimator:
        case "ratio":
            return NewTokenRatio(config.schedule_conservativeness)
        case "beta":
            return BetaReservation(config.schedule_conservativeness)
        case "full":
            return FullReservation(page_size)
        case "none":
            return GrowOnDemand()
        case other:
            assert_never(other)
