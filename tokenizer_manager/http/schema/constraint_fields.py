"""`ConstraintFields`: the request fields that constrain an answer, in the spellings of all engines."""

from __future__ import annotations

from typing import Any

import msgspec


class ConstraintFields(msgspec.Struct, kw_only=True):
    """At most one of them may constrain; `constraints.py` reads them."""

    response_format: dict[str, Any] | None = None  # OpenAI
    structured_outputs: dict[str, Any] | None = None  # vLLM
    guided_json: dict[str, Any] | str | None = None  # vLLM, older
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    regex: str | None = None  # SGLang
    ebnf: str | None = None
    json_schema: dict[str, Any] | str | None = None  # SGLang: a text; llama.cpp: an object
    structural_tag: dict[str, Any] | str | None = None
    grammar: str | None = None  # llama.cpp: GBNF
    whitespace_pattern: str | None = None
    complete_json: bool = True  # ours: JSON is complete also when it ends by its limit of tokens
