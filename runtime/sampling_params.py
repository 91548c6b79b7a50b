"""`SamplingParams`: the sampling parameters and stop conditions of one request.

Written by the front ends (HTTP, `LLM`), checked when it is constructed and again by `verify`, then frozen; it travels
unchanged to the scheduler (stop conditions), the model runner (sampling) and the detokenizer (stop strings, text
options).
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, Final, NamedTuple, get_type_hints

import msgspec

from .errors import RequestError
from .request_checks import (
    are_plain,
    check_flag,
    check_integer,
    check_number,
    check_sequences,
    check_text,
    check_texts,
    check_token_id,
    check_token_ids,
    plain,
    plain_items,
    refused,
    too_long,
    wrong_type,
)

MAX_SEED: Final = 2**63 - 1
MAX_COUNT: Final = 2**31 - 1
"""Most tokens: above any context length and vocabulary size; fits into int32 and into every message."""
MAX_TEMPERATURE: Final = 100.0
MAX_TOP_LOGPROBS: Final = 1024
MAX_LOGPROB_TOKEN_IDS: Final = 128
MAX_STOP_STRINGS: Final = 1024
MAX_STOP_STRING_CHARS: Final = 65_536
MAX_LOGIT_BIAS_ENTRIES: Final = 65_536
MAX_DRY_TOKENS: Final = 4096
MAX_DRY_BREAKERS: Final = 32
MAX_DRY_BREAKER_CHARS: Final = 40
MAX_BAD_WORDS: Final = 1024
MAX_BAD_WORD_CHARS: Final = 256
MAX_ALLOWED_TOKENS: Final = 1_048_576
MAX_STOP_REGEXES: Final = 8
MAX_STOP_REGEX_CHARS: Final = 1024
MAX_PATTERN: Final = 1024
"""The bounds above are what the engine supports; `RequestLimits` bounds what a server accepts from its clients."""
MAX_XTC_THRESHOLD: Final = 0.5
"""Above it at most one token is likely, and none is dropped."""
DRY_BREAKERS: Final = ("\n", ":", '"', "*")
"""llama.cpp's default of `dry_sequence_breakers`."""
GREEDY_TEMPERATURE: Final = (
    1e-5  # below this, dividing logits by the temperature overflows bf16: use the exact argmax instead
)


class Bounds(NamedTuple):
    """Declaration of a number among the sampling parameters: checks, bodies of the APIs and documents are made from it.

    Attributes:
        low, high: both are allowed, unless `low_open`.
        note: its meaning, for documents.
        rule: for errors about an integer below `low`; "": the range.
        from_model: a model's files can set the default.
    """

    low: float
    high: float
    note: str
    low_open: bool = False
    rule: str = ""
    from_model: bool = False


class RepetitionDetection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """When an answer that repeats itself ends, as in vLLM.

    Attributes:
        max_pattern_size: longest repeated pattern in tokens; 0: off.
        min_pattern_size: shortest one; 0: 1.
        min_count: how often it must be there, one after another.
    """

    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0


class _CheckedMeta(msgspec.StructMeta):
    """Converts and checks what a Python caller passes to the constructor.

    A metaclass, because a `Struct` cannot define `__init__`, and `__post_init__` would also run while a message is
    decoded: an error there drops the message, and its request is never answered.
    """

    def __call__(cls, *args: Any, **values: Any) -> Any:  # noqa: N805, since it is a metaclass
        if args:
            raise TypeError(f"{cls.__name__} takes keyword arguments only")
        fields: dict[str, Any] = {}
        given_as: dict[str, str] = {}
        for given, value in values.items():
            name = _OTHER_NAMES.get(given, given)
            if name not in cls.__struct_fields__:
                raise TypeError(_unknown_field(given, cls.__struct_fields__))
            if name in fields:
                raise TypeError(f"{given} and {given_as[name]} are the same field; give one of them")
            fields[name], given_as[name] = _CONVERSIONS.get(name, plain)(value), given
        made: SamplingParams = super().__call__(**fields)
        try:
            made.verify(MAX_COUNT)
        except RequestError as error:  # in the caller's words
            for name, given in given_as.items():
                if error.param == name != given:
                    raise RequestError(
                        error.message.replace(name, given), param=given, code=error.code
                    ) from None
            raise
        return made


