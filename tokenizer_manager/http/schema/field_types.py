"""The types of request fields: what msgspec checks, and what `/openapi.json` says besides.

What is `_said` is for readers and tools only: a range is checked where it is known what the client calls the field
(`SamplingParams.verify`, `scheduling`, `limits`).
"""

from __future__ import annotations

from typing import Annotated, Any, Final

from msgspec import Meta

from ....runtime.sampling_params import MAX_COUNT
from ...scheduling_options import MAX_PRIORITY, MAX_SALT_CHARS, MAX_TIMEOUT_S, PRIORITY_CLASSES

MAX_TTL_S: Final = 86_400.0
MAX_PROFILE_S: Final = 3600.0
MIN_PROFILE_HZ: Final = 1.0
MAX_PROFILE_HZ: Final = 1000.0
SAID: Final = "x-said"
"""The key under which `ApiDocs` finds it."""

_Schema = dict[str, Any]


def _said(description: str | None = None, **schema: Any) -> Meta:
    """What the document says of a field, over what msgspec says of its type: of two minima msgspec's would win."""
    return Meta(description=description, extra_json_schema={SAID: schema})


def _between(low: float, high: float) -> Meta:
    return _said(minimum=low, maximum=high)


def _list_of(items: _Schema) -> _Schema:
    return {"type": "array", "items": items, "minItems": 1}


Int = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
"""What fits into a message; larger ones would fail on their way to the scheduler."""

Count = Annotated[Int, _between(1, MAX_COUNT)]
CountOrNone = Annotated[Int, _between(0, MAX_COUNT)]
TopK = Annotated[Int, _between(-1, MAX_COUNT)]
Share = Annotated[float, _between(0, 1)]
Temperature = Annotated[float, _between(0, 100)]
Penalty = Annotated[float, _between(-2, 2)]
RepetitionPenalty = Annotated[float, _said(exclusiveMinimum=0, maximum=10)]
LogitBias = Annotated[
    dict[str, float],
    _said(
        "By token id.",
        propertyNames={"pattern": "^[0-9]{1,15}$"},
        additionalProperties={"type": "number", "minimum": -100, "maximum": 100},
    ),
]
TokenId = Annotated[Int, _said(minimum=0)]
StopString = Annotated[str, _said(minLength=1)]
Priority = Annotated[
    Annotated[Int, _between(-MAX_PRIORITY, MAX_PRIORITY)]
    | Annotated[str, _said(enum=list(PRIORITY_CLASSES))],
    Meta(
        description="Larger goes first where the policy looks at it; 'high', 'normal' and 'low' are 20, 0 and -20, "
        "further apart than the 10 levels that may take a running request's place."
    ),
]
Seconds = Annotated[
    float,
    _said(
        "Seconds, above 0 and at most 86400; the server's own limit holds as well.",
        exclusiveMinimum=0,
        maximum=MAX_TIMEOUT_S,
    ),
]
Salt = Annotated[str, _said(maxLength=MAX_SALT_CHARS)]
TimeToLive = Annotated[
    float,
    _said(
        "Seconds to keep it, at most 86400; 0 unpins. Pins never keep a request waiting.",
        minimum=0,
        maximum=MAX_TTL_S,
    ),
]
ProfileSeconds = Annotated[
    float, _said("Seconds until it ends by itself; 60.", exclusiveMinimum=0, maximum=MAX_PROFILE_S)
]
ProfileRate = Annotated[
    float, _said("Looks per second; 100.", minimum=MIN_PROFILE_HZ, maximum=MAX_PROFILE_HZ)
]

_TEXT: Final[_Schema] = {"type": "string", "minLength": 1}
_IDS: Final = _list_of({"type": "integer", "minimum": 0})

_ONE: Final = {"maxItems": 1}
_NOTHING: Final = {"type": "null"}
_PROMPTS: Final = [_TEXT, _IDS, _list_of(_TEXT), _list_of(_IDS)]

StartLen = Annotated[Int, _said("0 for the whole prompt, below for none of it.", maximum=0)]

OnePrompt = Annotated[
    Any,
    _said(
        "A text or token ids, or a list of one of them.",
        anyOf=[_TEXT, _IDS, _list_of(_TEXT) | _ONE, _list_of(_IDS) | _ONE, _NOTHING],
    ),
]
Prompts = Annotated[
    Any,
    _said("A text, token ids, or a list of either.", anyOf=_PROMPTS),
]
PromptsOrNone = Annotated[
    Any,
    _said("A text, token ids, or a list of either.", anyOf=[*_PROMPTS, _NOTHING]),
]

_TEXT_PART: Final[_Schema] = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
_MESSAGE: Final[_Schema] = {
    "type": "object",
    "properties": {
        "role": {"enum": ["system", "developer", "user", "assistant"]},
        "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": _TEXT_PART}]},
        "name": {"type": ["string", "null"]},
    },
    "required": ["role", "content"],
}
Messages = Annotated[list[dict[str, Any]], _said(minItems=1, items=_MESSAGE)]
SamplingObject = Annotated[dict[str, Any], _said(**{"$ref": "#/components/schemas/NativeSampling"})]
