"""`StepSettings`: the limits of a step and the order of steps; a part of `resolve`."""

from __future__ import annotations

from typing import Final, TypeVar

from ...models.spec.sizes import GIB
from ...runtime.config.engine_config import EngineConfig
from ...runtime.errors import ConfigError
from .pool_size import prompt_tokens

CPU_CHUNK_TOKENS: Final = 512
CPU_TARGET_STEP_MS: Final = 50.0
CPU_MULTI_STEP_MS: Final = 40.0
CUDA_CHUNK_TOKENS: Final = ((35, 2048), (60, 4096), (100, 8192))  # (GPU with less than GiB, chunk)
CUDA_LARGE_CHUNK_TOKENS: Final = 16384
LONG_PREFILL_FRACTION: Final = 0.04  # of the context; vLLM's

T = TypeVar("T")


class StepSettings:
    """Each method decides the setting of its name, and raises ConfigError if the user's value is impossible.

    Attributes:
        notes: setting -> reason for its value, for each that was filled in or changed.
    """

    def __init__(self, config: EngineConfig, gpu_bytes: int, device: str) -> None:
        """`device`: "cpu" or "cuda", already resolved; `gpu_bytes`: memory of the smallest GPU that is used."""
        self._config = config
        self._scheduler = config.scheduler
        self._page_size = config.cache.page_size
        self._gpu_bytes = gpu_bytes
        self._device = device
        self.notes: dict[str, str] = {}

    def chunked_prefill_size(self) -> int:
        """Prompt tokens of a step, in whole pages; -1: prompts are not chunked."""
        asked = self._scheduler.chunked_prefill_size
        if asked == -1:
            return -1
        budget = self._scheduler.max_num_batched_tokens
        if asked != "auto":
            chunk, reason = asked, ""
        elif budget is not None and self._scheduler.phases == "decode-first":
            chunk, reason = budget, "one budget for prompts and decodes, --max-num-batched-tokens"
        elif self._device == "cpu":
            chunk, reason = (
                CPU_CHUNK_TOKENS,
                "keeps a CPU step well under a second, so running requests keep decoding",
            )
        else:
            gib = self._gpu_bytes / GIB
            chunk = next((size for below, size in CUDA_CHUNK_TOKENS if gib < below), CUDA_LARGE_CHUNK_TOKENS)
            reason = f"for a GPU with {gib:.0f} GiB"
        rounded = max(self._page_size, chunk // self._page_size * self._page_size)
        if rounded != chunk:
            reason = f"{chunk} in whole pages of {self._page_size}" + (f"; {reason}" if reason else "")
        return self._note("chunked_prefill_size", rounded, reason)

    def target_step_ms(self, chunk: int) -> float:
        """`chunk`: the resolved `chunked_prefill_size`."""
        asked = self._scheduler.target_step_ms
        apart = self._scheduler.phases == "prefill-first"
        if asked != "auto":
            if asked and apart:
                raise ConfigError(
                    f"target_step_ms is {asked:g}, but with phases prefill-first no step has prompts and decodes, so "
                    "no chunk can be cut for decodes; use --phases mixed, or omit --target-step-ms"
                )
            return asked
        if self._device == "cpu" and chunk != -1 and not apart:
            reason = "running requests decode 20 times a second beside a prompt, if the device is fast enough"
            return self._note("target_step_ms", CPU_TARGET_STEP_MS, reason)
        return 0.0

    def max_num_batched_tokens(self, chunk: int, max_running: int) -> int | None:
        """`chunk`, `max_running`: the resolved `chunked_prefill_size` and `max_running_requests`."""
        scheduler = self._scheduler
        asked, decode_first = scheduler.max_num_batched_tokens, scheduler.phases == "decode-first"
        if asked is None:
            if not decode_first:
                return None
            # One budget, as in vLLM: decodes count against it, so a value above the chunk would never bind.
            prompts = prompt_tokens(self._config, chunk)
            if prompts >= max_running + self._page_size:
                reason = "one budget: prompts get what the running requests leave of a full step of prompts"
                return self._note("max_num_batched_tokens", prompts, reason)
            reason = f"{prompts} tokens of prompts and {max_running} running requests, which alone could take all of it"
            return self._note("max_num_batched_tokens", prompts + max_running, reason)
        if asked < self._page_size:
            raise ConfigError(
                f"max_num_batched_tokens is {asked}, less than one page of {self._page_size} tokens, so no prompt "
                "could be cut to fit into a step; raise it or lower --page-size"
            )
        if decode_first and asked < max_running:
            raise ConfigError(
                f"max_num_batched_tokens is {asked}, but with phases decode-first a step must hold a token of each of "
                f"{max_running} running requests; raise it or lower --max-running-requests"
            )
        return asked

    def long_prefill_token_threshold(self, max_model_len: int) -> int:
        """Tokens from which a prompt is long, if several may be partly prefilled."""
        scheduler = self._scheduler
        if scheduler.long_prefill_token_threshold or scheduler.max_num_partial_prefills == 1:
            return scheduler.long_prefill_token_threshold
        return self._note(
            "long_prefill_token_threshold",
            max(1, int(max_model_len * LONG_PREFILL_FRACTION)),
            f"{LONG_PREFILL_FRACTION * 100:g} % of the context of {max_model_len}, since "
            f"{scheduler.max_num_partial_prefills} prompts may be partly prefilled at the same time",
        )

    def overlap(self) -> bool:
        """Whether a step is planned while the previous one is computed."""
        asked = self._scheduler.overlap
        if asked != "auto":
            return asked
        if self._device == "cuda":
            return self._note("overlap", True, "the GPU does not wait for the host between two steps")
        return self._note(
            "overlap", False, "on the CPU a launch runs the whole step, so there is nothing to overlap"
        )

    def multi_step_ms(self) -> float:
        """Longest duration of a multi-step decode; 0: single steps."""
        asked = self._scheduler.multi_step_ms
        reason = ""
        if self._device != "cpu":
            reason = f"on {self._device} the host plans the next step while the device computes"
        elif self._config.parallel.tp > 1:
            reason = f"tp is {self._config.parallel.tp}, and the other ranks do not know when a multi-step decode ends"
        elif self._config.parallel.pp > 1:
            reason = f"pp is {self._config.parallel.pp}, and several steps are in flight"
        elif self._scheduler.overlap is True:
            reason = (
                "overlap is on: the next step is planned before the number of tokens of this one is known"
            )
        elif self._scheduler.phases == "prefill-first" and self._scheduler.prefill_decode_interval:
            reason = "prefill_decode_interval counts decode steps, and a multi-step decode would count as one of them"
        if asked == "auto":
            if reason:
                return 0.0
            why = f"text still arrives {1000 / CPU_MULTI_STEP_MS:.0f} times a second"
            return self._note("multi_step_ms", CPU_MULTI_STEP_MS, why)
        if asked and reason:
            raise ConfigError(f"multi_step_ms is {asked:g}, but {reason}; omit --multi-step-ms")
        return asked

    def _note(self, name: str, value: T, reason: str) -> T:
        if reason:
            self.notes[name] = reason
        return value
