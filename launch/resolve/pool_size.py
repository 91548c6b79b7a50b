"""`PoolSize`: decides KV pool size, context length and number of running requests together.

They depend on each other: a longer context needs more working memory in a step, which reduces the pool; a pool larger
than all running requests can fill is wasted. A value that the user has set is kept, or refused with the arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

from ...models.spec.sizes import (
    BYTES_OF_DTYPE,
    GIB,
    checkpoint_share,
    kv_dtype_of,
    kv_token_bytes,
    max_drafts_of,
    most_rows,
    row_states_bytes,
)
from ...models.weight_files.weight_memory import weight_bytes
from ...runtime.config.engine_config import EngineConfig
from ...runtime.errors import ConfigError
from ...runtime.feasibility import pages_for
from .adapters import adapter_bytes
from .memory_budget import MOST_OF_LEFT, MemoryBudget, plan_memory
from .stages import stage_spec, stages_of
from .swap_space import SwapSpace

if TYPE_CHECKING:
    from ...models.spec.model_spec import ModelSpec
    from ...models.spec.vision_spec import VisionSpec

TOKENS_PER_REQUEST: Final = 256  # of a short request, to bound how many run at once
MAX_AUTO_RUNNING: Final = 256
MAX_AUTO_TEXTS: Final = 1024  # running texts of an encoder on a GPU: a full step of short ones
ENCODER_STEPS: Final = 2  # in the KV pool of an encoder: one runs, and one is planned
MIN_USEFUL_LEN: Final = 256  # a shorter context is too short to be useful


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """Facts about the device that were decided before.

    Attributes:
        free_bytes: on the device, per rank if several share it.
        host_free_bytes: on the host; the same memory if the device is the CPU.
    """

    name: str
    dtype: str
    num_threads: int
    free_bytes: int
    host_free_bytes: int

    @property
    def is_cpu(self) -> bool:
        """Whether the pool is in the host's memory."""
        return self.name == "cpu"


class PoolDecision(NamedTuple):
    """The values, and setting -> reason, for those that the user has not set to this value."""

    max_model_len: int
    max_running_requests: int
    max_total_tokens: int
    swap_gib: float
    notes: dict[str, str]


