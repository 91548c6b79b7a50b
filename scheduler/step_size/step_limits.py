"""`StepLimits`: the configured limits of a step; `PartialPrefills`: how a step is shared among prompts that are
computed in chunks; `StepCaps`: lower limits after the device ran out of memory.
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple, Self

from ...runtime.config.engine_config import SchedulerConfig
from ..arrays import IntArray


class PartialLimits(NamedTuple):
    """Limits from the configuration.

    Attributes:
        max_partial: partial prefills at the same time.
        max_long: how many of them may be long.
        long_threshold: a prompt is long while more tokens than this remain to be computed; 0: none is long.
    """

    max_partial: int = 1
    max_long: int = 1
    long_threshold: int = 0

    @classmethod
    def of(cls, config: SchedulerConfig) -> Self:
        """The limits that a resolved configuration sets."""
        return cls(
            config.max_num_partial_prefills,
            config.max_long_partial_prefills,
            config.long_prefill_token_threshold,
        )

    def is_long(self, remaining: int) -> bool:
        """Whether a prompt with `remaining` tokens to compute counts as long. With one partial prefill, none does."""
        return self.max_partial > 1 and 0 < self.long_threshold < remaining


class PartialPrefills:
    """The shares and counts of one pass.

    The rules of vLLM V0 (`max_num_partial_prefills`, `max_long_partial_prefills`, `long_prefill_token_threshold`). With
    one partial prefill, the default, a prompt of 32,000 tokens takes whole steps until it is done, and all later
    requests wait. With several, each takes only its share of the step, and the number of long ones is limited: the
    other shares are for short prompts.

    Different from vLLM: unused shares are not lost. The leftover of a pass goes to the prompts that were cut
    (`PrefillAdder.use_leftover`). So a long prompt alone is not slowed down, and beside short prompts it loses only the
    tokens that they use.

    Attributes:
        share: tokens that one prompt may take of this step.
    """

    def __init__(self, limits: PartialLimits, *, page_size: int, step_tokens: int, num_prompts: int) -> None:
        """Divide the step into shares of whole pages, at least one, for `num_prompts` but at most `max_partial`.

        Args:
            step_tokens: prompt tokens that the step may compute.
            num_prompts: partial prefills and waiting requests. Requests that cannot start are counted as well: finding
                them would mean examining the whole queue, and the leftover is used anyway.
        """
        self._limits = limits
        self._num_partial = 0
        self._num_long = 0
        num_shares = min(num_prompts, limits.max_partial)
        self.share = step_tokens
        if num_shares > 1:
            self.share = max(step_tokens // num_shares // page_size, 1) * page_size

    @property
    def may_cut(self) -> bool:
        """Whether one more prompt may be left unfinished by this step."""
        return self._num_partial < self._limits.max_partial

    def too_many_long(self, extend_len: int) -> bool:
        """Whether a waiting prompt is long and the maximum number of long ones is being computed."""
        return self._limits.is_long(extend_len) and self._num_long >= self._limits.max_long

    def count(self, remaining: int, length: int) -> None:
        """A prompt with `remaining` uncomputed tokens computes `length` of them in this step."""
        self._num_partial += length < remaining
        self._num_long += self._limits.is_long(remaining)


def reserved_tokens(remaining: IntArray, page_size: int) -> int:
    """KV slots for the `remaining` tokens of each prompt, [P], rounded up to whole pages per prompt.

    Without rounding each of several prompts could lack its last page while no running request frees one.
    """
    return int((-(-remaining // page_size)).sum()) * page_size


class StepLimits(NamedTuple):
    """Limits of a step.

    Attributes:
        chunk_size: prompt tokens per step; None: prompts are never cut.
        max_prefill_tokens: prompt tokens per step, cut or not.
        max_num_batched_tokens: tokens per step, decodes included; None: no such limit.
        decodes_first: under that limit, prompts get only the tokens that the decodes do not use, possibly none.
        partial: how the step is shared among prompts that are cut.
        look_ahead: how many requests after one that lacks memory are tried; each costs a prefix cache look-up.
        num_lookahead_tokens: slots that each request has ready for draft tokens.
        target_step_ms: time target of a step in which requests decode; 0: none. See `StepTarget`.
        multi_step_ms: time limit of a multi-step decode; 0: none. See `MultiStepDecode`.
    """

    chunk_size: int | None
    max_prefill_tokens: int
    max_num_batched_tokens: int | None
    decodes_first: bool
    partial: PartialLimits
    look_ahead: int
    num_lookahead_tokens: int
    target_step_ms: float = 0.0
    multi_step_ms: float = 0.0

    def capped(self, max_step_tokens: int | None) -> Self:
        """The limits with at most `max_step_tokens` in a step; prompts are then cut, even if they were not before."""
        if max_step_tokens is None:
            return self
        return self._replace(
            chunk_size=min(self.chunk_size or max_step_tokens, max_step_tokens),
            max_prefill_tokens=min(self.max_prefill_tokens, max_step_tokens),
        )

    def largest_prefill(self, page_size: int, max_model_len: int) -> int:
        """Tokens of the largest step that computes prompts; at least a page."""
        if self.chunk_size is None:
            return max(self.max_prefill_tokens, max_model_len)
        return max(min(self.max_prefill_tokens, self.chunk_size), page_size)

    @classmethod
    def of(cls, config: SchedulerConfig) -> Self:
        """The limits that a resolved configuration sets."""
        assert isinstance(config.chunked_prefill_size, int), "the configuration is not resolved"
        return cls(
            chunk_size=None if config.chunked_prefill_size == -1 else config.chunked_prefill_size,
            max_prefill_tokens=config.max_prefill_tokens,
            max_num_batched_tokens=config.max_num_batched_tokens,
            decodes_first=config.phases == "decode-first",
            partial=PartialLimits.of(config),
            look_ahead=config.look_ahead,
            num_lookahead_tokens=config.num_lookahead_tokens,
            # both are "auto" in logs that are older than the setting
            target_step_ms=0.0 if config.target_step_ms == "auto" else config.target_step_ms,
            multi_step_ms=0.0 if config.multi_step_ms == "auto" else config.multi_step_ms,
        )


FIRST_PATIENCE: Final = 100
"""Steps without a failure until caps double: two seconds of decoding; half a minute from the smallest step to none."""
MOST_PATIENCE: Final = 1 << 14
"""Five minutes of decoding; the cost of a failed probe, to compute one step's requests again, is small against it."""


LoweredFlag = Literal["--chunked-prefill-size", "--max-running-requests", ""]
"""The flag of the limit that a failure has lowered; "": the failed step had the smallest size."""


class StepCaps:
    """Limits on the size of a step after the device ran out of memory; no cap exceeds the configured limits.

    The configured limits are estimates of the memory that the device's allocator finds beside the KV pool. Other
    processes on the device, or fragmentation, can make them wrong. A failed step halves the limit that made it large.
    After `patience` steps without a failure the caps double, which is a probe. Only a failed probe doubles the
    patience, up to a bound. So a device with too little memory fails rarely, and a device that lacked memory for a
    moment soon returns to the configured limits. When these have held for `patience` steps, the patience is reset.

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

    def failed(self, num_requests: int, num_prompt_tokens: int, num_tokens: int) -> LoweredFlag:
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
            return "--chunked-prefill-size"
        if num_requests == 1 and self.max_running == 1:
            return ""
        self.max_running = min(max(1, num_requests // 2), self.max_running or self._num_rows)
        return "--max-running-requests"

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
