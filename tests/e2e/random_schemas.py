"""Random JSON Schemas of keywords that are enforced (docs/structured_output.md), and random settings for answers."""

from __future__ import annotations

import random
from typing import Any, Final, NamedTuple

_NAMES: Final = ("name", "age", "tags", "größe", "a b", "x", "items", "id", "address")
_WORDS: Final[tuple[Any, ...]] = ("red", "green", "", 'a "b"', "日本", 7, -3, True, None, 1.5)
_PATTERNS: Final = ("^[a-z]{2,5}$", "^(yes|no)$", r"^\d{4}-\d{2}$", "^[A-Z][a-z]*$", "@")
_FORMATS: Final = ("date", "time", "uuid", "ipv4", "email")


class Question(NamedTuple):
    """A request.

    Attributes:
        may_be_cut: it has a keyword for which no short end may be found; `max_tokens` cuts such an answer.
    """

    schema: dict[str, Any]
    may_be_cut: bool
    temperature: float
    max_tokens: int
    seed: int


def question(number: int) -> Question:
    """The question of this number, the same in every run."""
    rng = random.Random(number)
    maker = _Maker(rng)
    schema = maker.document()
    return Question(
        schema,
        maker.may_be_cut,
        rng.choice((0.0, rng.uniform(0.0, 2.0), 2.0)),
        rng.choice((rng.randint(4, 40), rng.randint(40, 250))),
        rng.randrange(1, 2**31),
    )


class _Maker:
    """Makes one schema."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._defs: dict[str, Any] = {}
        self.may_be_cut = False

    def document(self) -> dict[str, Any]:
        """A schema, with `$defs` where it has references."""
        schema = self._any(3)
        if self._rng.random() < 0.15:
            schema = {"$ref": "#/$defs/tree"}
            self._defs["tree"] = {
                "type": "object",
                "properties": {
                    "value": self._any(1),
                    "children": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 2},
                },
                "required": ["value"],
                "additionalProperties": False,
            }
        return schema | ({"$defs": self._defs} if self._defs else {})

    def _any(self, depth: int) -> dict[str, Any]:
        simple = [self._string, self._integer, self._number, self._word, self._constant]
        nested = [self._object, self._object, self._object, self._array, self._union, self._both]
        if depth <= 0 or self._rng.random() < 0.25:
            return self._rng.choice(simple)()
        return self._rng.choice(nested)(depth - 1)

    def _string(self) -> dict[str, Any]:
        kind = self._rng.randrange(5)
        if kind == 0:
            self.may_be_cut = True
            return {"type": "string", "pattern": self._rng.choice(_PATTERNS)}
        if kind == 1:
            self.may_be_cut = True
            # A longer local part has the form of an address, too, and validators may refuse it.
            return {"type": "string", "format": self._rng.choice(_FORMATS), "maxLength": 60}
        low = self._rng.randint(0, 5)
        return {"type": "string"} | self._some(
            {"minLength": low, "maxLength": low + self._rng.randint(0, 20)}
        )

    def _integer(self) -> dict[str, Any]:
        low = self._rng.randint(-200, 200)
        bounds = self._some({"minimum": low, "maximum": low + self._rng.randint(10, 1000)})
        if self._rng.random() < 0.2:
            bounds |= {"multipleOf": self._rng.choice((2, 5, 7))}
        return {"type": "integer"} | bounds

    def _number(self) -> dict[str, Any]:
        low = round(self._rng.uniform(-100, 100), 2)
        return {"type": "number"} | self._some(
            {"exclusiveMinimum": low, "exclusiveMaximum": low + self._rng.randint(1, 50)}
        )

    def _word(self) -> dict[str, Any]:
        return {"enum": self._rng.sample(_WORDS, self._rng.randint(1, 5))}

    def _constant(self) -> dict[str, Any]:
        return self._rng.choice(({"const": self._rng.choice(_WORDS)}, {"type": "boolean"}, {"type": "null"}))

    def _object(self, depth: int) -> dict[str, Any]:
        names = self._rng.sample(_NAMES, self._rng.randint(0, 4))
        schema: dict[str, Any] = {
            "type": "object",
            "properties": {name: self._any(depth) for name in names},
            "required": [name for name in names if self._rng.random() < 0.7],
        }
        match self._rng.randrange(4):
            case 0:
                schema["additionalProperties"] = self._integer()
            case 1 | 2:
                schema["additionalProperties"] = False
        return schema

    def _array(self, depth: int) -> dict[str, Any]:
        low = self._rng.randint(0, 2)
        bounds = self._some({"minItems": low, "maxItems": low + self._rng.randint(0, 4)})
        first = [self._any(depth) for _ in range(self._rng.randint(0, 2))]
        return (
            {"type": "array", "items": self._any(depth)} | bounds | ({"prefixItems": first} if first else {})
        )

    def _union(self, depth: int) -> dict[str, Any]:
        if self._rng.random() < 0.5:
            return {"anyOf": [self._any(depth) for _ in range(self._rng.randint(1, 3))]}
        branches = [
            {
                "type": "object",
                "properties": {"kind": {"const": kind}, "value": self._any(depth)},
                "required": ["kind"],
                "additionalProperties": False,
            }
            for kind in ("a", "b")
        ]
        return {"oneOf": branches}

    def _both(self, depth: int) -> dict[str, Any]:
        self.may_be_cut = True
        left, right = self._rng.sample(_NAMES, 2)
        return {
            "allOf": [
                {"type": "object", "properties": {left: self._any(depth)}, "required": [left]},
                {"type": "object", "properties": {right: self._any(depth)}, "required": [right]},
            ]
        }

    def _some(self, keywords: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in keywords.items() if self._rng.random() < 0.6}
