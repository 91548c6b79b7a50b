"""`StepCaps`: limits on the size of a step after the device ran out of memory; they are below the configured limits.

The configured limits are estimates of the memory that the device's allocator finds beside the KV pool. Other processes
on the device, or fragmentation, can make them wrong. A failed step halves the limit that made it large. After
`patience` steps without a failure the caps double, which is a probe. Only a failed probe doubles the patience, up to a
bound. So a device with too little memory fails rarely, and a device that lacked memory for a moment soon returns to the
configured limits. When these have held for `patience` steps, the patience is reset.
"""

from __future__ import annotations

import enum
from typing import Final

from .step_limits import StepLimits

FIRST_PATIENCE: Final = 100
"""Steps without a failure until caps double: two seconds of decoding; half a minute from the smallest step to none."""
MOST_PATIENCE: Final = 1 << 14
"""Five minutes of decoding; the cost of a failed probe, to compute one step's requests again, is small against it."""


class Lowered(enum.Enum):
    """The cap that a failure has lowered."""

    TOKENS = "tokens"
    REQUESTS = "requests"
    NOTHING = "nothing"  # the failed step had the smallest size


class StepCaps:
    """Limits below the configured ones; no cap ever exceeds those.

    Attributes:
        max_step_tokens: tokens of a step that computes prompts, decodes included; None: as configured.
        max_running: requests that may run; None: as many as there are rows.
        patience: steps without a failure after which the caps double.
    """

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
        """A step of this size found no memory: lower a cap.

        The smallest step is one request with a page of its prompt, or with one token. It counts as the smallest only
        after a second try with no other request on the device.

        Args:
            num_requests: requests in the step.
            num_prompt_tokens: prompt tokens in it.
            num_tokens: all tokens, decodes included.
        """
        if self._is_probing:
            self.patience = min(2 * self.patience, MOST_PATIENCE)
        self._is_probing = self._all_is_well = False  # consecutive failures count as one failed probe
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
        """A step did not run out of memory."""
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
        """Whether a cap is in force."""
        return self.max_step_tokens is not None or self.max_running is not None

    def text(self) -> str:
        """The caps in force, in words."""
        parts = []
        if self.max_step_tokens is not None:
            parts.append(f"at most {self.max_step_tokens} tokens in a step with prompts")
        if self.max_running is not None:
            parts.append(f"at most {self.max_running} running requests")
        return ", ".join(parts)


def _doubled(cap: int | None, most: int) -> int | None:
    return None if cap is None or 2 * cap >= most else 2 * cap
