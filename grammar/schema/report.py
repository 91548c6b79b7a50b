"""`SchemaReport`: what the check of a schema found; `SchemaError`: why it is refused."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..backend import GrammarError
from .keywords import Fate

Schema = dict[str, Any] | bool
_MAX_SHOWN: int = 60


class Finding(NamedTuple):
    """What becomes of one keyword at one place.

    Attributes:
        pointer: JSON pointer of the object that has the keyword; "" for the whole schema.
        reason: "" where there is nothing to say.
        rewrite: the smallest change that makes it enforceable; "" for none.
    """

    pointer: str
    keyword: str
    fate: Fate
    reason: str = ""
    rewrite: str = ""


@dataclass(slots=True)
class SchemaReport:
    """A schema that can be used.

    Attributes:
        schema: what to compile: only keywords that are enforced, references under `$defs`.
        warnings: for the response.
        findings: of every keyword, if they were asked for.
        sample: a short document of the schema, as a Python value; meaningful if `has_sample`.
        has_sample: a sample is known.
    """

    schema: Schema
    warnings: list[str] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    sample: Any = None
    has_sample: bool = False

    @property
    def text(self) -> str:
        """The schema to compile, as JSON."""
        return json.dumps(self.schema, ensure_ascii=False, separators=(",", ":"))

    @property
    def compact_sample(self) -> str | None:
        """The sample as JSON without whitespace; None if none is known."""
        if not self.has_sample:
            return None
        return json.dumps(self.sample, ensure_ascii=False, separators=(",", ":"))

    @property
    def pretty_sample(self) -> str | None:
        """The sample as models usually write JSON: one member a line."""
        return json.dumps(self.sample, ensure_ascii=False, indent=2) if self.has_sample else None


class SchemaError(GrammarError):
    """A schema is refused.

    Attributes:
        at: the place, as a path of the request and a JSON pointer.
        keyword: the cause; "" for the schema at that place as a whole.
    """

    def __init__(self, code: str, at: str, text: str, keyword: str = "") -> None:
        super().__init__(f"{at}: {text}" if at else text, code, at)
        self.keyword = keyword


def pointer_to(pointer: str, *steps: str | int) -> str:
    """A JSON pointer, some steps further."""
    for step in steps:
        text = str(step)
        if "~" in text or "/" in text:
            text = text.replace("~", "~0").replace("/", "~1")
        pointer = f"{pointer}/{text}"
    return pointer


def shown(value: object) -> str:
    """A value of a schema for a message, short."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    text = json.dumps(value[: _MAX_SHOWN + 1] if isinstance(value, str) else value, ensure_ascii=False)
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "…"