class SamplingParams(
    msgspec.Struct, metaclass=_CheckedMeta, frozen=True, kw_only=True, omit_defaults=True, gc=False
):
    """How to choose tokens, and when to stop.

    The constructor takes integers where a number is meant, scalars of numpy and torch, lists where a tuple is meant,
    one string for `stop`, and the names that fields have elsewhere, such as `max_tokens`. `msgspec.structs.replace` and
    decoders check nothing but, with these, types: what they make needs `verify`.

    Numbers are described beside their bounds. `temperature` 0 is the exact argmax, the first of equals; `top_p` 0 keeps
    the most likely token only; the constructor cuts the sign of a negative `seed`, and a front end draws a missing one,
    so that it can be reported and reused.

    Attributes:
        max_new_tokens: most tokens to generate; None: as many as fit into the context.
        min_new_tokens: end-of-sequence and stop tokens are masked until this many tokens exist. Stop strings are not
            delayed: one that appears earlier ends the output.
        dry_sequence_breakers: texts that no repetition goes across, at most 40 characters each.
        dry_breaker_ids: the same as token sequences; a front end adds those of the texts (`TextsInTokens`).
        temperature_last: filters see the logits before the temperature, as in llama.cpp.
        bad_words: texts that the answer does not have, with and without a space before them: the last token that would
            complete one is forbidden.
        bad_words_ids: the same as token sequences; a front end adds those of the texts.
        allowed_token_ids: the only tokens of the answer; None: all.
        stop_regex: regular expressions that end the answer where the first match ends, which stays in the text; see
            `LinearRegex` for what they may have.
        repetition_detection: see there.
        logit_bias: token id -> value added to its logit, [-100, 100].
        stop: strings that end the output; not part of the text unless `include_stop_str_in_output`.
        stop_token_ids: tokens that end the output, besides the model's end-of-sequence tokens.
        ignore_eos: the model's end-of-sequence tokens do not end the output (benchmarks).
        logprobs: None: no log-probabilities; k: those of each output token and of the k likeliest, at most 1,024 and no
            more than the vocabulary has.
        prompt_logprobs: the same for the prompt's tokens after `prompt_logprobs_start` (the first one has none).
        prompt_logprobs_start: a position in the prompt; the tokens up to it need not be computed if a cache has them.
        logprob_token_ids: tokens whose log-probabilities are wanted too, at each place of `logprobs` and
            `prompt_logprobs`.
        skip_special_tokens: special tokens do not appear in the text.
        include_stop_str_in_output: keep the matched stop string in the text.
        speculative: False: no draft tokens for this request, whatever `--speculative` says. The answer is the same.
    """

    max_new_tokens: int | None = None
    min_new_tokens: int = 0
    temperature: Annotated[
        float,
        Bounds(
            0.0,
            MAX_TEMPERATURE,
            "Flattens (above 1) or sharpens the distribution of tokens; 0 takes the most likely one.",
            from_model=True,
        ),
    ] = 1.0
    top_k: Annotated[
        int,
        Bounds(
            -1,
            MAX_COUNT,
            "Keeps the k most likely tokens; -1 or 0 keeps all.",
            rule="must be -1 or 0 (keep all) or a positive count",
            from_model=True,
        ),
    ] = -1
    top_p: Annotated[
        float,
        Bounds(0.0, 1.0, "Keeps the smallest set of tokens with this probability in sum.", from_model=True),
    ] = 1.0
    min_p: Annotated[
        float, Bounds(0.0, 1.0, "Drops tokens below this share of the largest probability.", from_model=True)
    ] = 0.0
    seed: Annotated[
        int | None, Bounds(0, MAX_SEED, "The same seed gives the same answer; without one it is drawn.")
    ] = None
    repetition_penalty: Annotated[
        float,
        Bounds(
            0.0,
            10.0,
            "Above 1: tokens of prompt and answer become less likely.",
            low_open=True,
            from_model=True,
        ),
    ] = 1.0
    frequency_penalty: Annotated[
        float,
        Bounds(-2.0, 2.0, "Subtracted from the logit of a token for each of its occurrences in the answer."),
    ] = 0.0
    presence_penalty: Annotated[
        float, Bounds(-2.0, 2.0, "Subtracted once from the logit of a token that the answer has.")
    ] = 0.0
    top_n_sigma: Annotated[
        float,
        Bounds(
            -1.0, 100.0, "Drops logits more than n standard deviations below the largest; 0 or less: off."
        ),
    ] = -1.0
    typical_p: Annotated[
        float,
        Bounds(0.0, 1.0, "Keeps the tokens nearest to the expected surprise, with this probability in sum."),
    ] = 1.0
    dynatemp_range: Annotated[
        float,
        Bounds(
            0.0,
            MAX_TEMPERATURE,
            "The temperature goes so far down or up with the entropy of the distribution.",
        ),
    ] = 0.0
    dynatemp_exponent: Annotated[
        float, Bounds(0.0, 100.0, "Power of the relative entropy, for dynatemp_range.")
    ] = 1.0
    xtc_probability: Annotated[
        float, Bounds(0.0, 1.0, "How often the likeliest of several likely tokens are dropped.")
    ] = 0.0
    xtc_threshold: Annotated[
        float, Bounds(0.0, 1.0, "Probability of a likely token, for xtc_probability; above 0.5: off.")
    ] = 0.1
    dry_multiplier: Annotated[
        float,
        Bounds(0.0, 100.0, "Penalty of a token that continues a repetition of tokens before it; 0: off."),
    ] = 0.0
    dry_base: Annotated[
        float, Bounds(1.0, 100.0, "The penalty is multiplied by it for each further repeated token.")
    ] = 1.75
    dry_allowed_length: Annotated[
        int, Bounds(0, MAX_DRY_TOKENS, "Repetitions that are shorter have no penalty.")
    ] = 2
    dry_penalty_last_n: Annotated[
        int,
        Bounds(
            -1, MAX_DRY_TOKENS, "Last tokens that are searched for repetitions; -1: 4096, the most; 0: off."
        ),
    ] = -1
    dry_sequence_breakers: tuple[str, ...] = DRY_BREAKERS
    dry_breaker_ids: tuple[tuple[int, ...], ...] = ()
    temperature_last: bool = False
    bad_words: tuple[str, ...] = ()
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    stop_regex: tuple[str, ...] = ()
    repetition_detection: RepetitionDetection | None = None
    logit_bias: dict[int, float] | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    prompt_logprobs_start: int = 0
    logprob_token_ids: tuple[int, ...] = ()
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    speculative: bool = True

    @property
    def greedy(self) -> bool:
        """Whether the next token is the exact argmax of the (penalized, biased) logits."""
        cold = self.temperature < GREEDY_TEMPERATURE or self.top_k == 1 or self.top_p == 0.0
        return cold and not self.has_rare_sampler

    @property
    def filters(self) -> bool:
        """Whether it drops unlikely tokens before one is drawn."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0

    @property
    def has_rare_sampler(self) -> bool:
        """Whether `rare_sampler.py` chooses its tokens, instead of the sampler backend."""
        return (
            self.top_n_sigma > 0
            or self.typical_p < 1.0
            or self.dynatemp_range > 0
            or (self.xtc_probability > 0 and self.xtc_threshold <= MAX_XTC_THRESHOLD)
            or (self.temperature_last and self.filters and self.temperature >= GREEDY_TEMPERATURE)
        )

    @property
    def without_effect(self) -> str:
        """A warning about a parameter that changes nothing; empty: there is none."""
        if self.xtc_probability > 0 and self.xtc_threshold > MAX_XTC_THRESHOLD:
            return (
                f"xtc_probability has no effect with xtc_threshold {self.xtc_threshold:g}: above "
                f"{MAX_XTC_THRESHOLD:g} at most one token is likely"
            )
        return ""

    @property
    def has_dry(self) -> bool:
        """Whether repetitions have a penalty that grows with their length."""
        return self.dry_multiplier > 0 and self.dry_penalty_last_n != 0

    @property
    def depends_on_output(self) -> bool:
        """Whether the logits at a position are changed by the tokens before it, which drafts only propose."""
        has_penalties = (
            self.repetition_penalty != 1.0 or self.frequency_penalty != 0 or self.presence_penalty != 0
        )
        return has_penalties or self.has_history

    @property
    def has_history(self) -> bool:
        """Whether `TokenHistory` changes its logits."""
        return self.has_dry or any(len(word) > 1 for word in self.bad_words_ids)

    def verify(self, vocab_size: int) -> None:
        """Check type, range and finiteness of every value.

        Args:
            vocab_size: token ids must be below it.

        Raises:
            RequestError: the first value that is wrong, with field, value and rule.
        """
        if self.max_new_tokens is not None:
            check_integer("max_new_tokens", self.max_new_tokens, 1, MAX_COUNT, "must be at least 1")
        check_integer("min_new_tokens", self.min_new_tokens, 0, MAX_COUNT, "must be 0 or more")
        if self.max_new_tokens is not None and self.min_new_tokens > self.max_new_tokens:
            rule = f"must not exceed max_new_tokens ({self.max_new_tokens})"
            raise refused("min_new_tokens", self.min_new_tokens, rule)
        for name, kind, bounds in NUMBERS:
            value = getattr(self, name)
            if kind is float:
                check_number(name, value, bounds.low, bounds.high, low_open=bounds.low_open)
            elif value is not None or name not in _OPTIONAL:
                check_integer(name, value, int(bounds.low), int(bounds.high), bounds.rule)
        check_texts(
            "dry_sequence_breakers", self.dry_sequence_breakers, MAX_DRY_BREAKERS, MAX_DRY_BREAKER_CHARS
        )
        check_sequences("dry_breaker_ids", self.dry_breaker_ids, MAX_STOP_STRINGS, vocab_size)
        check_flag("temperature_last", self.temperature_last)
        check_texts("bad_words", self.bad_words, MAX_BAD_WORDS, MAX_BAD_WORD_CHARS)
        check_sequences("bad_words_ids", self.bad_words_ids, MAX_STOP_STRINGS, vocab_size)
        if self.allowed_token_ids is not None:
            check_token_ids("allowed_token_ids", self.allowed_token_ids, MAX_ALLOWED_TOKENS, vocab_size)
            if not self.allowed_token_ids:
                raise refused("allowed_token_ids", [], "must have a token; leave it out to allow all")
        check_texts("stop_regex", self.stop_regex, MAX_STOP_REGEXES, MAX_STOP_REGEX_CHARS)
        _check_regexes(self.stop_regex)
        _check_repetition(self.repetition_detection)
        if self.logit_bias is not None:
            _check_logit_bias(self.logit_bias, vocab_size)
        _check_stop(self.stop)
        check_token_ids("stop_token_ids", self.stop_token_ids, MAX_STOP_STRINGS, vocab_size)
        check_flag("ignore_eos", self.ignore_eos)
        if self.logprobs is not None:
            check_integer("logprobs", self.logprobs, 0, min(MAX_TOP_LOGPROBS, vocab_size))
        if self.prompt_logprobs is not None:
            check_integer("prompt_logprobs", self.prompt_logprobs, 0, min(MAX_TOP_LOGPROBS, vocab_size))
        check_integer("prompt_logprobs_start", self.prompt_logprobs_start, 0, MAX_COUNT)
        check_token_ids("logprob_token_ids", self.logprob_token_ids, MAX_LOGPROB_TOKEN_IDS, vocab_size)
        if self.logprob_token_ids and self.logprobs is None and self.prompt_logprobs is None:
            rule = "needs logprobs or prompt_logprobs, at whose places they are returned"
            raise refused("logprob_token_ids", list(self.logprob_token_ids), rule)
        check_flag("skip_special_tokens", self.skip_special_tokens)
        check_flag("include_stop_str_in_output", self.include_stop_str_in_output)
        check_flag("speculative", self.speculative)


def _numbers() -> Iterator[tuple[str, type, Bounds]]:
    """Each field with bounds: its name, whether it is an integer, and the bounds."""
    for name, hint in get_type_hints(SamplingParams, include_extras=True).items():
        for bounds in getattr(hint, "__metadata__", ()):
            yield name, float if hint.__origin__ is float else int, bounds


NUMBERS: Final = tuple(_numbers())
_OPTIONAL: Final = frozenset({"seed"})


def _check_logit_bias(entries: object, vocab_size: int) -> None:
    if type(entries) is not dict:
        raise wrong_type("logit_bias", entries, "a dict from token ids to numbers")
    if len(entries) > MAX_LOGIT_BIAS_ENTRIES:
        raise too_long("logit_bias", len(entries), f"{MAX_LOGIT_BIAS_ENTRIES} entries")
    for token_id, bias in entries.items():
        check_token_id("logit_bias", token_id, vocab_size)
        check_number("logit_bias", bias, -100.0, 100.0)


def _check_stop(strings: object) -> None:
    if type(strings) is not tuple:
        raise wrong_type("stop", strings, "a string or a list of strings")
    if len(strings) > MAX_STOP_STRINGS:
        raise too_long("stop", len(strings), f"{MAX_STOP_STRINGS} strings")
    for string in strings:
        check_text("stop", string)
        if not string:
            message = "stop contains an empty string, which would match everywhere; leave it out"
            raise RequestError(message, param="stop", code="invalid_value")
        if len(string) > MAX_STOP_STRING_CHARS:
            raise too_long("stop", len(string), f"{MAX_STOP_STRING_CHARS} characters in a string")


def _check_regexes(patterns: tuple[str, ...]) -> None:
    if not patterns:
        return
    from .linear_regex import UnsupportedRegexError, checked_patterns  # not with every message

    try:
        checked_patterns(patterns)
    except UnsupportedRegexError as error:
        raise RequestError(f"stop_regex {error}", param="stop_regex", code="invalid_value") from None


def _check_repetition(value: object) -> None:
    if value is None:
        return
    field = "repetition_detection"
    if type(value) is not RepetitionDetection:
        raise wrong_type(field, value, "an object with max_pattern_size, min_pattern_size and min_count")
    check_integer(f"{field}.max_pattern_size", value.max_pattern_size, 0, MAX_PATTERN)
    check_integer(f"{field}.min_pattern_size", value.min_pattern_size, 0, value.max_pattern_size)
    check_integer(f"{field}.min_count", value.min_count, 2 if value.max_pattern_size else 0, MAX_PATTERN)


# ---------------------------------------------------------------- the constructor's conversions


def _plain_texts(value: object) -> object:
    if isinstance(value, str):
        return (value,) if value else ()
    return () if value is None else plain_items(value)


def _plain_token_ids(value: object) -> object:
    return () if value is None else plain_items(value)


def _plain_sequences(value: object) -> object:
    value = _plain_token_ids(value)
    return tuple(map(plain_items, value)) if type(value) is tuple else value


def _plain_repetition(value: object) -> object:
    if not isinstance(value, Mapping):
        return value
    try:
        numbers: dict[str, Any] = {key: plain(number) for key, number in value.items()}
        return RepetitionDetection(**numbers)
    except TypeError:
        return value


def _plain_entries(value: object) -> object:
    if type(value) is dict and are_plain(value) and are_plain(value.values()):
        return value
    if not isinstance(value, Mapping):
        return value
    return {plain(token_id): plain(bias) for token_id, bias in value.items()}


def _plain_seed(value: object) -> object:
    """A seed without its sign: OpenAI's has 64 bits with a sign, of which 63 are kept."""
    value = plain(value)
    return value & MAX_SEED if type(value) is int and -MAX_SEED - 1 <= value < 0 else value


