"""`StallSentinel`: notices that requests wait, nothing runs, and no pass admits anybody.

By design this cannot happen: what `fits` accepts is admitted once nothing else runs. A watchdog that looks only while a
batch is in flight would never see it (a trap in the field), so this one looks exactly when none is.
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
    """What to do about it."""

    NOTHING = "nothing"
    REPAIR = "repair"
    ALARM = "alarm"


class StallSentinel:
    """Counts passes without progress.

    Attributes:
        stalled: why nothing moves, for `/health`; "" while all is well.
    """

    __slots__ = ("_num_passes", "stalled")

    def __init__(self) -> None:
        self._num_passes = 0
        self.stalled = ""

    def progress(self) -> None:
        """A batch was planned, or nobody waits, or everybody has a reason to."""
        if self.stalled:
            logger.warning("requests move again")
        self._num_passes = 0
        self.stalled = ""

    def no_progress(self, state: PassState) -> StallAction:
        """Requests wait, nothing is in flight, and a pass has admitted nobody; no reason will pass by itself."""
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
                first = next((verdict.text() for verdict in state.verdicts), "no request was looked at")
                self.stalled = f"{state.num_waiting} requests wait and none can be admitted: {first}"
                logger.error("stalled: %s", self.stalled)
            return StallAction.ALARM
        return StallAction.NOTHING
