"""The bodies of `/v1/decisions` and `/v1/systemone`, and which other fields they accept."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from ....runtime.decision_calibration import MAX_TEMPERATURE
from ..schema.field_policy import NO_EFFECT, FieldPolicy
from ..schema.field_types import Salt, documented
from .wire import PoolingFields, Warnings

MAX_QUESTIONS: Final = 400

Content = Annotated[
    Any,
    documented(
        "A text, or a list of parts with texts or JSON.",
        anyOf=[
            {"type": "string", "minLength": 1},
            {
                "type": "array",
                "minItems": 1,
                "items": {
                    "type": "object",
                    "properties": {
                        "type": {"const": "input_text"},
                        "text": {"type": "string", "minLength": 1},
                    },
                    "required": ["type", "text"],
                },
            },
        ],
    ),
]
JsonOrText = Annotated[
    Any, documented("A text, or any JSON.", anyOf=[{"type": "string", "minLength": 1}, {"type": "object"}])
]
_Text = Annotated[str, Meta(min_length=1)]


class _Item(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type"):
    """A question of `/v1/decisions`."""

    instructions: Content
    name: str | None = None


class PredicateItem(_Item, tag="predicate", kw_only=True):
    """Whether a statement is true."""


class ChoiceOption(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """An option; `true` and `"true"` differ."""

    value: _Text | bool
    description: str | None = None


class ChoiceItem(_Item, tag="choice", kw_only=True):
    """One of some options."""

    choices: Annotated[list[ChoiceOption], Meta(min_length=2, max_length=255)]


class ScoreLevel(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A level of a scale."""

    label: _Text
    description: str | None = None


class ScoreItem(_Item, tag="score", kw_only=True):
    """A level of a scale, from the lowest to the highest."""

    levels: Annotated[list[ScoreLevel], Meta(min_length=2, max_length=10)]


class DecisionFields(PoolingFields, kw_only=True):
    """The fields of both endpoints."""

    prompt_cache_key: Salt | None = None
    temperature: (
        Annotated[
            float,
            documented(
                "Divides the labels' log-probabilities; default: as calibrated, or 1.",
                exclusiveMinimum=0,
                maximum=MAX_TEMPERATURE,
            ),
        ]
        | None
    ) = None
    permutations: (
        Annotated[
            int, Meta(ge=1, le=255, description="Orders of the options of a choice whose mean is taken; 1.")
        ]
        | None
    ) = None
    min_label_mass: (
        Annotated[
            float,
            Meta(ge=0, le=1, description="Below this probability of all labels the answer is a refusal; 0."),
        ]
        | None
    ) = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_prompt_token_ids: bool | None = None


class DecisionsRequest(DecisionFields, kw_only=True):
    """Body of `POST /v1/decisions`."""

    input: Annotated[
        Any,
        documented(
            "A text, or a list of messages, calls and their outputs.",
            anyOf=[
                {"type": "string", "minLength": 1},
                {
                    "type": "array",
                    "minItems": 1,
                    "items": {
                        "type": "object",
                        "properties": {
                            "role": {"enum": ["system", "developer", "user", "assistant"]},
                            "content": {"type": "string", "minLength": 1},
                        },
                        "required": ["role", "content"],
                    },
                },
            ],
        ),
    ]
    questions: Annotated[
        list[PredicateItem | ChoiceItem | ScoreItem], Meta(min_length=1, max_length=MAX_QUESTIONS)
    ]


class Noul(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="noul"):
    """Whether a statement is true; `criteria` says what `true` and `false` mean."""

    instructions: JsonOrText
    criteria: dict[Literal["true", "false"], str | None] | None = None


class SystemChoice(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="choice"):
    """One of the keys of `criteria`, whose values describe them."""

    instructions: JsonOrText
    criteria: Annotated[dict[_Text, str | None], Meta(min_length=2, max_length=255)]


class SystemScore(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="score"):
    """A level of `criteria`, from the lowest to the highest."""

    instructions: JsonOrText
    criteria: Annotated[list[_Text], Meta(min_length=2, max_length=10)]


