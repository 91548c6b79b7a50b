"""`resolve`: replace every "auto" by a value, once, at start, and say in one line where each value came from.

Pure arithmetic over the model's shape (`ModelSpec`) and the machine (`HostFacts`): no torch, no device, no clock. The
same configuration on the same machine gives the same engine.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, TypeVar

from .config import EngineConfig
from .errors import ConfigError
from .feasibility import pages_for
from .host_facts import HostFacts, usable_threads
from .memory_budget import GIB, MemoryBudget, plan_memory
from .swap_space import SwapSpace

if TYPE_CHECKING:
    from .model_files.model_spec import ModelSpec

BF16_FLAGS: Final = ("amx_bf16", "avx512_bf16", "bf16")  # the last one is ARM's
CPU_MEM_FRACTION: Final = 0.4  # other programs live in the same memory
CUDA_MEM_FRACTION: Final = 0.88
CPU_CHUNK_TOKENS: Final = 512
CUDA_CHUNK_TOKENS: Final = ((35, 2048), (60, 4096), (100, 8192))  # (GPU with less than GiB, chunk)
CUDA_LARGE_CHUNK_TOKENS: Final = 16384
TOKENS_PER_REQUEST: Final = 1024  # what a usual conversation holds; decides how many may run at once
MAX_AUTO_RUNNING: Final = 256
MIN_USEFUL_LEN: Final = 256  # a context below it answers nothing
LONG_PREFILL_FRACTION: Final = 0.04  # of the context; vLLM's

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Resolved:
    """A configuration without "auto".

    Attributes:
        config: every value concrete; `resolve` leaves it as it is.
        notes: setting -> why it has its value, for each setting that `resolve` filled in or changed.
    """

    config: EngineConfig
    notes: Mapping[str, str]


def resolve(config: EngineConfig, spec: ModelSpec, host: HostFacts) -> Resolved:
    """Fill in every "auto".

    Raises:
        ConfigError: the settings contradict the model or the machine (more context than the model knows, too little
            memory for one useful sequence, CUDA without a GPU); the message holds the sums.
    """
    return _Resolver(config, spec, host).run()


class _Resolver:
    """One resolution: collects values and notes; each method decides one setting and uses those decided before."""

    def __init__(self, config: EngineConfig, spec: ModelSpec, host: HostFacts) -> None:
        self.config, self.spec, self.host = config, spec, host
        self.notes: dict[str, str] = {}
        self.page_size = config.cache.page_size

    def run(self) -> Resolved:
        device = self.device()
        dtype = self.dtype(device)
        num_threads = self.num_threads()
        chunk = self.chunked_prefill_size(device)
        fraction = self.mem_fraction(device)
        wanted_len = self.wanted_len()
        most_running = self.most_running(device, num_threads)
        swap = SwapSpace(self.config, device, self.host.mem_usable_bytes)
        budget = swap.beside(self.budget(device, dtype, chunk, fraction, wanted_len, most_running))
        pool = self.pool_by_memory(budget)
        max_model_len = self.max_model_len(wanted_len, pool, budget)
        max_running = self.max_running_requests(device, num_threads, most_running, pool)
        max_total = self.max_total_tokens(pool, max_running, max_model_len, budget)
        swap_space = swap.decide(max_total, budget)
        config = replace(
            self.config,
            model=replace(
                self.config.model,
                device=device,
                dtype=dtype,
                num_threads=num_threads,
                max_model_len=max_model_len,
            ),
            cache=replace(
                self.config.cache,
                mem_fraction=fraction,
                max_total_tokens=max_total,
                swap_space=self.note("swap_space", swap_space.gib, swap_space.reason),
            ),
            scheduler=replace(
                self.config.scheduler,
                chunked_prefill_size=chunk,
                max_running_requests=max_running,
                max_num_batched_tokens=self.max_num_batched_tokens(chunk, max_running),
                long_prefill_token_threshold=self.long_prefill_token_threshold(max_model_len),
                overlap=self.overlap(device),
            ),
        )
        _assert_no_auto(config)
        return Resolved(config, self.notes)

    # ---------------------------------------------------------------- device and threads

    def device(self) -> Any:
        gpus, asked = self.host.gpus, self.config.model.device
        if asked == "cuda":
            if not gpus:
                raise ConfigError("device is cuda, but no NVIDIA driver or GPU is visible; use --device cpu")
            if not self.host.torch_has_cuda:
                raise ConfigError(
                    f"device is cuda, but the installed torch {self.host.torch_version or '(none)'} is not a CUDA "
                    f"build; install the engine with its cuda extra or use --device cpu"
                )
        if asked != "auto":
            return asked
        if gpus and self.host.torch_has_cuda:
            return self.note("device", "cuda", f"{gpus[0].name} is visible and torch is a CUDA build")
        if gpus:
            return self.note(
                "device", "cpu", f"torch {self.host.torch_version} has no CUDA, though a GPU is visible"
            )
        return self.note("device", "cpu", "no NVIDIA GPU is visible")

    def dtype(self, device: str) -> Any:
        if self.config.model.dtype != "auto":
            return self.config.model.dtype
        if device == "cuda":
            return self.note("dtype", "bfloat16", "native on GPUs since Ampere")
        native = [flag for flag in BF16_FLAGS if flag in self.host.cpu_flags]
        if native:
            return self.note("dtype", "bfloat16", f"the CPU multiplies bfloat16 ({native[0]})")
        return self.note("dtype", "float32", "the CPU has no bfloat16 instructions, emulating them is slower")

    def num_threads(self) -> int:
        if self.config.model.num_threads != "auto":
            return self.config.model.num_threads
        threads = usable_threads(self.host)
        if threads < self.host.num_cores:
            reason = f"the cgroup grants {self.host.cpu_quota:g} CPUs of {self.host.num_cores} cores"
        else:
            reason = f"{self.host.num_cores} physical cores in the affinity mask ({self.host.num_cpus} logical CPUs)"
        return self.note("num_threads", threads, reason)

    def chunked_prefill_size(self, device: str) -> int:
        asked = self.config.scheduler.chunked_prefill_size
        if asked == -1:
            return -1
        budget = self.config.scheduler.max_num_batched_tokens
        if asked != "auto":
            chunk, reason = asked, ""
        elif budget is not None and self.config.scheduler.phases == "decode-first":
            chunk, reason = budget, "one budget for prompts and decodes, --max-num-batched-tokens"
        elif device == "cpu":
            chunk, reason = (
                CPU_CHUNK_TOKENS,
                "keeps a CPU step well under a second, so running requests go on",
            )
        else:
            gib = self.host.gpus[0].total_bytes / GIB
            chunk = next((size for below, size in CUDA_CHUNK_TOKENS if gib < below), CUDA_LARGE_CHUNK_TOKENS)
            reason = f"for a GPU with {gib:.0f} GiB"
        rounded = max(self.page_size, chunk // self.page_size * self.page_size)
        if rounded != chunk:
            reason = f"{chunk} in whole pages of {self.page_size}" + (f"; {reason}" if reason else "")
        return self.note("chunked_prefill_size", rounded, reason)

    # ---------------------------------------------------------------- memory

    def mem_fraction(self, device: str) -> float:
        asked = self.config.cache.mem_fraction
        if asked != "auto":
            return asked
        if device == "cuda":
            return self.note("mem_fraction", CUDA_MEM_FRACTION, "leaves room for graphs and allocator slack")
        return self.note("mem_fraction", CPU_MEM_FRACTION, "leaves memory to other programs on this machine")

    def wanted_len(self) -> int:
        """The context length before memory has its say."""
        asked, known = self.config.model.max_model_len, self.spec.max_position_embeddings
        if asked == "auto":
            return known
        if asked > known:
            raise ConfigError(
                f"max_model_len is {asked}, but the model knows positions up to {known} only; lower --max-model-len"
            )
        return asked

    def most_running(self, device: str, num_threads: int) -> int:
        """Requests that will run at once at most: `max_running_requests` before memory has its say."""
        asked = self.config.scheduler.max_running_requests
        if asked != "auto":
            return asked
        most = MAX_AUTO_RUNNING if device == "cuda" else min(MAX_AUTO_RUNNING, max(64, 16 * num_threads))
        return min(most, self.most_decodes)

    @property
    def most_decodes(self) -> int:
        """Requests for whose tokens a step has room, where one budget holds prompts and decodes."""
        scheduler = self.config.scheduler
        if scheduler.phases != "decode-first" or scheduler.max_num_batched_tokens is None:
            return MAX_AUTO_RUNNING
        return scheduler.max_num_batched_tokens

    def budget(
        self, device: str, dtype: str, chunk: int, fraction: float, wanted_len: int, most_running: int
    ) -> MemoryBudget:
        """The sums for the largest step that the scheduler can make."""
        return plan_memory(
            self.spec,
            usable_bytes=self.host.gpus[0].free_bytes if device == "cuda" else self.host.mem_usable_bytes,
            dtype=dtype,
            fraction=fraction,
            step_tokens=self.largest_step(chunk, wanted_len, most_running),
            max_model_len=wanted_len,
            max_running_requests=most_running,
            copies_tied_head=device == "cpu",
        )

    def largest_step(self, chunk: int, wanted_len: int, most_running: int) -> int:
        """New tokens of the largest step: full of prompts, or everybody decodes and leaves a page for a prompt.

        Decodes that ride along with prompts take of their limit and do not add to it (see `PrefillBudget`).
        """
        scheduler = self.config.scheduler
        apart = scheduler.phases == "prefill-first"
        most_decodes = most_running if apart else most_running + self.page_size
        largest = max(min(self.prompt_tokens(chunk), most_running * wanted_len), most_decodes)
        if scheduler.max_num_batched_tokens is not None:
            largest = min(largest, max(scheduler.max_num_batched_tokens, most_decodes))
        if chunk == -1:  # prompts are never cut: one of any length is computed beside whoever decodes
            largest = max(largest, wanted_len + (0 if apart else most_running))
        return largest

    def prompt_tokens(self, chunk: int) -> int:
        """Prompt tokens of a step that holds more than a single prompt."""
        limit = max(self.config.scheduler.max_prefill_tokens, self.page_size)
        return limit if chunk == -1 else min(limit, chunk)

    def pool_by_memory(self, budget: MemoryBudget) -> int:
        """KV slots that memory pays for, or that the user asked for, in whole pages."""
        asked = self.config.cache.max_total_tokens
        if asked == "auto":
            pool = budget.tokens
        elif asked * budget.kv_token_bytes > budget.left_bytes:
            most = max(0, budget.left_bytes) // budget.kv_token_bytes
            raise ConfigError(
                f"max_total_tokens is {asked}, which takes {asked * budget.kv_token_bytes / GIB:.1f} GiB, but memory "
                f"holds {most} tokens: {replace(budget, fraction=1).sums}; "
                f"lower --max-total-tokens{self.or_swap_space(budget)}"
            )
        else:
            pool = asked
        rounded = pool // self.page_size * self.page_size
        if rounded == 0 and asked != "auto":
            raise ConfigError(
                f"max_total_tokens is {asked}, less than one page of {self.page_size} tokens; raise it"
            )
        return rounded

    def max_model_len(self, wanted_len: int, pool: int, budget: MemoryBudget) -> int:
        asked = self.config.model.max_model_len
        pool_is_given = self.config.cache.max_total_tokens != "auto"
        if asked != "auto":
            if pool < asked - 1 and not pool_is_given:
                raise ConfigError(
                    f"max_model_len is {asked}, but memory holds {pool} tokens: {budget.sums}; lower --max-model-len "
                    f"or raise --mem-fraction{self.or_swap_space(budget)}"
                )
            return asked
        if pool >= wanted_len:
            return self.note("max_model_len", wanted_len, "all positions the model knows")
        if pool_is_given:
            return self.note(
                "max_model_len", max(2, pool), f"bounded by --max-total-tokens; the model knows {wanted_len}"
            )
        if pool < min(MIN_USEFUL_LEN, wanted_len):
            raise ConfigError(
                f"memory holds a context of {pool} tokens only: {budget.sums}; free memory, raise --mem-fraction "
                f"(now {budget.fraction:g}) or lower --chunked-prefill-size, --max-prefill-tokens and "
                f"--max-running-requests{self.or_swap_space(budget)}"
            )
        return self.note(
            "max_model_len", pool, f"bounded by memory, {budget.sums}; the model knows {wanted_len}"
        )

    def max_running_requests(self, device: str, num_threads: int, most_running: int, pool: int) -> int:
        asked = self.config.scheduler.max_running_requests
        if asked != "auto":
            return asked
        by_memory = max(1, pool // TOKENS_PER_REQUEST)
        if by_memory < most_running:
            reason = f"one per {TOKENS_PER_REQUEST} of {pool} KV tokens"
        elif most_running == self.most_decodes < MAX_AUTO_RUNNING:
            reason = f"a token of each fits into a step of --max-num-batched-tokens {most_running}"
        else:
            reason = "enough to fill the GPU" if device == "cuda" else f"for {num_threads} CPU threads"
        return self.note("max_running_requests", min(by_memory, most_running), reason)

    def max_total_tokens(self, pool: int, max_running: int, max_model_len: int, budget: MemoryBudget) -> int:
        asked = self.config.cache.max_total_tokens
        if asked != "auto":
            reason = f"{asked} in whole pages of {self.page_size}" if pool != asked else ""
            return self.note("max_total_tokens", pool, reason)
        useful = max_running * pages_for(max_model_len, self.page_size) * self.page_size
        if useful <= pool:
            return self.note(
                "max_total_tokens",
                useful,
                f"{max_running} requests x {max_model_len} tokens; memory holds {pool}",
            )
        return self.note("max_total_tokens", pool, budget.sums)

    def max_num_batched_tokens(self, chunk: int, max_running: int) -> int | None:
        scheduler = self.config.scheduler
        asked, decode_first = scheduler.max_num_batched_tokens, scheduler.phases == "decode-first"
        if asked is None:
            if not decode_first:
                return None
            prompts = self.prompt_tokens(chunk)
            return self.note(
                "max_num_batched_tokens",
                prompts + max_running,
                f"{prompts} tokens of prompts beside {max_running} running requests",
            )
        if asked < self.page_size:
            raise ConfigError(
                f"max_num_batched_tokens is {asked}, less than one page of {self.page_size} tokens, so no prompt could "
                f"be cut to fit into a step; raise it or lower --page-size"
            )
        if decode_first and asked < max_running:
            raise ConfigError(
                f"max_num_batched_tokens is {asked}, but with phases decode-first a step must hold a token of each of "
                f"{max_running} running requests; raise it or lower --max-running-requests"
            )
        return asked

    def long_prefill_token_threshold(self, max_model_len: int) -> int:
        scheduler = self.config.scheduler
        if scheduler.long_prefill_token_threshold or scheduler.max_num_partial_prefills == 1:
            return scheduler.long_prefill_token_threshold
        return self.note(
            "long_prefill_token_threshold",
            max(1, int(max_model_len * LONG_PREFILL_FRACTION)),
            f"{LONG_PREFILL_FRACTION * 100:g} % of the context of {max_model_len}, since "
            f"{scheduler.max_num_partial_prefills} prompts may be cut at the same time",
        )

    def overlap(self, device: str) -> bool:
        asked = self.config.scheduler.overlap
        if asked != "auto":
            return asked
        if device == "cuda":
            return self.note("overlap", True, "the GPU need not wait for the host between two steps")
        return self.note(
            "overlap", False, "on the CPU a launch is the whole step, so nothing would be left to overlap"
        )

    def or_swap_space(self, budget: MemoryBudget) -> str:
        """One more way out, where the KV pool shares its memory with swapped KV."""
        return " (or --swap-space)" if budget.swap_bytes else ""

    def note(self, name: str, value: T, reason: str) -> T:
        if reason:
            self.notes[name] = reason
        return value


def _assert_no_auto(config: EngineConfig) -> None:
    """A setting that may be "auto" and that nobody fills in is our bug; load_format is decided with the files."""
    for group in dataclasses.fields(config):
        values = getattr(config, group.name)
        for field in dataclasses.fields(values):
            assert getattr(values, field.name) != "auto" or field.name == "load_format", field.name
