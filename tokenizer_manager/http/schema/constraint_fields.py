"""`ConstraintFields`: request fields that constrain an answer, spelled as in OpenAI, SGLang, vLLM and llama.cpp.

Only types are checked here; `constraints` reads them.
"""

from __future__ import annotations

from typing import Any

import msgspec


class ConstraintFields(msgspec.Struct, kw_only=True):
    """At most one of them may be set, apart from the patterns for whitespace."""

    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    json_schema: dict[str, Any] | str | None = None
    regex: str | None = None
    ebnf: str | None = None
    grammar: str | None = None
    structural_tag: dict[str, Any] | str | None = None
    whitespace_pattern: str | None = None
    complete_json: bool | None = (
        None  # ours; true unless set: JSON is complete also when it ends by its limit of tokens
    )
