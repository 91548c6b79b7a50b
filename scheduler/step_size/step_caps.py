"""`StepCaps`: how large a step may be, by what its device has shown: less than configured after it ran out of memory.

The configuration's limits are estimates of what the device's allocator can find beside the KV pool; other processes on
the device, and memory in pieces, can make them wrong. A step that failed halves what made it large. What was taken
comes back: after `patience` steps without a failure the caps double, which is a probe. Only a probe that fails doubles
the patience, up to a bound, so that a device that is too small for good fails rarely, and one that lacked memory for a
moment is as it was soon. When the configured limits have held for as long again, all is forgotten.
"""

from __future__ import annotations

import enum
from typing import Final

from .step_limits import StepLimits

FIRST_PATIENCE: Final = 100
"""Steps without a failure after which caps double: two seconds of decoding, so half a minute from the smallest step."""
MOST_PATIENCE: Final = 1 << 14
"""Five minutes of decoding: what a failed probe costs, computing one step's requests again, is little against it."""


class Lowered(enum.Enum):
    """What a failure made smaller."""

    TOKENS = "tokens"
    REQUESTS = "requests"
    NOTHING = "nothing"  # no step could be smaller than the one that failed


class StepCaps:
    """Limits beside the configured ones, which no cap ever exceeds.

    Attributes:
        max_step_tokens: tokens of a step that computes prompts, decodes included; None: as configured.
        max_running: requests that may run; None: as many as there are rows.
        patience: steps without a failure after which the caps double.
    """

    __slots__ = (
        "_all_is_well",
        "_is_probing",
        "_largest_step",
        "_num_rows",
        "_page_size",
        "_steps_since",
        "max_running",
        "max_step_tokens",
        "patience",
    )

    def __init__(self, limits: StepLimits, *, page_size: int, num_rows: int, max_model_len: int) -> None:
        self._page_size = page_size
        self._num_rows = num_rows
        self._largest_step = limits.largest_prefill(page_size, max_model_len)
        self._all_is_well = True
        self._is_probing = False  # the caps were raised since the last failure
        self._steps_since = 0
        self.patience = FIRST_PATIENCE
        self.max_step_tokens: int | None = None
        self.max_running: int | None = None

    def failed(self, num_requests: int, num_prompt_tokens: int, num_tokens: int) -> Lowered:
        """A step of this size found no memory: let the next ones be smaller.

        One request with a page of its prompt, or with one token, is the smallest step; it gets a second try with
        nobody else on the device before it counts as that.

        Args:
            num_prompt_tokens: of the prompts in it.
            num_tokens: of all, decodes included.
        """
        if self._is_probing:
            self.patience = min(2 * self.patience, MOST_PATIENCE)
        self._is_probing = self._all_is_well = False  # failures on end are one trouble, not many
        self._steps_since = 0
        if num_prompt_tokens > self._page_size:
            most = min(num_tokens, self.max_step_tokens or self._largest_step)
            self.max_step_tokens = max(self._page_size, most // 2)
            return Lowered.TOKENS
        if num_requests == 1 and self.max_running == 1:
            return Lowered.NOTHING
        self.max_running = min(max(1, num_requests // 2), self.max_running or self._num_rows)
        return Lowered.REQUESTS

    def succeeded(self) -> None:
        """A step found its memory."""
        if self._all_is_well:
            return
        self._steps_since += 1
        if self._steps_since < self.patience:
            return
        self._steps_since = 0
        if self.max_step_tokens is None and self.max_running is None:
            self.patience = FIRST_PATIENCE
            self._is_probing, self._all_is_well = False, True
            return
        self._is_probing = True
        self.max_step_tokens = _doubled(self.max_step_tokens, self._largest_step)
        self.max_running = _doubled(self.max_running, self._num_rows)

    @property
    def are_lowered(self) -> bool:
        """Whether steps are kept smaller than configured."""
        return self.max_step_tokens is not None or self.max_running is not None

    def text(self) -> str:
        """For people: the caps in force."""
        parts = []
        if self.max_step_tokens is not None:
            parts.append(f"at most {self.max_step_tokens} tokens in a step with prompts")
        if self.max_running is not None:
            parts.append(f"at most {self.max_running} running requests")
        return ", ".join(parts)


def _doubled(cap: int | None, most: int) -> int | None:
    return None if cap is None or 2 * cap >= most else 2 * cap
