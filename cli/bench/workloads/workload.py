"""`WorkloadSettings`: the flags of a workload; makes the requests and their schedule.

A flag with the same meaning in SGLang or vLLM has their name, so that their commands work here.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol

import typer

from ....runtime.errors import ConfigError
from ..load import BenchRequest
from .datasets import (
    LengthRange,
    TextEncoder,
    arrival_offsets,
    random_requests,
    shared_prefix_requests,
    sharegpt_requests,
    trace_requests,
)
from .texts import custom_requests, text_requests

if TYPE_CHECKING:
    from ....models.tokenizer.tokenizer import Tokenizer
    from ....simulator.trace_files import TraceOptions


class DatasetName(enum.StrEnum):
    """The workloads."""

    RANDOM = "random"
    SHARED_PREFIX = "generated-shared-prefix"
    SHAREGPT = "sharegpt"
    CUSTOM = "custom"
    TRACE = "trace"
    EMBED = "embed"


class PromptTokenizer(TextEncoder, Protocol):
    """Tokenizer that makes the prompts of every workload."""

    def ordinary_token_ids(self) -> list[int]:
        """Every token id that is not special."""
        ...


class WorkloadTokenizer:
    """The tokenizer that makes prompts."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    @classmethod
    def load(cls, model: str) -> WorkloadTokenizer:
        """The tokenizer of a model, without its weights."""
        from ....models.source import resolve_source
        from ....models.tokenizer.tokenizer import load_tokenizer

        return cls(
            load_tokenizer(resolve_source(model, need_weights=False, need_tower=False), encode_only=True)
        )

    def encode(self, text: str) -> list[int]:
        """Token ids, without a beginning-of-sequence token."""
        return self._tokenizer.encode(text, add_special_tokens=False)

    def encode_texts(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of whole texts, with the special tokens that the model wants."""
        return self._tokenizer.encode_batch(list(texts), True)

    def ordinary_token_ids(self) -> list[int]:
        """Every token id that is not special."""
        tokenizer = self._tokenizer
        return [token_id for token_id in range(tokenizer.vocab_size) if not tokenizer.is_special(token_id)]


def _workload(help_text: str, *names: str) -> Any:
    return typer.Option(*names, help=help_text, rich_help_panel="Workload")


def _load(help_text: str) -> Any:
    return typer.Option(help=help_text, rich_help_panel="Load")


def _gsp(help_text: str) -> Any:
    return typer.Option(help=help_text, rich_help_panel="Workload, generated-shared-prefix")


def _embed(help_text: str) -> Any:
    return typer.Option(help=help_text, rich_help_panel="Workload, embed")


def _file(help_text: str) -> Any:
    return typer.Option(help=help_text, rich_help_panel="Workload, files")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadSettings:
    """The requests and their arrival times; every field is an option of `engine bench`."""

    dataset_name: Annotated[
        DatasetName,
        _workload(
            "Data set of the prompts; embed: texts, of which vectors are asked for.",
            "--dataset-name",
            "--dataset",
        ),
    ] = DatasetName.RANDOM
    num_prompts: Annotated[
        int, _workload("Requests of the run (random, sharegpt, custom, trace, embed).")
    ] = 64
    random_input_len: Annotated[str, _workload("Prompt tokens: 512, or a range 64:512.")] = "256"
    random_output_len: Annotated[str, _workload("Output tokens: 128, or a range 64:256.")] = "64"
    random_range_ratio: Annotated[
        float, _workload("r < 1 turns a single length n into the range r*n..n, as in SGLang.")
    ] = 1.0
    seed: Annotated[int, _workload("Seed of prompts, lengths and arrival times.")] = 0
    embed_len: Annotated[str, _embed("Tokens of a text: 128, or a range 16:256.")] = "16:256"
    embed_batch: Annotated[int, _embed("Texts of a request.")] = 1
    gsp_num_groups: Annotated[int, _gsp("Shared prefixes.")] = 4
    gsp_prompts_per_group: Annotated[int, _gsp("Requests per shared prefix.")] = 16
    gsp_system_prompt_len: Annotated[int, _gsp("Tokens of a shared prefix.")] = 512
    gsp_question_len: Annotated[int, _gsp("Tokens of a request after the shared prefix.")] = 64
    gsp_output_len: Annotated[int, _gsp("Output tokens of a request.")] = 64
    dataset_path: Annotated[
        Path | None,
        _file(
            "File; nothing is downloaded. sharegpt: ShareGPT conversations, rows of messages, Alpaca rows; custom: "
            "prompts as JSON Lines; trace: a Mooncake, Qwen, Azure or BurstGPT trace."
        ),
    ] = None
    sharegpt_output_len: Annotated[
        int | None, _file("Output tokens (default: those of the recorded answer).")
    ] = None
    sharegpt_max_len: Annotated[int, _file("Skip conversations with more tokens than this in total.")] = 2048
    trace_block_size: Annotated[
        int | None, _file("trace: tokens per hash id (default: 512, as Mooncake's; 16 for Qwen's traces).")
    ] = None
    trace_time_unit: Annotated[
        Literal["s", "ms", "us"] | None,
        _file("trace: unit of the timestamps (default: ms for Mooncake's, s for others)."),
    ] = None
    time_scale: Annotated[
        float | None, _file("trace: divisor of the times; 2: twice the rate; the times are replayed.")
    ] = None
    custom_output_len: Annotated[int, _file("custom: output tokens of a row without output_tokens.")] = 256
    request_rate: Annotated[float, _load("Mean arrivals per second; inf sends all at once.")] = math.inf
    burstiness: Annotated[float, _load("1: Poisson; below 1: burstier; above 1: more even.")] = 1.0
    max_concurrency: Annotated[int | None, _load("Most requests in flight at the same time.")] = None
    warmup_requests: Annotated[int, _load("Requests sent before the clock starts.")] = 1

    def check(self) -> None:
        """Check what can be checked before a model is loaded.

        Raises:
            ConfigError: a value out of range.
        """
        if self.num_prompts < 1:
            raise ConfigError(f"--num-prompts is {self.num_prompts}, but it must be at least 1")
        if self.seed < 0:
            raise ConfigError(f"--seed is {self.seed}, but it must be 0 or more")
        if self.max_concurrency is not None and self.max_concurrency < 1:
            raise ConfigError(f"--max-concurrency is {self.max_concurrency}, but it must be at least 1")
        if self.warmup_requests < 0:
            raise ConfigError(f"--warmup-requests is {self.warmup_requests}, but it must be 0 or more")
        if self.custom_output_len < 1:
            raise ConfigError(f"--custom-output-len is {self.custom_output_len}, but it must be at least 1")
        self._check_file()
        if self.makes_vectors:
            self._texts(1, self.seed)
        arrival_offsets(1, self.request_rate, self.burstiness, self.seed)
        self._length_ranges()

    def _check_file(self) -> None:
        name, of_file = self.dataset_name, self.has_texts or self.dataset_name is DatasetName.TRACE
        if of_file and self.dataset_path is None:
            raise ConfigError(f"--dataset-name {name} needs --dataset-path FILE; nothing is downloaded")
        if self.dataset_path is not None and not of_file:
            raise ConfigError(
                f"--dataset-path has no effect on --dataset-name {name}; use sharegpt, custom or trace, or leave it out"
            )
        for flag, value in (
            ("--trace-block-size", self.trace_block_size),
            ("--trace-time-unit", self.trace_time_unit),
            ("--time-scale", self.time_scale),
        ):
            if value is not None and name is not DatasetName.TRACE:
                raise ConfigError(f"{flag} has no effect on --dataset-name {name}; leave it out")
        if name is DatasetName.TRACE and (math.isfinite(self.request_rate) or self.burstiness != 1.0):
            raise ConfigError(
                "a trace has its own times; leave out --request-rate and --burstiness, and use --time-scale"
            )
        if self.dataset_path is not None and name is not DatasetName.CUSTOM:
            from ....simulator.trace_files import kind_of

            kind = kind_of(self.dataset_path)
            wanted = DatasetName.TRACE if kind.is_timed else DatasetName.SHAREGPT
            if name is not wanted:
                raise ConfigError(f"{self.dataset_path} is {kind.value}; use --dataset-name {wanted}")
            self._trace_options().check(kind, self.dataset_path)

    def _trace_options(self) -> TraceOptions:
        from ....simulator.trace_files import TraceOptions

        return TraceOptions(self.trace_block_size, self.trace_time_unit, self.time_scale)

    @property
    def has_texts(self) -> bool:
        """Whether the prompts are texts, which chats need."""
        return self.dataset_name in (DatasetName.SHAREGPT, DatasetName.CUSTOM)

    @property
    def makes_vectors(self) -> bool:
        """Whether the requests ask for vectors of texts; they need no tokenizer."""
        return self.dataset_name is DatasetName.EMBED

    def requests(self, tokenizer: PromptTokenizer | None) -> list[BenchRequest]:
        """The workload, in the order of sending; `tokenizer` may be None if it makes vectors."""
        if self.makes_vectors:
            return self._texts(self.num_prompts, self.seed)
        assert tokenizer is not None
        match self.dataset_name:
            case DatasetName.EMBED:
                raise AssertionError("handled above")
            case DatasetName.RANDOM:
                input_len, output_len = self._length_ranges()
                token_ids = tokenizer.ordinary_token_ids()
                return random_requests(self.num_prompts, input_len, output_len, token_ids, self.seed)
            case DatasetName.SHARED_PREFIX:
                return shared_prefix_requests(
                    num_groups=self.gsp_num_groups,
                    prompts_per_group=self.gsp_prompts_per_group,
                    system_prompt_len=self.gsp_system_prompt_len,
                    question_len=self.gsp_question_len,
                    output_len=self.gsp_output_len,
                    token_ids=tokenizer.ordinary_token_ids(),
                    seed=self.seed,
                )
            case DatasetName.CUSTOM:
                assert self.dataset_path is not None  # by `check`
                return custom_requests(
                    self.dataset_path, self.num_prompts, tokenizer, output_len=self.custom_output_len
                )
            case DatasetName.SHAREGPT:
                assert self.dataset_path is not None  # by `check`
                return sharegpt_requests(
                    self.dataset_path,
                    self.num_prompts,
                    tokenizer,
                    max_total_len=self.sharegpt_max_len,
                    output_len=self.sharegpt_output_len,
                    seed=self.seed,
                )
            case DatasetName.TRACE:
                assert self.dataset_path is not None  # by `check`
                return trace_requests(
                    self.dataset_path,
                    self.num_prompts,
                    self._trace_options(),
                    token_ids=tokenizer.ordinary_token_ids(),
                    seed=self.seed,
                )

    def _texts(self, num_requests: int, seed: int) -> list[BenchRequest]:
        length = LengthRange.parse("--embed-len", self.embed_len)
        return text_requests(num_requests, self.embed_batch, length, seed)

    def warmup(self, tokenizer: WorkloadTokenizer | None) -> list[BenchRequest]:
        """Requests sent before the clock starts. Their prompts are not in the workload, so they add no cache hits."""
        if self.makes_vectors:
            return self._texts(self.warmup_requests, self.seed + 1)
        assert tokenizer is not None
        token_ids = tokenizer.ordinary_token_ids()
        short = LengthRange(32, 32)
        return random_requests(self.warmup_requests, short, LengthRange(8, 8), token_ids, self.seed + 1)

    def offsets_s(self, requests: Sequence[BenchRequest]) -> list[float]:
        """When each request is due."""
        if self.dataset_name is DatasetName.TRACE:
            return [request.arrival_s for request in requests]
        return arrival_offsets(len(requests), self.request_rate, self.burstiness, self.seed)

    def _length_ranges(self) -> tuple[LengthRange, LengthRange]:
        ratio = self.random_range_ratio
        return (
            LengthRange.parse("--random-input-len", self.random_input_len, ratio),
            LengthRange.parse("--random-output-len", self.random_output_len, ratio),
        )