_CONVERSIONS: Final[dict[str, Callable[[object], object]]] = {
    "dry_sequence_breakers": _plain_texts,
    "dry_breaker_ids": _plain_sequences,
    "bad_words": _plain_texts,
    "bad_words_ids": _plain_sequences,
    "allowed_token_ids": lambda value: None if value is None else plain_items(value),
    "stop_regex": _plain_texts,
    "repetition_detection": _plain_repetition,
    "stop": _plain_texts,
    "stop_token_ids": _plain_token_ids,
    "logprob_token_ids": _plain_token_ids,
    "logit_bias": _plain_entries,
    "seed": _plain_seed,
}
"""The other fields go through `plain`."""
_OTHER_NAMES: Final = {
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "max_output_tokens": "max_new_tokens",
    "n_predict": "max_new_tokens",
    "num_predict": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "top_logprobs": "logprobs",
    "stop_strings": "stop",
    "stop_sequences": "stop",
    "repeat_penalty": "repetition_penalty",
    "no_stop_trim": "include_stop_str_in_output",
}
"""Names of fields in the APIs, Transformers and other engines, which the constructor takes, too."""


_ADVICE: Final = {
    "n": "several answers to one prompt come from LLM.sample(prompt, n)",
    "best_of": "several answers to one prompt come from LLM.sample(prompt, n)",
    "stream": "pass it to the call",
    "guided_json": "pass json_schema to the call",
    "guided_regex": "pass regex to the call",
    "guided_choice": "pass choice to the call",
    "guided_grammar": "pass grammar to the call",
    "structured_outputs": "pass json_schema, regex, choice or grammar to the call",
    **dict.fromkeys(("json_schema", "regex", "choice", "grammar", "response_format"), "pass it to the call"),
}
"""Places of the options that other engines have among the sampling parameters."""


def field_of(name: str) -> str:
    """The field that a name stands for; the name itself if it is no other name of one."""
    return _OTHER_NAMES.get(name, name)


def _unknown_field(name: str, fields: tuple[str, ...]) -> str:
    if name in _ADVICE:
        return f"SamplingParams has no field {name!r}; {_ADVICE[name]}"
    near = difflib.get_close_matches(name, fields, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"the fields are {', '.join(fields)}"
    return f"SamplingParams has no field {name!r}; {hint}"
