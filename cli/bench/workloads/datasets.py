"""Workloads: random lengths, generated shared prefixes, and files: conversations and timed traces.

Everything is a function of the seed. Random prompts are lists of ordinary token ids, so that their length is exact on
every server; special tokens are left out, because they change what a model does.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from ....runtime.errors import ConfigError
from ....runtime.text import is_unicode
from ..load import BenchRequest

if TYPE_CHECKING:
    from ....simulator.trace_files import TraceOptions


class TextEncoder(Protocol):
    """The part of a tokenizer that a workload uses."""

    def encode(self, text: str) -> list[int]:
        """Token ids of a text."""
        ...


@dataclass(frozen=True, slots=True)
class LengthRange:
    """Lengths drawn uniformly from low..high, both included."""

    low: int
    high: int

    @classmethod
    def parse(cls, flag: str, text: str, range_ratio: float = 1.0) -> LengthRange:
        """Read `512` or `64:512`; a plain number with a ratio r below 1 means r*number..number, as in SGLang.

        Raises:
            ConfigError: the text does not have this form, or the range is empty.
        """
        low_text, colon, high_text = text.partition(":")
        try:
            low, high = int(low_text), int(high_text if colon else low_text)
        except ValueError:
            raise ConfigError(
                f"{flag} is {text!r}, but it must be a length like 512 or a range like 64:512"
            ) from None
        if not colon:
            if not 0.0 < range_ratio <= 1.0:
                raise ConfigError(f"--random-range-ratio is {range_ratio}, but it must lie in (0, 1]")
            low = max(1, int(high * range_ratio))
        if not 1 <= low <= high:
            raise ConfigError(f"{flag} is {text!r}, but it must have 1 <= low <= high")
        return cls(low, high)

    def draw(self, rng: np.random.Generator, count: int) -> list[int]:
        """`count` lengths."""
        return [int(length) for length in rng.integers(self.low, self.high + 1, size=count)]


def random_requests(
    num_prompts: int, input_len: LengthRange, output_len: LengthRange, token_ids: Sequence[int], seed: int
) -> list[BenchRequest]:
    """Independent prompts of random tokens; they share no prefix."""
    rng = np.random.default_rng(seed)
    choices = np.asarray(token_ids)
    input_lens, output_lens = input_len.draw(rng, num_prompts), output_len.draw(rng, num_prompts)
    return [
        BenchRequest(prompt=rng.choice(choices, size=n).tolist(), prompt_len=n, output_len=m)
        for n, m in zip(input_lens, output_lens, strict=True)
    ]


def shared_prefix_requests(
    *,
    num_groups: int,
    prompts_per_group: int,
    system_prompt_len: int,
    question_len: int,
    output_len: int,
    token_ids: Sequence[int],
    seed: int,
) -> list[BenchRequest]:
    """Groups of requests that share a long system prompt; each request adds its own question. The order is shuffled."""
    for flag, value in (
        ("--gsp-num-groups", num_groups),
        ("--gsp-prompts-per-group", prompts_per_group),
        ("--gsp-system-prompt-len", system_prompt_len),
        ("--gsp-question-len", question_len),
        ("--gsp-output-len", output_len),
    ):
        if value < 1:
            raise ConfigError(f"{flag} is {value}, but it must be at least 1")
    rng = np.random.default_rng(seed)
    choices = np.asarray(token_ids)
    requests = []
    for group in range(num_groups):
        system_prompt = rng.choice(choices, size=system_prompt_len).tolist()
        for _ in range(prompts_per_group):
            prompt = system_prompt + rng.choice(choices, size=question_len).tolist()
            requests.append(
                BenchRequest(prompt=prompt, prompt_len=len(prompt), output_len=output_len, group=group)
            )
    return [requests[i] for i in rng.permutation(len(requests))]


def sharegpt_requests(
    path: Path,
    num_prompts: int,
    tokenizer: TextEncoder,
    *,
    max_total_len: int,
    output_len: int | None,
    seed: int,
) -> list[BenchRequest]:
    """First questions of conversations in a file of texts, each with the length of the recorded answer.

    Conversations without an answer, or with less than 4 tokens on either side, or longer than `max_total_len` are left
    out; so are those with a text that is not Unicode. The file has ShareGPT conversations, rows of messages, or Alpaca
    rows.

    Raises:
        ConfigError: the file cannot be read, is not of this form, or holds no usable conversation.
    """
    from ....simulator.trace_files import conversations

    first = [turns[0] for turns in conversations(path) if all(map(is_unicode, turns[0]))]
    rng = np.random.default_rng(seed)
    requests: list[BenchRequest] = []
    for index in rng.permutation(len(first)):
        if len(requests) == num_prompts:
            break
        question, answer = first[int(index)]
        prompt_len, answer_len = len(tokenizer.encode(question)), len(tokenizer.encode(answer))
        wanted = output_len if output_len is not None else answer_len
        if min(prompt_len, wanted) < 4 or prompt_len + wanted > max_total_len:
            continue
        requests.append(BenchRequest(prompt=question, prompt_len=prompt_len, output_len=wanted))
    if not requests:
        raise ConfigError(
            f"{path} holds no conversation with at least 4 tokens on both sides and at most {max_total_len} in all"
        )
    return requests


def trace_requests(
    path: Path, num_prompts: int, options: TraceOptions, *, token_ids: Sequence[int], seed: int
) -> list[BenchRequest]:
    """The first requests of a timed trace, with random tokens: those of a block follow from its hash id and the seed.

    Raises:
        ConfigError: the file cannot be read, or is no timed trace.
    """
    from ....simulator.trace_files import timed_requests

    choices = np.asarray(token_ids)
    requests: list[BenchRequest] = []
    for idx, timed in enumerate(itertools.islice(timed_requests(path, options), num_prompts)):
        prompt: list[int] = []
        for hash_id, length in timed.blocks:
            key = (seed, 0, hash_id) if hash_id is not None else (seed, 1, idx)
            prompt += np.random.default_rng(key).choice(choices, size=length).tolist()
        requests.append(
            BenchRequest(
                prompt=prompt,
                prompt_len=len(prompt),
                output_len=timed.output_len,
                arrival_s=timed.arrival_s,
            )
        )
    return requests


def arrival_offsets(num_requests: int, request_rate: float, burstiness: float, seed: int) -> list[float]:
    """Seconds after the start at which each request is due, ascending, the first at 0.

    Args:
        num_requests: how many.
        request_rate: mean requests per second; infinity sends all at once.
        burstiness: shape of the gamma distribution of the gaps: 1 is Poisson, below 1 burstier, above 1 more even.
        seed: equal seeds give equal schedules.

    Raises:
        ConfigError: rate or burstiness not above 0.
    """
    if not request_rate > 0:
        raise ConfigError(
            f"--request-rate is {request_rate}, but it must be above 0 ('inf' sends all at once)"
        )
    if not (math.isfinite(burstiness) and burstiness > 0):
        raise ConfigError(f"--burstiness is {burstiness}, but it must be above 0; 1 is a Poisson process")
    if math.isinf(request_rate) or num_requests == 0:
        return [0.0] * num_requests
    rng = np.random.default_rng(seed)
    gaps = rng.gamma(shape=burstiness, scale=1.0 / (request_rate * burstiness), size=num_requests - 1)
    return [0.0, *np.cumsum(gaps).tolist()]
