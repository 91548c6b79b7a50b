"""The types of request fields: what msgspec checks, and what `/openapi.json` says in addition.

The schema of `documented` is not checked by msgspec. Ranges are checked where the client's name of the field is known
(`SamplingParams.verify`, `scheduling_options`, `limits`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Final

from msgspec import Meta

from ....runtime.config.device_config import MAX_REPLICAS
from ....runtime.sampling_params import MAX_COUNT, MAX_TEMPERATURE, NUMBERS, Bounds
from ...scheduling_options import (
    COMPLETION_WINDOWS_S,
    MAX_PRIORITY,
    MAX_SALT_CHARS,
    MAX_TIMEOUT_S,
    PRIORITY_CLASSES,
    SERVICE_TIERS,
)

MAX_TTL_S: Final = 86_400.0
MAX_OPENAI_TEMPERATURE: Final = 2.0
"""Maximum of OpenAI's APIs; `SamplingParams` goes up to 100."""
MAX_PROFILE_S: Final = 3600.0
MIN_PROFILE_HZ: Final = 1.0
MAX_PROFILE_HZ: Final = 1000.0
OVERRIDES: Final = "x-override"
"""The key under which `ApiDocs` finds the overrides."""

_Schema = dict[str, Any]


def documented(description: str | None = None, **schema: Any) -> Meta:
    """Overrides of the schema that msgspec makes: without this key, msgspec's own minimum would win."""
    return Meta(description=description, extra_json_schema={OVERRIDES: schema})


def _between(low: float, high: float) -> Meta:
    return documented(minimum=low, maximum=high)


def _list_of(items: _Schema) -> _Schema:
    return {"type": "array", "items": items, "minItems": 1}


Int = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
"""A value that fits into a message; a larger one would fail when it is sent to the scheduler."""

Count = Annotated[Int, _between(1, MAX_COUNT)]
NO_LIMIT: Final = -1
"""The limit of an answer's tokens that llama.cpp and LM Studio have for "as many as fit"."""
AnswerLimit = Annotated[
    Count | None,
    documented(
        anyOf=[{"type": "integer", "minimum": 1, "maximum": MAX_COUNT}, {"const": NO_LIMIT}, {"type": "null"}]
    ),
]
CountOrNone = Annotated[Int, _between(0, MAX_COUNT)]
PredictLimit = Annotated[Int | None, documented(anyOf=[{"type": "integer", "minimum": -1}, {"type": "null"}])]
"""An `AnswerLimit` that may be 0 for the prompt only."""
WideTemperature = Annotated[float, _between(0, MAX_TEMPERATURE)]
LogitBias = Annotated[
    dict[str, float],
    documented(
        "By token id.",
        propertyNames={"pattern": "^[0-9]{1,15}$"},
        additionalProperties={"type": "number", "minimum": -100, "maximum": 100},
    ),
]


def _number(name: str, kind: type, bounds: Bounds, max_temperature: float) -> Any:
    """The type of an optional field for a number of `SamplingParams`."""
    if name == "seed":  # 64 bits with a sign, of which 63 are kept
        return Int | None
    high = max_temperature if name == "temperature" else bounds.high
    lowest = "exclusiveMinimum" if bounds.low_open else "minimum"
    limits = {lowest: bounds.low, "maximum": high}
    whole = {key: int(limit) if limit == int(limit) else limit for key, limit in limits.items()}
    meta = Meta(extra_json_schema={OVERRIDES: whole})
    return Annotated[Int if kind is int else float, meta] | None


def number_fields(
    *,
    only: Iterable[str] = (),
    renamed: Mapping[str, str] | None = None,
    max_temperature: float = MAX_OPENAI_TEMPERATURE,
) -> list[tuple[str, Any, None]]:
    """Fields of a body for the numbers among the sampling parameters, for `msgspec.defstruct`.

    Args:
        only: names of the parameters; all of them unless given.
        renamed: name of a parameter -> the API's name of it.
        max_temperature: of the API.
    """
    return [
        ((renamed or {}).get(name, name), _number(name, kind, bounds, max_temperature), None)
        for name, kind, bounds in NUMBERS
        if not only or name in only
    ]


