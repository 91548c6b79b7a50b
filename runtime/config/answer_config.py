"""Two groups of `EngineConfig` about requests: `AnswerConfig`, and `RequestLimits` on the contents of one request."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated, Any, Final, Literal, TypeGuard

import msgspec

from ..errors import ConfigError
from ..grammar_use import Whitespace
from ..sampling_params import (
    MAX_LOGIT_BIAS_ENTRIES,
    MAX_STOP_STRING_CHARS,
    MAX_STOP_STRINGS,
    MAX_TOP_LOGPROBS,
)
from .setting_declaration import Alias, check_at_least, check_finite

JsonWhitespace = Literal["compact", "pretty", "any"]
ReasoningField = Literal["reasoning_content", "reasoning"]
LogprobsMode = Literal["raw", "processed", "raw_logprobs", "processed_logprobs"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerConfig:
    """Structured output, tool calls, reasoning and log-probabilities."""

    grammar_timeout: Annotated[
        float,
        "Seconds of CPU time that the compilation of a grammar may take; a request with a slower one is refused.",
    ] = 5.0
    json_whitespace: Annotated[
        JsonWhitespace,
        "Whitespace in JSON that a schema constrains: none; a blank or a newline with up to 32 blanks; unbounded.",
    ] = "pretty"
    json_closed_objects: Annotated[
        bool,
        "Objects of a JSON Schema that lists properties and has no additionalProperties have no others.",
    ] = False
    tool_call_parser: Annotated[
        str,
        "Format of the model's tool calls: a name of docs/tools.md, auto (found from the template), or none.",
    ] = "auto"
    reasoning_parser: Annotated[
        str,
        "Format of the model's reasoning: a name of docs/tools.md, auto (found from the template), or none.",
    ] = "auto"
    reasoning_field: Annotated[
        ReasoningField, "Name of the field of chat messages that has the reasoning."
    ] = "reasoning_content"
    spm_infill: Annotated[
        bool,
        "Prompts that fill in the middle have the suffix first, as models trained in the order SPM want.",
    ] = False
    logprobs_mode: Annotated[
        LogprobsMode,
        "Log-probabilities of output tokens: the model's own (raw), or those of the distribution that the token is "
        "sampled from, after penalties, grammar, temperature and filters (processed); also by vLLM's names.",
    ] = "raw"
    decision_calibration: Annotated[
        str | None,
        "JSON file with temperatures of decisions by type of question and number of options, as engine decisions fit "
        "writes it; before those of a GGUF file.",
    ] = None

    def __post_init__(self) -> None:
        check_finite("grammar_timeout", self.grammar_timeout, 0.0, open_end=True)

    @property
    def processed_logprobs(self) -> bool:
        """`logprobs_mode` without its second names."""
        return self.logprobs_mode.startswith("processed")

    @property
    def whitespace(self) -> Whitespace:
        """`json_whitespace` as grammars have it."""
        return Whitespace(self.json_whitespace)


_MOST: Final = {
    "max_stop_strings": MAX_STOP_STRINGS,
    "max_stop_chars": MAX_STOP_STRING_CHARS,
    "max_logit_bias": MAX_LOGIT_BIAS_ENTRIES,
    "max_logprobs": MAX_TOP_LOGPROBS,
    "max_json_depth": 256,  # what the parser, and the stack of the code after it, can handle
}
"""The largest values that the engine supports."""


def _limit_mm_per_prompt(value: object) -> dict[str, object]:
    """vLLM's form: `{"image": 4}`, or `image=4`; other media have no limit but 0."""
    try:
        limits = dict(part.split("=", 1) for part in value.split(",")) if _is_pairs(value) else value
        limits = msgspec.json.decode(limits, type=dict[str, Any]) if isinstance(limits, str) else limits
        counts = {str(name): int(count) for name, count in limits.items()}  # type: ignore[attr-defined]
    except (AttributeError, TypeError, ValueError):
        raise ConfigError(
            f'limit_mm_per_prompt is {value!r}, but it must be an object with a number, such as {{"image": 4}}'
        ) from None
    if others := [name for name, count in counts.items() if name != "image" and count]:
        raise ConfigError(f"limit_mm_per_prompt has {others[0]}, but only images are supported; leave it out")
    return {"max_images": counts["image"]} if "image" in counts else {}


def _is_pairs(value: object) -> TypeGuard[str]:
    return isinstance(value, str) and "=" in value and not value.lstrip().startswith("{")


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """Limits on the contents of one request.

    They are checked before anything is tokenized and shown in `/server_info`. The defaults are far above what clients
    send, and low enough that a request that reaches all of them costs the server little.
    """

    max_n: Annotated[int, "Outputs per prompt: n, and best_of."] = 128
    max_prompts: Annotated[int, "Prompts in one request."] = 2048
    max_messages: Annotated[int, "Messages in one chat request."] = 4096
    max_stop_strings: Annotated[int, "Stop strings, and stop token ids, in one request."] = 64
    max_stop_chars: Annotated[int, "Characters in one stop string."] = 1024
    max_logit_bias: Annotated[int, "Entries in logit_bias."] = 1024
    max_logprobs: Annotated[
        int, "Most likeliest tokens, with their log-probabilities, that a request may ask for at each token."
    ] = 20
    max_images: Annotated[
        int, "Images in one request.", Alias("limit_mm_per_prompt", translate=_limit_mm_per_prompt)
    ] = 8
    max_tools: Annotated[int, "Tools in one request."] = 512
    max_schema_kb: Annotated[
        int, "Size of a JSON Schema or another grammar in a request, and of all tools."
    ] = 512
    max_json_items: Annotated[
        int, "Keys, strings, lists and objects in a request body; numbers do not count."
    ] = 100_000
    max_json_depth: Annotated[int, "Nesting depth of lists and objects in a request body."] = 64

    def __post_init__(self) -> None:
        for field in fields(self):
            check_at_least(field.name, getattr(self, field.name), 1)
        for name, most in _MOST.items():
            if getattr(self, name) > most:
                raise ConfigError(f"{name} is {getattr(self, name)}, but it must be at most {most}")
