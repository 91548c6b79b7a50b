"""`SwapSpace`: how much host memory is reserved for the KV of preempted requests, and the reason; checks kv_host_size.

On a GPU host memory is available for it. On the CPU it is the memory that the KV pool uses: each byte of swap space is
taken from the pool, and swapping saves only the cost of recomputing. On the CPU it is therefore used only if the user
asks for it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final, NamedTuple

from ...models.spec.sizes import GIB, MIB
from ...runtime.config.engine_config import EngineConfig
from ...runtime.errors import ConfigError
from .memory_budget import RUNTIME_BYTES, MemoryBudget, size_text

USUAL_BYTES: Final = 4 * GIB  # 32k tokens of an 8B model, a few preempted requests; vLLM's default
HOST_SHARE: Final = (
    4  # at most a quarter of the free host memory: it is pinned, so other programs cannot reclaim it
)
POOL_SHARE: Final = 4  # on the CPU a quarter of the KV pool
STAGED_BYTES: Final = 64 * MIB  # of the device, for pages in transfer (see `HostKVPool`), or two pages


class SwapDecision(NamedTuple):
    """The value of `swap_space` in GiB, and its reason; no reason for a value that the user has set."""

    gib: float
    reason: str


class SwapSpace:
    """One decision in two parts, because on the CPU it and the size of the KV pool depend on each other."""

    def __init__(self, config: EngineConfig, device: str, host_free_bytes: int) -> None:
        self._asked = config.cache.swap_space
        self._asked_tokens = config.cache.max_total_tokens
        self._mode = config.scheduler.preemption_mode
        self._page_size = config.cache.page_size
        self._on_cpu = device == "cpu"
        self._host_free = host_free_bytes
        self._cached = config.cache.kv_host_size
        self._host_left = host_free_bytes - RUNTIME_BYTES - int(self._cached * GIB)
        if self._cached and self._on_cpu:
            raise ConfigError(
                f"kv_host_size is {self._cached:g} GiB, but on a CPU it must be 0: the KV pool is in host memory "
                "itself; leave --kv-host-size out, and give the pool more with --max-total-tokens, or keep KV on disk "
                "with --kv-disk DIR"
            )
        if self._asked == 0 and self._mode == "swap":
            raise ConfigError(
                "preemption_mode is swap, but swap_space is 0, so there is no memory to swap to; raise --swap-space or "
                "use --preemption-mode recompute"
            )

    def beside(self, budget: MemoryBudget) -> MemoryBudget:
        """The KV pool's budget minus what swapping needs: memory for pages in transfer, and on the CPU all of it."""
        if self._is_off and not self._cached:
            return budget
        staged_bytes = max(STAGED_BYTES, 2 * self._page_bytes(budget))
        budget = replace(budget, workspace_bytes=budget.workspace_bytes + staged_bytes)
        if not self._on_cpu:
            return budget
        if self._asked != "auto":
            swap_bytes = self._asked_bytes()
        elif self._asked_tokens == "auto":
            # A quarter of the remaining pool, r = (left - r) * pool_share / 4, solved for r.
            pool_share = budget.fraction * budget.kv_token_bytes / budget.token_bytes
            share = pool_share / (POOL_SHARE + pool_share)
            swap_bytes = max(self._page_bytes(budget), int(budget.left_bytes * share))
        else:
            swap_bytes = self._share_of_pool(self._asked_tokens, budget)
        return replace(budget, swap_bytes=swap_bytes)

    def check(self, budget: MemoryBudget) -> None:
        """Check that `beside` leaves memory for the pool, and that `kv_host_size` is there.

        Raises:
            ConfigError: the requested swap space, or `kv_host_size`, is larger than the memory or holds no page.
        """
        if self._cached and self._host_left < 0:
            left_bytes = max(0, self._host_free - RUNTIME_BYTES)
            raise ConfigError(
                f"kv_host_size is {self._cached:g} GiB, but ({size_text(self._host_free)} free on the host - "
                f"{size_text(RUNTIME_BYTES)} runtime) leaves {size_text(left_bytes)}; lower --kv-host-size"
            )
        if 0 < self._cached * GIB < self._page_bytes(budget):
            raise ConfigError(
                f"kv_host_size is {self._cached:g} GiB, less than one page of {size_text(self._page_bytes(budget))}; "
                "raise --kv-host-size, or leave it out"
            )
        if self._asked == "auto" or not budget.swap_bytes or budget.left_bytes >= 0:
            return
        without = replace(budget, swap_bytes=0)
        raise ConfigError(
            f"swap_space is {self._asked:g} GiB, but {without.left_sums} leaves "
            f"{size_text(max(0, without.left_bytes))}, which it shares with the KV pool; lower --swap-space"
        )

    def decide(self, max_total_tokens: int, budget: MemoryBudget) -> SwapDecision:
        """The value, once the pool has its size.

        Raises:
            ConfigError: the requested swap space does not fit into the host's memory, or holds no page.
        """
        if self._mode == "recompute":
            return SwapDecision(0.0, "lost KV is recomputed" if self._asked != 0 else "")
        if self._asked == 0:
            return SwapDecision(0.0, "")
        if self._asked != "auto":
            self._check_asked(budget)
            return SwapDecision(self._asked, "")
        if self._on_cpu:
            if self._is_off:
                return SwapDecision(0.0, "the KV pool is in host memory already")
            swap_bytes = self._share_of_pool(max_total_tokens, budget)
            return SwapDecision(swap_bytes / GIB, f"a quarter of the KV pool, {size_text(swap_bytes)}")
        return self._auto_beside_gpu(budget)

    @property
    def _is_off(self) -> bool:
        """Whether no swap space is needed."""
        if self._mode == "recompute" or self._asked == 0:
            return True
        return self._asked == "auto" and self._on_cpu and self._mode != "swap"

    def _auto_beside_gpu(self, budget: MemoryBudget) -> SwapDecision:
        share = max(0, self._host_left) // HOST_SHARE
        if share >= USUAL_BYTES:
            return SwapDecision(USUAL_BYTES / GIB, "enough for a few preempted requests")
        if share >= self._page_bytes(budget):
            whole = share // MIB * MIB if share >= MIB else share
            return SwapDecision(whole / GIB, f"a quarter of {self._host_sums}")
        if self._mode == "swap":
            raise ConfigError(
                f"preemption_mode is swap, but a quarter of {self._host_sums} holds no page of "
                f"{size_text(self._page_bytes(budget))}; free host memory or use --preemption-mode recompute"
            )
        return SwapDecision(0.0, f"a quarter of {self._host_sums} holds no page")

    def _check_asked(self, budget: MemoryBudget) -> None:
        asked_bytes = self._asked_bytes()
        if asked_bytes < self._page_bytes(budget):
            raise ConfigError(
                f"swap_space is {self._asked:g} GiB, less than one page of {size_text(self._page_bytes(budget))} "
                f"({self._page_size} tokens x {size_text(budget.kv_token_bytes)}); raise --swap-space, or set it to 0"
            )
        if not self._on_cpu and asked_bytes > self._host_left:
            raise ConfigError(
                f"swap_space is {self._asked:g} GiB, but {self._host_sums} leaves "
                f"{size_text(max(0, self._host_left))}; lower --swap-space"
            )

    def _asked_bytes(self) -> int:
        assert self._asked != "auto"
        return int(self._asked * GIB)

    def _page_bytes(self, budget: MemoryBudget) -> int:
        return self._page_size * budget.kv_token_bytes

    def _share_of_pool(self, num_tokens: int, budget: MemoryBudget) -> int:
        """A quarter of a pool in whole pages, at least one."""
        num_pages = num_tokens // self._page_size
        return max(1, num_pages // POOL_SHARE) * self._page_bytes(budget)

    @property
    def _host_sums(self) -> str:
        cached = f" - {size_text(int(self._cached * GIB))} --kv-host-size" if self._cached else ""
        free, runtime = size_text(self._host_free), size_text(RUNTIME_BYTES)
        return f"({free} free on the host - {runtime} runtime{cached})"