class SystemOneRequest(DecisionFields, kw_only=True):
    """Body of `POST /v1/systemone`."""

    state: JsonOrText
    questions: Annotated[
        dict[str, Noul | SystemChoice | SystemScore], Meta(min_length=1, max_length=MAX_QUESTIONS)
    ]


_NO_EFFECT: Final = (NO_EFFECT - {"prompt_cache_key"}) | {"prompt_cache_options"}
DECISIONS_POLICY: Final = FieldPolicy(DecisionsRequest, {}, no_effect=_NO_EFFECT)
SYSTEM_POLICY: Final = FieldPolicy(SystemOneRequest, {}, no_effect=_NO_EFFECT)


class AnswerDetails(msgspec.Struct, kw_only=True):
    """Fields of every answer.

    Attributes:
        label_mass: the probability that the model's next token is a label at all.
        prompt_token_ids, label_token_ids: of the question and of each of its options, if asked for.
    """

    prompt_token_ids: list[int] | UnsetType = UNSET
    label_token_ids: list[list[int]] | UnsetType = UNSET


class PredicateAnswer(AnswerDetails, tag_field="type", tag="predicate", kw_only=True):
    """The probability that the statement is true."""

    name: str | None
    probability: float
    label_mass: float


class ChoiceProbability(msgspec.Struct):
    """The probability of a choice."""

    value: str | bool
    probability: float


class ChoiceAnswer(AnswerDetails, tag_field="type", tag="choice", kw_only=True):
    """The most likely choice."""

    name: str | None
    choice: str | bool
    confidence: float
    probabilities: list[ChoiceProbability]
    label_mass: float


class LevelProbability(msgspec.Struct):
    """The probability of a level; `value` is its index, from 0."""

    value: int
    label: str
    probability: float


class ScoreAnswer(AnswerDetails, tag_field="type", tag="score", kw_only=True):
    """The mean level, counted from 0."""

    name: str | None
    score: float
    confidence: float
    probabilities: list[LevelProbability]
    label_mass: float


class RefusalAnswer(AnswerDetails, tag_field="type", tag="refusal", kw_only=True):
    """The labels together have a smaller probability than `min_label_mass`."""

    name: str | None
    label_mass: float


class InputDetails(msgspec.Struct):
    """The source of the prompts' tokens."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputDetails(msgspec.Struct):
    """The use of the generated tokens, of which there are none."""

    reasoning_tokens: int = 0


class DecisionUsage(msgspec.Struct, kw_only=True):
    """The tokens of all prompts, those of the shared input counted for each question."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int = 0
    output_tokens_details: OutputDetails = msgspec.field(default_factory=OutputDetails)
    total_tokens: int


class DecisionsBody(msgspec.Struct, kw_only=True):
    """The answers, in the order of the questions."""

    id: str
    object: Literal["decision"] = "decision"
    model: str
    answers: list[PredicateAnswer | ChoiceAnswer | ScoreAnswer | RefusalAnswer]
    usage: DecisionUsage
    warnings: Warnings = UNSET


class SystemAnswer(AnswerDetails, kw_only=True):
    """An answer of System One; which fields it has depends on its type."""

    type: Literal["noul", "choice", "score", "refusal"]
    noul: float | UnsetType = UNSET
    choice: str | UnsetType = UNSET
    score: float | UnsetType = UNSET
    confidence: float | UnsetType = UNSET
    probabilities: dict[str, float] | UnsetType = UNSET
    legend: dict[str, str] | UnsetType = UNSET
    x_label_mass: float


class SystemOneBody(msgspec.Struct, kw_only=True):
    """The answers by the questions' ids."""

    id: str
    model: str
    answers: dict[str, SystemAnswer]
    usage: DecisionUsage
    warnings: Warnings = UNSET


AskedItem = PredicateItem | ChoiceItem | ScoreItem
AskedSystemItem = Noul | SystemChoice | SystemScore
SYSTEM_ITEM: Final[Any] = AskedSystemItem
"""The same for `convert`: a union is no type for mypy."""