TokenId = Annotated[Int, documented(minimum=0)]
StopString = Annotated[str, documented(minLength=1)]
Priority = Annotated[
    Annotated[Int, _between(-MAX_PRIORITY, MAX_PRIORITY)]
    | Annotated[str, documented(enum=[*PRIORITY_CLASSES, ""])],
    Meta(
        description="Larger is scheduled earlier by some policies; 'high', 'normal' and 'low' are 20, 0 and -20, "
        "further apart than the 10 levels by which a request must exceed a running one to preempt it."
    ),
]
Seconds = Annotated[
    float,
    documented(
        "Seconds, above 0 and at most 86400; the server's own limit holds as well.",
        exclusiveMinimum=0,
        maximum=MAX_TIMEOUT_S,
    ),
]
ReplicaNumber = Annotated[Int, _between(0, MAX_REPLICAS - 1)]
BootstrapHost = str | list[str | None] | None
BootstrapPort = int | list[int | None] | None
BootstrapRoom = Annotated[
    int | list[int] | None,
    documented("The number that both halves of a request have; a list has one for each prompt."),
]
Salt = Annotated[str, documented(maxLength=MAX_SALT_CHARS)]
TimeToLive = Annotated[
    float,
    documented(
        "Seconds to keep it, at most 86400; 0 unpins. Pins never block a request.",
        minimum=0,
        maximum=MAX_TTL_S,
    ),
]
ProfileSeconds = Annotated[
    float, documented("Seconds until it ends by itself; 60.", exclusiveMinimum=0, maximum=MAX_PROFILE_S)
]
ProfileRate = Annotated[
    float, documented("Samples per second; 100.", minimum=MIN_PROFILE_HZ, maximum=MAX_PROFILE_HZ)
]

_TEXT: Final[_Schema] = {"type": "string", "minLength": 1}
_IDS: Final = _list_of({"type": "integer", "minimum": 0})

_ONE: Final = {"maxItems": 1}
_NOTHING: Final = {"type": "null"}
_PROMPTS: Final = [_TEXT, _IDS, _list_of(_TEXT), _list_of(_IDS)]

StartLen = Annotated[Int, documented("0 for the whole prompt, below for none of it.")]

OnePrompt = Annotated[
    Any,
    documented(
        "A text or token ids, or a list of one of them.",
        anyOf=[_TEXT, _IDS, _list_of(_TEXT) | _ONE, _list_of(_IDS) | _ONE, _NOTHING],
    ),
]
Prompts = Annotated[
    Any,
    documented("A text, token ids, or a list of either.", anyOf=_PROMPTS),
]
PromptsOrNone = Annotated[
    Any,
    documented("A text, token ids, or a list of either.", anyOf=[*_PROMPTS, _NOTHING]),
]

_IMAGE: Final[_Schema] = {"type": ["string", "object"]}
ImageData = Annotated[
    Any,
    documented(
        "An image or a list of them: base64, a URL, or an object with url and detail.",
        anyOf=[_IMAGE, {"type": "array", "items": _IMAGE}, _NOTHING],
    ),
]
LoraPaths = Annotated[
    str | list[str | None] | None,
    documented(
        "The name of a LoRA adapter, or a list with one for each prompt; null for the model itself.",
        anyOf=[{"type": "string"}, {"type": "array", "items": {"type": ["string", "null"]}}, _NOTHING],
    ),
]
Retention = Annotated[str, documented(enum=["", "24h", "in_memory", "in-memory"])]
ServiceTier = Annotated[str, documented(enum=["", *SERVICE_TIERS])]
CompletionWindow = Annotated[str, documented(enum=["", *COMPLETION_WINDOWS_S])]
Effort = Annotated[str, documented(enum=["", "none", "minimal", "low", "medium", "high", "xhigh", "max"])]
_CHOICE_WORDS: Final[_Schema] = {"enum": ["none", "auto", "required", "any", "", None]}
ToolChoiceField = Annotated[
    Any,
    documented(
        "none, auto, required, or an object that names a tool.", anyOf=[_CHOICE_WORDS, {"type": "object"}]
    ),
]

_MESSAGE: Final[_Schema] = {
    "type": "object",
    "properties": {
        "role": {"enum": ["system", "developer", "user", "assistant", "tool"]},
        "content": {"description": "A text, or a list of parts; the result of a tool may be any value."},
        "name": {"type": ["string", "null"]},
        "tool_calls": {"type": ["array", "null"], "items": {"type": "object"}},
        "tool_call_id": {"type": ["string", "null"]},
    },
    "required": ["role", "content"],
}
Messages = Annotated[list[dict[str, Any]], documented(minItems=1, items=_MESSAGE)]
_Sampling = Annotated[dict[str, Any], documented(**{"$ref": "#/components/schemas/NativeSampling"})]
SamplingObject = _Sampling | list[_Sampling]
"""`sampling_params`: for all prompts, or a list with one for each."""
