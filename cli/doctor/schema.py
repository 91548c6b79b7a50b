"""`engine doctor --schema FILE`: what is enforced of a JSON Schema, as `POST /v1/grammar/check` reports it.

The schema is compiled for the model's tokenizer if its files are on this machine, in a process that can be killed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from ...models.tokenizer.tokenizer import load_tokenizer
from ...runtime.config.engine_config import EngineConfig
from ...runtime.errors import ConfigError, RequestError
from ..options import read_json_text
from .model_facts import ModelFacts, gather_model

if TYPE_CHECKING:
    from ...grammar.compile.worker import CompileResult
    from ...runtime.grammar_use import GrammarUse
    from ...tokenizer_manager.http.endpoints.grammar_check import (
        GrammarCheckBody,
        GrammarCheckRequest,
        KeywordBody,
    )

_PARAM: Final = "guided_json"
_FATES: Final = ("refused", "approximated", "enforced", "annotation")
"""In the order of the report: first what needs a change."""


def check_schema_file(path: Path, config: EngineConfig) -> GrammarCheckBody:
    """The report about a schema in a file. With `--strict`, what cannot be enforced is an error.

    Raises:
        ConfigError: the file cannot be read, or is not JSON of a schema.
    """
    from ...tokenizer_manager.http.endpoints.grammar_check import GrammarCheckRequest

    request = GrammarCheckRequest(guided_json=_schema_in(path))
    facts = gather_model(config.model, with_torch=False, with_checksums=False)
    try:
        body = asyncio.run(_report(request, config, facts))
    except RequestError as error:
        raise ConfigError(f"{path}: {_named(error.message, path)}") from None
    return _with_names(body, path)


def json_text(body: GrammarCheckBody) -> str:
    """For programs: the body of `POST /v1/grammar/check`."""
    return msgspec.json.format(msgspec.json.encode(body), indent=2).decode()


def lines(body: GrammarCheckBody) -> Iterator[str]:
    """For a terminal: what needs a change first, then the figures, and the verdict."""
    ordered = sorted(body.keywords, key=lambda each: (_FATES.index(each.fate), each.pointer))
    for each in ordered:
        yield _keyword_line(each)
    if body.num_keywords > len(body.keywords):
        yield f"... and {body.num_keywords - len(body.keywords):,} keywords more"
    for warning in body.warnings:
        yield f"warning: {warning}"
    yield from _figures(body)
    yield "It can be used." if body.error is None else f"It cannot be used: {body.error.message}"


def _keyword_line(each: KeywordBody) -> str:
    reason = f": {each.reason}" if each.reason else ""
    rewrite = f" -> {each.rewrite}" if each.rewrite else ""
    return f"{each.fate:<12} {each.pointer or '/'} {each.keyword}{reason}{rewrite}"


def _figures(body: GrammarCheckBody) -> Iterator[str]:
    if body.shortest is not None:
        yield f"shortest answer: {body.shortest.tokens} tokens, {body.shortest.text}"
    if body.whitespace is not None:
        yield f"whitespace: {body.whitespace}"
    if body.compile_ms is not None:
        share = "" if body.forced_share is None else f"; {body.forced_share:.0%} of a short answer is forced"
        yield f"compiled in {body.compile_ms:,.1f} ms{share}"


def _schema_in(path: Path) -> str:
    text, value = read_json_text(path, f"--schema {path}")
    if not isinstance(value, dict | bool):
        raise ConfigError(
            f"--schema {path} has {type(value).__name__} at the top, but a JSON Schema is an object; change the file"
        )
    return text  # the limits on its size are for text


async def _report(request: GrammarCheckRequest, config: EngineConfig, facts: ModelFacts) -> GrammarCheckBody:
    from ...grammar.compile.compile_queue import CompileQueue
    from ...grammar.compile.worker import CompileWorker, SandboxSetup
    from ...tokenizer_manager.http.endpoints.grammar_check import checked_grammar, report

    checked = checked_grammar(request, config, [])
    spec, source = facts.spec, facts.source
    if spec is None or source is None:
        why = facts.source_error or facts.spec_error or "it is not on this machine"
        checked.warnings.append(f"not compiled for the model: {why}")

        async def no_measure(use: GrammarUse) -> list[CompileResult]:
            return []

        return await report(checked, None, no_measure)
    limit_s = config.answers.grammar_timeout
    setup = SandboxSetup(source, spec.vocab_size, tuple(spec.eos_token_ids), limit_s)
    queue = CompileQueue(lambda: CompileWorker.start(setup), limit_s)
    try:
        await queue.start()
        return await report(checked, load_tokenizer(source), queue.compile)
    finally:
        await queue.close()


def _with_names(body: GrammarCheckBody, path: Path) -> GrammarCheckBody:
    """The report with the file's name in the place of the field that a request would have."""
    body.constraint = None if body.constraint is None else _named(body.constraint, path)
    body.warnings = [_named(warning, path) for warning in body.warnings]
    if body.error is not None:
        body.error.message = _named(body.error.message, path)
        body.error.param = None if body.error.param is None else _named(body.error.param, path)
    return body


def _named(text: str, path: Path) -> str:
    return text.replace(_PARAM, path.name)
