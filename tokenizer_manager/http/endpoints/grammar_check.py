"""`POST /v1/grammar/check`: what becomes of a constraint, keyword by keyword, without generating.

`engine doctor --schema` makes the same report.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final, NamedTuple

import msgspec
from msgspec import UNSET, UnsetType

from ....grammar.backend import GrammarError
from ....grammar.compile.worker import CompileResult
from ....grammar.schema.report import Finding
from ....models.tokenizer.tokenizer import Tokenizer
from ....runtime.config.engine_config import EngineConfig
from ....runtime.errors import RequestError
from ....runtime.grammar_use import GrammarUse
from ...generation import Constraint
from ..exchange import Exchange
from ..schema.constraint_fields import ConstraintFields
from ..schema.constraints import GRAMMAR_CODES, constraint_of
from ..schema.errors import ErrorObject
from ..schema.field_policy import FieldPolicy, first_warnings
from ..schema.values import Body, convert
from ..services import Engine

_MAX_KEYWORDS: Final = 1000


class GrammarCheckRequest(ConstraintFields, kw_only=True):
    """Body of `POST /v1/grammar/check`: the constraint of a request, in any spelling."""

    model: str | None = None


class KeywordBody(msgspec.Struct, kw_only=True):
    """Treatment of one keyword: enforced, approximated (with `strict` an error), annotation or refused."""

    pointer: str
    keyword: str
    fate: str
    reason: str | UnsetType = UNSET
    rewrite: str | UnsetType = UNSET


class ShortestBody(msgspec.Struct, kw_only=True):
    """A shortest answer, and its number of tokens."""

    text: str
    tokens: int


class GrammarCheckBody(msgspec.Struct, kw_only=True):
    """Whether a request with this constraint is accepted, and what is enforced.

    `kind` is the language of the grammar; `triggered` for grammars inside free text. `keywords` has the first 1,000.
    `compile_ms` is the time to compile it, `forced_share` the share of forced tokens in a short answer of a schema.
    """

    ok: bool
    constraint: str | None
    error: ErrorObject | None = None
    kind: str | None = None
    whitespace: str | None = None
    keywords: list[KeywordBody]
    num_keywords: int
    shortest: ShortestBody | None = None
    compile_ms: float | None = None
    forced_share: float | None = None
    warnings: list[str]


_POLICY: Final = FieldPolicy(GrammarCheckRequest, {})


async def check_grammar(exchange: Exchange, engine: Engine) -> None:
    """Check the constraint of a request."""
    checked = await engine.read(exchange, lambda body: _read(body, engine))
    async with exchange.abort_on_disconnect():
        await exchange.send_json(await report(checked, engine.tokenizer, engine.manager.measure_grammar))


Measure = Callable[[GrammarUse], Awaitable[list[CompileResult]]]
"""`CompileQueue.compile`."""


async def report(checked: CheckedGrammar, tokenizer: Tokenizer | None, measure: Measure) -> GrammarCheckBody:
    """The report about a constraint.

    Args:
        checked: the constraint.
        tokenizer: for the number of tokens of the shortest answer; None leaves it out.
        measure: compiles the grammars.
    """
    results: list[CompileResult] = []
    if checked.constraint is not None:
        try:
            results = await measure(checked.constraint.use)
        except GrammarError as refused:
            error = RequestError(refused.message, param=checked.constraint.param, code=refused.code)
            checked = checked._replace(error=error)
        except RequestError as busy:
            checked.warnings.append(f"it was not compiled: {busy.message}")
    body = _body(checked)
    if checked.constraint is not None and checked.constraint.shortest is not None and tokenizer is not None:
        text = checked.constraint.shortest
        body.shortest = ShortestBody(text=text, tokens=len(tokenizer.encode(text, add_special_tokens=False)))
    if results:
        body.compile_ms = round(sum(each.compile_s for each in results) * 1e3, 3)
        body.forced_share = results[0].forced_share
    return body


class CheckedGrammar(NamedTuple):
    """A constraint that was checked without compiling it.

    Attributes:
        constraint: None if it is refused.
        error: why it is refused.
        findings: of all keywords, as without `strict`.
    """

    constraint: Constraint | None
    error: RequestError | None
    findings: tuple[Finding, ...]
    warnings: list[str]


def _read(body: Body, engine: Engine) -> CheckedGrammar:
    warnings = _POLICY.check(body, strict=engine.config.server.strict)
    request = convert(body, GrammarCheckRequest)
    engine.check_model(request.model)
    return checked_grammar(request, engine.config, warnings)


def checked_grammar(
    request: GrammarCheckRequest, config: EngineConfig, warnings: list[str]
) -> CheckedGrammar:
    """Check a constraint without compiling it; `warnings`: of the request, to which those about it are added.

    Raises:
        RequestError: there is no constraint, or more than one.
    """
    constraint, error = None, None
    try:
        constraint = constraint_of(request, config.answers, config.limits, strict_server=config.server.strict)
        if constraint is None:
            raise RequestError(
                "the request has no constraint; send one, such as response_format",
                param="response_format",
                code="missing_field",
            )
        warnings += constraint.warnings
    except RequestError as refusal:
        if refusal.code not in GRAMMAR_CODES:
            raise
        error = refusal
    return CheckedGrammar(constraint, error, _findings(request, config), first_warnings(warnings))


def _findings(request: GrammarCheckRequest, config: EngineConfig) -> tuple[Finding, ...]:
    """Return the findings about all keywords: the check above ends at the first that it refuses."""
    try:
        explained = constraint_of(request, config.answers, config.limits, strict_server=False, explain=True)
    except RequestError:
        return ()
    return () if explained is None else explained.findings


def _body(checked: CheckedGrammar) -> GrammarCheckBody:
    constraint, error = checked.constraint, checked.error
    use = GrammarUse() if constraint is None else constraint.use
    body = GrammarCheckBody(
        ok=error is None,
        constraint=_place(checked),
        keywords=[
            KeywordBody(
                pointer=each.pointer,
                keyword=each.keyword,
                fate=each.fate.value,
                reason=each.reason or UNSET,
                rewrite=each.rewrite or UNSET,
            )
            for each in checked.findings[:_MAX_KEYWORDS]
        ],
        num_keywords=len(checked.findings),
        warnings=checked.warnings,
    )
    if error is not None:
        body.error = ErrorObject(error.message, "invalid_request_error", error.param, error.code)
    if use.spec is not None:
        body.kind = use.spec.kind.value
        body.whitespace = use.spec.whitespace_pattern or use.spec.whitespace.value
    elif use.triggered:
        body.kind = "triggered"
    return body


def _place(checked: CheckedGrammar) -> str | None:
    if checked.constraint is not None:
        return checked.constraint.param
    return None if checked.error is None else checked.error.param
