"""`StructuredOutput`: `--structured FILE`: asks for answers that match a JSON Schema, and counts those that do.

The check is that of a JSON Schema library, and not of the engine's own grammar code: a benchmark must not take the word
of what it measures.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...runtime.errors import ConfigError
from ..json_input import read_json


class StructuredOutput:
    """One schema, for all requests of a run."""

    def __init__(self, schema: dict[str, Any], matches: Callable[[Any], bool]) -> None:
        """Take the schema, and a function that says whether a JSON value matches it."""
        self._schema = schema
        self._matches = matches

    @classmethod
    def read(cls, path: Path) -> StructuredOutput:
        """Read the schema in a file.

        Raises:
            ConfigError: there is none, or no library that checks answers is installed.
        """
        schema = read_json(path, f"--structured {path}")
        if not isinstance(schema, dict):
            raise ConfigError(f"--structured {path} must hold a JSON Schema, which is an object")
        return cls(schema, _validator(schema, path))

    def response_format(self) -> dict[str, Any]:
        """The field of each request."""
        return {"type": "json_schema", "json_schema": {"name": "answer", "schema": self._schema}}

    def accepts(self, text: str) -> bool:
        """Whether an answer is JSON that matches the schema."""
        try:
            return self._matches(json.loads(text))
        except ValueError:
            return False


def _validator(schema: dict[str, Any], path: Path) -> Callable[[Any], bool]:
    try:
        import jsonschema_rs
    except ImportError:
        raise ConfigError(
            "--structured counts the valid answers with a JSON Schema library, which is not installed; run: "
            "pip install jsonschema-rs"
        ) from None
    try:
        matches: Callable[[Any], bool] = jsonschema_rs.validator_for(schema).is_valid
    except ValueError as error:
        raise ConfigError(f"--structured {path} is no JSON Schema: {error}") from None
    return matches
