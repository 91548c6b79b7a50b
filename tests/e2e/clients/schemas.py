"""What the clients ask for: a person by schema, and a tool."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import jsonschema_rs
from pydantic import BaseModel, Field

QUESTION: Final = "Invent a person. Answer with name, age and color."
WEATHER_QUESTION: Final = "What is the weather in Paris?"


class Person(BaseModel):
    """A person."""

    name: Annotated[str, Field(max_length=20)]
    age: Annotated[int, Field(ge=0, le=120)]
    color: Literal["red", "green", "blue"]


PERSON: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "color": {"enum": ["red", "green", "blue"]},
    },
    "required": ["name", "age", "color"],
    "additionalProperties": False,
}
WEATHER: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "unit": {"enum": ["c", "f"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}


def fits(value: object, schema: dict[str, Any]) -> bool:
    """Whether a validator that is not ours takes the value."""
    return bool(jsonschema_rs.validator_for(schema).is_valid(value))
