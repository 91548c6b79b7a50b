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
from .host_facts import HostFacts, usable_threads
from .memory_budget import GIB
from .pool_size import Device, PoolDecision, PoolSize, prompt_tokens

if TYPE_CHECKING:
    from .model_files.model_spec import ModelSpec

BF16_FLAGS: Final = ("amx_bf16", "avx512_bf16", "bf16")  # the last one is ARM's
BF16_CAPABILITY: Final = (8, 0)  # Ampere
CPU_MEM_FRACTION: Final = 0.4  # other programs live in the same memory
CUDA_MEM_FRACTION: Final = 0.88
CPU_CHUNK_TOKENS: Final = 512
CUDA_CHUNK_TOKENS: Final = ((35, 2048), (60, 4096), (100, 8192))  # (GPU with less than GiB, chunk)
CUDA_LARGE_CHUNK_TOKENS: Final = 16384
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
        pool = self.pool(device, dtype, num_threads, chunk, fraction)
        config = replace(
            self.config,
            model=replace(
                self.config.model,
                device=device,
                dtype=dtype,
                num_threads=num_threads,
                max_model_len=pool.max_model_len,
            ),
            cache=replace(
                self.config.cache,
                mem_fraction=fraction,
                max_total_tokens=pool.max_total_tokens,
                swap_space=pool.swap_gib,
            ),
            scheduler=replace(
                self.config.scheduler,
                chunked_prefill_size=chunk,
                max_running_requests=pool.max_running_requests,
                max_num_batched_tokens=self.max_num_batched_tokens(chunk, pool.max_running_requests),
                long_prefill_token_threshold=self.long_prefill_token_threshold(pool.max_model_len),
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
            gpu = self.host.gpus[0]
            if gpu.compute_capability and gpu.compute_capability < BF16_CAPABILITY:
                major, minor = gpu.compute_capability
                reason = f"{gpu.name} (compute capability {major}.{minor}) has no bfloat16 instructions"
                return self.note("dtype", "float32", reason)
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

    def pool(self, device: str, dtype: str, num_threads: int, chunk: int, fraction: float) -> PoolDecision:
        host_free_bytes = self.host.mem_usable_bytes
        facts = Device(
            name=device,
            dtype=dtype,
            num_threads=num_threads,
            free_bytes=self.host.gpus[0].free_bytes if device == "cuda" else host_free_bytes,
            host_free_bytes=host_free_bytes,
        )
        decision = PoolSize(self.config, self.spec, facts, chunk=chunk, fraction=fraction).decide()
        self.notes.update(decision.notes)
        return decision

    # ---------------------------------------------------------------- steps

    def max_num_batched_tokens(self, chunk: int, max_running: int) -> int | None:
        scheduler = self.config.scheduler
        asked, decode_first = scheduler.max_num_batched_tokens, scheduler.phases == "decode-first"
        if asked is None:
            if not decode_first:
                return None
            # One budget, as in vLLM: decodes take of it, so a larger one than the chunk would never bind.
            prompts = prompt_tokens(self.config, chunk)
            if prompts >= max_running + self.page_size:
                reason = "one budget: prompts get what the running requests leave of a full step of prompts"
                return self.note("max_num_batched_tokens", prompts, reason)
            reason = f"{prompts} tokens of prompts beside {max_running} running requests, who would take all of them"
            return self.note("max_num_batched_tokens", prompts + max_running, reason)
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
