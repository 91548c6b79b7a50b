"""`StageTimes`: when a step leaves the last of a replica's pipeline stages.

Stages have equal parts of the layers, so each takes its share of a step's time. A step enters a stage when it has left
the stage before, and the step before it has left this one; so a short step waits behind a long one (the bubble).
"""

from __future__ import annotations

from typing import Final

HOP_S: Final = 0.0002
"""An assumption: a message between two machines, and its launch."""


class StageTimes:
    """See the module. With one stage a step takes its own time."""

    def __init__(self, num_stages: int, token_s: float) -> None:
        """All stages are free.

        Args:
            token_s: seconds to send the activations of a token to the next stage.
        """
        self._free_s = [0.0] * num_stages
        self._token_s = token_s

    def end_s(self, start_s: float, step_s: float, num_tokens: int) -> float:
        """Send a step through the stages from `start_s` on; returns when its results are there.

        Args:
            step_s: seconds of the step with all layers.
            num_tokens: that it computes.
        """
        free_s = self._free_s
        stage_s = step_s / len(free_s)
        at_s = start_s
        for idx, stage_free_s in enumerate(free_s):
            if idx:
                at_s += HOP_S + num_tokens * self._token_s
            free_s[idx] = at_s = max(at_s, stage_free_s) + stage_s
        return at_s
