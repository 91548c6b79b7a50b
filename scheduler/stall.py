"""`StallSentinel`: detects that requests wait, nothing runs, and no pass admits a request.

By design this cannot happen: a request that is feasible (`runtime/feasibility.py`) is admitted once nothing else runs.
A watchdog that checks only while a batch is in flight never detects such a stall, a known trap in other engines. This
one checks exactly when no batch is in flight.
"""

from __future__ import annotations

import enum
import logging
from typing import Final

from .pass_state import PassState

logger = logging.getLogger(__name__)

PASSES_BEFORE_REPAIR: Final = 3
PASSES_BEFORE_ALARM: Final = 6


class StallAction(enum.Enum):
    """What the scheduler does about a pass without progress."""

    NOTHING = "nothing"
    REPAIR = "repair"
    ALARM = "alarm"


class StallSentinel:
    """Counts passes without progress.

    Attributes:
        stalled: why no request can be admitted, for `/health`; "" while there is no stall.
    """

    def __init__(self) -> None:
        self._num_passes = 0
        self.stalled = ""

    def progress(self) -> None:
        """Reset: a batch was planned, or no request waits, or every waiting request has a reason that passes."""
        if self.stalled:
            logger.warning("the stall is over")
        self._num_passes = 0
        self.stalled = ""

    def no_progress(self, state: PassState) -> StallAction:
        """Count a pass that admitted no request: requests wait, nothing is in flight, no reason passes by itself."""
        self._num_passes += 1
        if self._num_passes == PASSES_BEFORE_REPAIR:
            for verdict in state.verdicts:
                logger.error("stalled after %d passes: %s", self._num_passes, verdict.text())
            if state.rest_reason is not None:
                rest, why = state.num_rest, state.rest_reason.text
                logger.error("stalled after %d passes: %d others: %s", self._num_passes, rest, why)
            return StallAction.REPAIR
        if self._num_passes >= PASSES_BEFORE_ALARM:
            if not self.stalled:
                first = next((verdict.text() for verdict in state.verdicts), "no request was considered")
                self.stalled = f"{state.num_waiting} requests wait and none can be admitted: {first}"
                logger.error("stalled: %s", self.stalled)
            return StallAction.ALARM
        return StallAction.NOTHING