class PoolSize:
    """See the module. One instance makes one decision."""

    def __init__(
        self, config: EngineConfig, spec: ModelSpec, device: Device, *, chunk: int, fraction: float
    ) -> None:
        """`chunk` and `fraction`: the chunked prefill size and the memory fraction, already resolved."""
        self._config = config
        self._spec = spec
        self._device = device
        self._chunk = chunk
        self._fraction = fraction
        self._page_size = config.cache.page_size
        self._swap = SwapSpace(config, device.name, device.host_free_bytes)
        self._stages = stages_of(spec, config.parallel)
        self._most_running = self._running_at_most()
        self._notes: dict[str, str] = {}

    def decide(self) -> PoolDecision:
        """Make the decision.

        Raises:
            ConfigError: the settings contradict the model or the memory; the message holds the arithmetic.
        """
        wanted_len = self._wanted_len()
        max_model_len = self._len_beside_pool(wanted_len)
        budget = self._budget(max_model_len)
        self._swap.check(budget)
        pool = self._pool(budget)
        self._check_len(max_model_len, wanted_len, pool, budget)
        max_running = self._max_running_requests(pool)
        max_total = self._max_total_tokens(pool, max_running, max_model_len, budget)
        swap_space = self._swap.decide(max_total, budget)
        self._note("swap_space", swap_space.reason)
        return PoolDecision(max_model_len, max_running, max_total, swap_space.gib, self._notes)

    # ---------------------------------------------------------------- the length of a context

    def _wanted_len(self) -> int:
        """The context length before the memory limit."""
        asked, known = self._config.model.max_model_len, self._spec.max_position_embeddings
        if asked == "auto":
            return known
        if asked > known:
            raise ConfigError(
                f"max_model_len is {asked}, but the model knows positions up to {known} only; lower --max-model-len"
            )
        return asked

    def _len_beside_pool(self, wanted_len: int) -> int:
        """The wanted length if the user set it or its pool fits beside its workspace; else the longest that fits."""
        asked_tokens = self._config.cache.max_total_tokens
        if self._config.model.max_model_len != "auto":
            return wanted_len
        if asked_tokens != "auto":
            return min(wanted_len, max(2, asked_tokens // self._page_size * self._page_size))
        if self._budget(wanted_len).tokens >= pages_for(wanted_len, self._page_size) * self._page_size:
            return wanted_len
        # The pool shrinks as the context grows, so the longest context that fits is found by bisection.
        fits, too_long = 0, pages_for(wanted_len, self._page_size)
        while too_long - fits > 1:
            middle = (fits + too_long) // 2
            length = middle * self._page_size
            if self._budget(length).tokens >= length:
                fits = middle
            else:
                too_long = middle
        return max(min(MIN_USEFUL_LEN, wanted_len), fits * self._page_size)

    def _check_len(self, max_model_len: int, wanted_len: int, pool: int, budget: MemoryBudget) -> None:
        pool_is_given = self._config.cache.max_total_tokens != "auto"
        if self._config.model.max_model_len != "auto":
            if pool < max_model_len - 1 and not pool_is_given:
                raise ConfigError(
                    f"max_model_len is {max_model_len}, but memory holds {pool} tokens: {budget.sums}; lower "
                    f"--max-model-len or raise --mem-fraction{_or_swap_space(budget)}"
                )
        elif pool_is_given and max_model_len < wanted_len:
            self._note("max_model_len", f"bounded by --max-total-tokens; the model knows {wanted_len}")
        elif pool < min(MIN_USEFUL_LEN, wanted_len) and not pool_is_given:
            raise ConfigError(
                f"memory holds a context of {pool} tokens only: {budget.sums}; free memory, raise --mem-fraction "
                f"(now {budget.fraction:g}) or lower --chunked-prefill-size, --max-prefill-tokens, "
                f"--max-running-requests and --max-model-len{_or_swap_space(budget)}"
            )
        elif max_model_len < wanted_len:
            self._note("max_model_len", f"bounded by memory, {budget.sums}; the model knows {wanted_len}")
        else:
            self._note("max_model_len", "all positions the model knows")

    # ---------------------------------------------------------------- memory

    def _budget(self, max_model_len: int) -> MemoryBudget:
        """The budget for the largest step that the scheduler can make with contexts of this length.

        Of pipeline stages the one with the least room counts: their pools have the same pages.
        """
        plan = partial(
            plan_memory,
            usable_bytes=self._device.free_bytes,
            dtype=self._device.dtype,
            fraction=self._fraction,
            step_tokens=largest_step(self._config, self._chunk, self._most_running, max_model_len),
            max_model_len=max_model_len,
            max_running_requests=self._most_running,
            on_cpu=self._device.is_cpu,
            tp=self._config.parallel.tp,
            kv_cache_dtype=self._config.cache.kv_cache_dtype,
        )
        budgets = [plan(stage_spec(self._spec, each), stage=each) for each in self._stages]
        budget = min(budgets, key=lambda each: each.tokens)
        adapters = adapter_bytes(self._config, self._spec, BYTES_OF_DTYPE[self._device.dtype])
        drafter = 0 if self._spec.drafter is None else self._spec.drafter.weights_bytes
        budget = replace(budget, weights_bytes=budget.weights_bytes + adapters + drafter)
        if self._spec.state is not None:
            budget = self._beside_states(budget)
        if self._spec.vision is not None:
            budget = self._beside_tower(budget, self._spec.vision)
        return self._swap.beside(budget)

    def _beside_states(self, budget: MemoryBudget) -> MemoryBudget:
        """The budget with the states of running requests, and for each token its share of the checkpoints."""
        drafts = max_drafts_of(self._config.scheduler)
        states = row_states_bytes(self._spec, self._device.dtype, self._most_running, drafts)
        states //= self._config.parallel.tp
        share = 0.0
        if self._config.cache.radix_cache:
            kv_dtype = kv_dtype_of(self._config.cache.kv_cache_dtype, self._device.dtype)
            share = checkpoint_share(self._spec, self._device.dtype, kv_token_bytes(self._spec, kv_dtype))
        return replace(
            budget,
            workspace_bytes=budget.workspace_bytes + states,
            checkpoint_token_bytes=int(share * budget.kv_token_bytes),
        )

    def _beside_tower(self, budget: MemoryBudget, vision: VisionSpec) -> MemoryBudget:
        """The budget with the rows of images, and with the working memory of encoding a tile."""
        num_rows = self._config.cache.mm_encoder_cache_tokens
        assert num_rows != "auto", "decided before the pool"
        width = vision.row_width(self._spec.hidden_size)
        rows = num_rows * width * BYTES_OF_DTYPE[self._device.dtype]
        return replace(budget, workspace_bytes=budget.workspace_bytes + rows + vision.workspace_bytes)

    def _pool(self, budget: MemoryBudget) -> int:
        """KV slots that fit into memory, or that the user asked for, in whole pages."""
        asked = self._config.cache.max_total_tokens
        if asked == "auto":
            return budget.tokens // self._page_size * self._page_size
        at_most = replace(budget, fraction=max(budget.fraction, MOST_OF_LEFT))
        if asked > at_most.tokens:
            raise ConfigError(
                f"max_total_tokens is {asked}, which takes {asked * budget.token_bytes / GIB:.1f} GiB, but memory "
                f"holds {at_most.tokens} tokens: {at_most.sums}; lower --max-total-tokens or --max-model-len"
                f"{_or_swap_space(budget)}"
            )
        rounded = asked // self._page_size * self._page_size
        if rounded == 0:
            raise ConfigError(
                f"max_total_tokens is {asked}, less than one page of {self._page_size} tokens; raise it"
            )
        return rounded

    def _max_total_tokens(self, pool: int, max_running: int, max_model_len: int, budget: MemoryBudget) -> int:
        asked = self._config.cache.max_total_tokens
        if asked != "auto":
            self._note(
                "max_total_tokens", f"{asked} in whole pages of {self._page_size}" if pool != asked else ""
            )
            return pool
        useful = max_running * pages_for(max_model_len, self._page_size) * self._page_size
        if not self._spec.causal:
            step = largest_step(self._config, self._chunk, max_running, max_model_len)
            padding = max_running * self._page_size  # the last page of a text is not full
            steps = pages_for(ENCODER_STEPS * step + padding, self._page_size) * self._page_size
            if steps <= min(useful, pool):
                self._note("max_total_tokens", f"{ENCODER_STEPS} steps of {step} tokens")
                return steps
        if useful <= pool:
            self._note(
                "max_total_tokens", f"{max_running} requests x {max_model_len} tokens; memory holds {pool}"
            )
            return useful
        self._note("max_total_tokens", budget.sums)
        return pool

    # ---------------------------------------------------------------- requests

    def _running_at_most(self) -> int:
        """Most requests that can run at once: `max_running_requests` before the memory limit."""
        asked = self._config.scheduler.max_running_requests
        if asked != "auto":
            return asked
        if not self._spec.causal:
            return min(MAX_AUTO_RUNNING if self._device.is_cpu else MAX_AUTO_TEXTS, self._most_decodes)
        most = min(MAX_AUTO_RUNNING, max(64, 16 * self._device.num_threads))
        most = min(most if self._device.is_cpu else MAX_AUTO_RUNNING, self._most_decodes)
        return most if self._most_states is None else min(most, self._most_states)

    @property
    def _most_states(self) -> int | None:
        """Requests whose states may be in memory; None: states are no limit."""
        tp, dtype = self._config.parallel.tp, self._device.dtype
        left = self._device.free_bytes * tp - weight_bytes(self._spec, BYTES_OF_DTYPE[dtype])
        return most_rows(self._spec, dtype, left, max_drafts_of(self._config.scheduler))

    @property
    def _most_decodes(self) -> int:
        """Decodes that fit into a step, if prompts and decodes share one budget."""
        scheduler = self._config.scheduler
        if not self._spec.causal:
            return MAX_AUTO_TEXTS
        if scheduler.phases != "decode-first" or scheduler.max_num_batched_tokens is None:
            return MAX_AUTO_RUNNING
        return scheduler.max_num_batched_tokens

    def _max_running_requests(self, pool: int) -> int:
        asked, most_running = self._config.scheduler.max_running_requests, self._most_running
        if asked != "auto":
            return asked
        if not self._spec.causal:
            self._note("max_running_requests", "enough short texts for two full steps")
            return most_running
        by_memory = max(1, pool // TOKENS_PER_REQUEST)
        if by_memory < most_running:
            reason = f"one per {TOKENS_PER_REQUEST} of {pool} KV tokens"
        elif most_running == self._most_states:
            reason = "their states take a quarter of the memory beside the weights"
        elif most_running == self._most_decodes < MAX_AUTO_RUNNING:
            reason = f"one token of each fits into a step of --max-num-batched-tokens {most_running}"
        elif self._device.is_cpu:
            reason = f"for {self._device.num_threads} CPU threads"
        else:
            reason = "enough to fill the GPU"
        self._note("max_running_requests", reason)
        return min(by_memory, most_running)

    def _note(self, name: str, reason: str) -> None:
        if reason:
            self._notes[name] = reason


def largest_step(config: EngineConfig, chunk: int, most_running: int, max_model_len: int) -> int:
    """New tokens of the largest step: full of prompts, or all requests decode and one page is left for a prompt.

    In a mixed step, decodes count against the prompts' limit and do not add to it (see `PrefillBudget`).

    Args:
        chunk: the chunked prefill size, resolved.
        most_running: most requests that run at once.
    """
    scheduler = config.scheduler
    apart = scheduler.phases == "prefill-first"
    most_decodes = most_running if apart else most_running + config.cache.page_size
    largest = max(min(prompt_tokens(config, chunk), most_running * max_model_len), most_decodes)
    if scheduler.max_num_batched_tokens is not None:
        largest = min(largest, max(scheduler.max_num_batched_tokens, most_decodes))
    if chunk == -1:  # prompts are not chunked: one of any length is computed in a step with all decodes
        largest = max(largest, max_model_len + (0 if apart else most_running))
    return largest


def largest_step_of(config: EngineConfig) -> int:
    """The same for a resolved configuration."""
    chunk, running = config.scheduler.chunked_prefill_size, config.scheduler.max_running_requests
    assert chunk != "auto" and running != "auto" and config.model.max_model_len != "auto"
    return largest_step(config, chunk, running, config.model.max_model_len)


def prompt_tokens(config: EngineConfig, chunk: int) -> int:
    """Prompt tokens of a step that holds more than a single prompt."""
    limit = max(config.scheduler.max_prefill_tokens, config.cache.page_size)
    return limit if chunk == -1 else min(limit, chunk)


def _or_swap_space(budget: MemoryBudget) -> str:
    """One more fix, if the KV pool shares its memory with swapped KV."""
    return " (or --swap-space)" if budget.swap_bytes else ""
