"""`SamplingParams`: the sampling parameters and stop conditions of one request.

Written by the front ends (HTTP, `LLM`), checked once by `verify`, then frozen; it travels unchanged to the scheduler
(stop conditions), the model runner (sampling) and the detokenizer (stop strings, text options).
"""

from __future__ import annotations

import math
from typing import Final

import msgspec

from .errors import RequestError

MAX_SEED: Final = 2**63 - 1
MAX_COUNT: Final = 2**31 - 1
"""Of tokens: above any context length and vocabulary size; fits into int32 and into every message."""
MAX_TOP_LOGPROBS: Final = 20
MAX_STOP_STRINGS: Final = 1024
MAX_STOP_STRING_CHARS: Final = 65_536
MAX_LOGIT_BIAS_ENTRIES: Final = 65_536
"""These four bound what the engine supports; `RequestLimits` bounds what a server accepts from its clients."""
GREEDY_TEMPERATURE: Final = (
    1e-5  # below this, dividing logits by the temperature overflows bf16: use the exact argmax instead
)


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """How to choose tokens, and when to stop.

    Attributes:
        max_new_tokens: most tokens to generate; None: as many as fit into the context.
        min_new_tokens: end-of-sequence and stop tokens are masked until this many tokens exist. Stop strings are not
            delayed: one that appears earlier ends the output.
        temperature: 0 is greedy (exact argmax, first of equals); in [0, 100].
        top_k: keep the k most likely tokens; -1 or 0 keeps all.
        top_p: keep the smallest set with at least this probability mass, in (0, 1].
        min_p: drop tokens below `min_p` times the largest probability, in [0, 1].
        seed: start of the position-keyed noise; None: the front end draws one, so that it can be reported and reused.
        repetition_penalty: divides positive and multiplies negative logits of tokens in prompt or output; > 0.
        frequency_penalty: subtracted once per occurrence in the output; [-2, 2].
        presence_penalty: subtracted once if the token is in the output; [-2, 2].
        logit_bias: token id -> value added to its logit, [-100, 100].
        stop: strings that end the output; not part of the text unless `include_stop_str_in_output`.
        stop_token_ids: tokens that end the output, besides the model's end-of-sequence tokens.
        ignore_eos: the model's end-of-sequence tokens do not end the output (benchmarks).
        logprobs: None: no log-probabilities; k: those of each output token and of the k likeliest, 0 <= k <= 20.
        prompt_logprobs: the same for the prompt's tokens (the first one has none).
        skip_special_tokens: special tokens do not appear in the text.
        include_stop_str_in_output: keep the matched stop string in the text.
    """

    max_new_tokens: int | None = None
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: dict[int, float] | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False

    @property
    def greedy(self) -> bool:
        """Whether the next token is the exact argmax of the (penalized, biased) logits."""
        return self.temperature < GREEDY_TEMPERATURE or self.top_k == 1

    def verify(self, vocab_size: int) -> None:
        """Check every value against its range.

        Args:
            vocab_size: token ids must be below it.

        Raises:
            RequestError: the first value out of range, with field, value and rule.
        """
        if self.max_new_tokens is not None:
            _check_count("max_tokens", self.max_new_tokens, 1, "must be at least 1")
        _check_count("min_tokens", self.min_new_tokens, 0, "must be 0 or more")
        if self.max_new_tokens is not None and self.min_new_tokens > self.max_new_tokens:
            raise _refused(
                "min_tokens", self.min_new_tokens, f"must not exceed max_tokens ({self.max_new_tokens})"
            )
        _check_range("temperature", self.temperature, 0.0, 100.0)
        _check_count("top_k", self.top_k, -1, "must be -1 or 0 (keep all) or a positive count")
        _check_range("top_p", self.top_p, 0.0, 1.0, low_open=True)
        _check_range("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None and not 0 <= self.seed <= MAX_SEED:
            raise _refused("seed", self.seed, f"must lie in [0, {MAX_SEED}]")
        _check_range("repetition_penalty", self.repetition_penalty, 0.0, 10.0, low_open=True)
        _check_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        self._verify_logit_bias(vocab_size)
        self._verify_stops(vocab_size)
        for field, count in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if count is not None and not 0 <= count <= MAX_TOP_LOGPROBS:
                raise _refused(field, count, f"must lie in [0, {MAX_TOP_LOGPROBS}]")

    def _verify_logit_bias(self, vocab_size: int) -> None:
        if not self.logit_bias:
            return
        if len(self.logit_bias) > MAX_LOGIT_BIAS_ENTRIES:
            raise _refused(
                "logit_bias", len(self.logit_bias), f"has at most {MAX_LOGIT_BIAS_ENTRIES} entries"
            )
        for token_id, bias in self.logit_bias.items():
            _check_token_id("logit_bias", token_id, vocab_size)
            _check_range("logit_bias", bias, -100.0, 100.0)

    def _verify_stops(self, vocab_size: int) -> None:
        if len(self.stop) > MAX_STOP_STRINGS:
            raise _refused("stop", len(self.stop), f"has at most {MAX_STOP_STRINGS} strings")
        for string in self.stop:
            if not string:
                raise RequestError(
                    "stop contains an empty string, which would match everywhere",
                    param="stop",
                    code="invalid_value",
                )
            if len(string) > MAX_STOP_STRING_CHARS:
                raise _refused(
                    "stop", len(string), f"has strings of at most {MAX_STOP_STRING_CHARS} characters"
                )
        if len(self.stop_token_ids) > MAX_STOP_STRINGS:
            raise _refused(
                "stop_token_ids", len(self.stop_token_ids), f"has at most {MAX_STOP_STRINGS} entries"
            )
        for token_id in self.stop_token_ids:
            _check_token_id("stop_token_ids", token_id, vocab_size)


def _refused(field: str, value: object, rule: str) -> RequestError:
    return RequestError(f"{field} is {value!r}, but it {rule}", param=field, code="invalid_value")


def _check_range(field: str, value: float, low: float, high: float, *, low_open: bool = False) -> None:
    inside = low < value <= high if low_open else low <= value <= high
    if not math.isfinite(value) or not inside:
        bracket = "(" if low_open else "["
        raise _refused(field, value, f"must lie in {bracket}{low:g}, {high:g}]")


def _check_count(field: str, value: int, low: int, rule: str) -> None:
    if value < low:
        raise _refused(field, value, rule)
    if value > MAX_COUNT:
        raise _refused(field, value, f"must be at most {MAX_COUNT}")


def _check_token_id(field: str, token_id: int, vocab_size: int) -> None:
    if not 0 <= token_id < vocab_size:
        raise _refused(field, token_id, f"must name token ids in [0, {vocab_size})")
