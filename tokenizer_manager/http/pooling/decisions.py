"""`POST /v1/decisions` (OpenAI) and `POST /v1/systemone` (System One): typed questions about an input, one pass each.

All prompts of a request begin with the same rendered input and end with one question each, so the prefix cache computes
the input once. `Question` and its probabilities are in `tokenizer_manager/pooling/decisions.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import uuid
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import msgspec
from msgspec import UNSET

from ....runtime.decision_calibration import MAX_TEMPERATURE, temperature_of
from ....runtime.errors import RequestError
from ...conversation.conversation import Conversation, History, ReasoningOptions
from ...pooling.decisions import (
    PLAIN_END,
    Decided,
    LabelTokens,
    Option,
    Question,
    QuestionKind,
    mean_of,
    question_text,
)
from ...pooling.embedding import check_task
from ..exchange import Exchange
from ..openai.messages import checked_template_variables
from ..responses.convert import read_items
from ..schema.field_policy import Notes
from ..schema.parts import text_of
from ..schema.values import Body, check_limit, convert, objects, refused, show
from ..services import Engine
from .decisions_wire import (
    DECISIONS_POLICY,
    SYSTEM_ITEM,
    SYSTEM_POLICY,
    AnswerDetails,
    AskedItem,
    AskedSystemItem,
    ChoiceAnswer,
    ChoiceItem,
    ChoiceProbability,
    DecisionFields,
    DecisionsBody,
    DecisionsRequest,
    DecisionUsage,
    InputDetails,
    LevelProbability,
    Noul,
    PredicateAnswer,
    PredicateItem,
    RefusalAnswer,
    ScoreAnswer,
    ScoreItem,
    SystemAnswer,
    SystemChoice,
    SystemOneBody,
    SystemOneRequest,
    SystemScore,
)
from .run import PooledAnswer, pooled_request, run_pooled

_JSON_PART: Final = "input_json"
_NUMBERED: Final = re.compile(r"questions(?:\[(\d+)\])?")
_ENDING_CHARS: Final = 256
"""The end of a prompt on which the tokens of labels may depend."""
_MAX_CHARS: Final = 64 << 20
"""Most characters of a request's prompts without its questions: each question has the whole input."""
_CLOSED: Final = (
    "the model's chat template cannot turn its reasoning off; an empty block of reasoning is put before the answer, so "
    "the model decides without it"
)


class _Asked(NamedTuple):
    """A checked request.

    Attributes:
        param: the field with the input.
        paths: of the questions.
    """

    fields: DecisionFields
    messages: list[dict[str, Any]]
    questions: list[Question]
    param: str
    paths: list[str]
    warnings: list[str]


class _Answers(NamedTuple):
    """The answers of a request, before small label masses become refusals."""

    id: str
    model: str
    decided: list[Decided]
    details: list[AnswerDetails]
    usage: DecisionUsage


# ---------------------------------------------------------------- endpoints


async def decisions(exchange: Exchange, engine: Engine) -> None:
    """Answers in the order of the questions, as OpenAI's Decisions."""
    asked, items = await engine.read(exchange, lambda body: _read_decisions(body, engine))
    async with exchange.abort_on_disconnect():
        made = await _decide(exchange, engine, asked)
        least = asked.fields.min_label_mass or 0
        answers = [
            _answer(item, decided, details, decided.label_mass < least)
            for item, decided, details in zip(items, made.decided, made.details, strict=True)
        ]
        await exchange.send_json(
            DecisionsBody(
                id=made.id,
                model=made.model,
                answers=answers,
                usage=made.usage,
                warnings=asked.warnings or UNSET,
            )
        )


async def system_one(exchange: Exchange, engine: Engine) -> None:
    """Answers by the questions' ids, as System One."""
    with _unnamed():
        asked, items = await engine.read(exchange, lambda body: _read_system_one(body, engine))
        async with exchange.abort_on_disconnect():
            made = await _decide(exchange, engine, asked)
            least = asked.fields.min_label_mass or 0
            answers = {
                name: _system_answer(item, decided, details, decided.label_mass < least)
                for (name, item), decided, details in zip(
                    items.items(), made.decided, made.details, strict=True
                )
            }
            await exchange.send_json(
                SystemOneBody(
                    id=made.id,
                    model=made.model,
                    answers=answers,
                    usage=made.usage,
                    warnings=asked.warnings or UNSET,
                )
            )


@contextlib.contextmanager
def _unnamed() -> Iterator[None]:
    """Keep the ids of questions, which are the client's text, out of the field of errors, which the log has."""
    try:
        yield
    except RequestError as error:
        if error.param is not None and error.param.startswith("questions."):
            error.param = "questions"
        raise


# ---------------------------------------------------------------- reading


def _read_decisions(body: Body, engine: Engine) -> tuple[_Asked, list[AskedItem]]:
    warnings = DECISIONS_POLICY.check(body, strict=engine.config.server.strict)
    request = convert(body, DecisionsRequest)
    _check(request, engine)
    notes = Notes(warnings, strict=engine.config.server.strict)
    history = History()
    read_items(request.input, history, notes, engine.config.limits)
    questions = [_question(item, f"questions[{i}]") for i, item in enumerate(request.questions)]
    names = [item.name for item in request.questions]
    for i, name in enumerate(names):
        if name is not None and name in names[:i]:
            raise refused(
                f"questions[{i}].name", f"is {show(name)}, which another question has; names are distinct"
            )
    paths = [f"questions[{i}]" for i in range(len(questions))]
    return _Asked(request, history.messages, questions, "input", paths, notes.warnings), request.questions


def _read_system_one(body: Body, engine: Engine) -> tuple[_Asked, dict[str, AskedSystemItem]]:
    warnings = SYSTEM_POLICY.check(body, strict=engine.config.server.strict)
    if isinstance(given := body.get("questions"), dict):
        for name, value in given.items():  # one by one: msgspec's paths have no keys
            convert(value, SYSTEM_ITEM, f"questions.{name}")
    request = convert(body, SystemOneRequest)
    _check(request, engine)
    history = History()
    history.user(_json_or_text(request.state, "state"))
    questions = []
    for name, item in request.questions.items():
        at = f"questions.{name}"
        text = _json_or_text(item.instructions, f"{at}.instructions")
        match item:
            case Noul():
                said = item.criteria or {}
                meant = (Option("Yes", said.get("true") or ""), Option("No", said.get("false") or ""))
                questions.append(Question(QuestionKind.PREDICATE, text, meant))
            case SystemChoice():
                options = tuple(Option(key, value or "") for key, value in item.criteria.items())
                questions.append(Question(QuestionKind.CHOICE, text, options))
            case SystemScore():
                questions.append(Question(QuestionKind.SCORE, text, tuple(map(Option, item.criteria))))
    paths = [f"questions.{name}" for name in request.questions]
    return _Asked(request, history.messages, questions, "state", paths, warnings), request.questions


def _check(request: DecisionFields, engine: Engine) -> None:
    """Refuse what this model cannot answer, and values out of range."""
    engine.check_model(request.model)
    check_task(engine.spec, "labels")
    if request.truncate_len() is not None:
        name = "truncate" if request.truncate_prompt_tokens is None else "truncate_prompt_tokens"
        raise refused(name, "is set, but the end of a prompt is its question; shorten the input instead")
    if request.temperature is not None and not 0 < request.temperature <= MAX_TEMPERATURE:
        raise refused(
            "temperature", f"is {request.temperature:g}, but it must lie in (0, {MAX_TEMPERATURE:g}]"
        )


def _question(item: AskedItem, at: str) -> Question:
    text = _content(item.instructions, f"{at}.instructions")
    match item:
        case PredicateItem():
            return Question(QuestionKind.PREDICATE, text)
        case ChoiceItem():
            seen = set()
            for i, choice in enumerate(item.choices):
                if (key := (type(choice.value), choice.value)) in seen:
                    raise refused(
                        f"{at}.choices[{i}].value", f"is {show(choice.value)} again; choices are distinct"
                    )
                seen.add(key)
            options = (Option(_shown(choice.value), choice.description or "") for choice in item.choices)
            return Question(QuestionKind.CHOICE, text, tuple(options))
        case ScoreItem():
            levels = (Option(level.label, level.description or "") for level in item.levels)
            return Question(QuestionKind.SCORE, text, tuple(levels))


def _shown(value: str | bool) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _content(value: object, at: str) -> str:
    """The text of a question: a string, or parts with texts or JSON, joined by newlines."""
    if isinstance(value, list):
        parts = [
            {"type": "text", "text": json.dumps(part.get("data"), ensure_ascii=False)}
            if part.get("type") == _JSON_PART
            else part
            for _, part in objects(value, at)
        ]
        value = text_of(parts, at)
    return _not_empty(value, at)


def _json_or_text(value: object, at: str) -> str:
    return _not_empty(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False), at)


def _not_empty(value: object, at: str) -> str:
    text = convert(value, str, at)
    if not text.strip():
        raise refused(at, "is empty; say what is asked", "missing_field")
    return text


# ---------------------------------------------------------------- asking


class _Case(NamedTuple):
    """One prompt: a question with its options in one order."""

    question: int
    labels: list[str]
    rotation: int


async def _decide(exchange: Exchange, engine: Engine, asked: _Asked) -> _Answers:
    """Ask all questions, each in the orders of its options that the request wants."""
    fields = asked.fields
    before, after = await _frame(engine, asked)
    num_prompts = sum(_num_orders(asked, question) for question in asked.questions)
    check_limit(
        "questions" if num_prompts == len(asked.questions) else "permutations",
        num_prompts,
        "prompts, one for each question and order of its options",
        engine.config.limits.max_prompts,
        "max_prompts",
    )
    if (num_chars := num_prompts * (len(before) + len(after))) > _MAX_CHARS:
        raise refused(
            asked.param,
            f"has {len(before):,} characters with its chat template, {num_chars:,} in {num_prompts:,} prompts, the "
            f"limit is {_MAX_CHARS:,}; ask fewer questions at a time",
            "input_too_large",
        )
    tokens = LabelTokens(engine.tokenizer, after[-_ENDING_CHARS:])
    # On a thread: hundreds of options have thousands of forms to tokenize.
    cases = await asyncio.to_thread(_cases, asked, tokens)
    texts = [question_text(asked.questions[case.question], case.labels, case.rotation) for case in cases]
    texts = engine.images.without_markers(texts)
    prompts = await engine.images.cut_prompts([f"{before}{text}{after}" for text in texts], "questions")
    request = pooled_request(
        fields,
        engine,
        exchange.caller,
        prompts,
        [tokens.params(case.labels) for case in cases],
        param="questions",
        id_prefix="decision",
        add_special_tokens=engine.renderer is None,
    )
    try:
        answer = await run_pooled(exchange, engine, request)
    except RequestError as error:
        raise _located(error, cases, asked.paths) from None
    results: list[list[Decided]] = [[] for _ in asked.questions]
    for case, vector in zip(cases, answer.vectors, strict=True):
        kind, calibration = asked.questions[case.question].kind, engine.spec.decision_temperatures
        temperature = fields.temperature or temperature_of(calibration, kind, len(case.labels))
        results[case.question].append(tokens.decided(case.labels, vector, case.rotation, temperature))
    firsts = {case.question: n for n, case in reversed(list(enumerate(cases)))}
    details = [_details(fields, tokens, cases[firsts[n]], answer, firsts[n]) for n in range(len(results))]
    usage = DecisionUsage(
        input_tokens=answer.usage.prompt_tokens,
        input_tokens_details=InputDetails(answer.usage.prompt_tokens_details.cached_tokens),
        total_tokens=answer.usage.prompt_tokens,
    )
    return _Answers(answer.id, answer.model, list(map(mean_of, results)), details, usage)


def _num_orders(asked: _Asked, question: Question) -> int:
    """How often a question is asked."""
    is_choice = question.kind is QuestionKind.CHOICE
    return min(asked.fields.permutations or 1, len(question.options)) if is_choice else 1


def _cases(asked: _Asked, tokens: LabelTokens) -> list[_Case]:
    cases = []
    for number, (question, path) in enumerate(zip(asked.questions, asked.paths, strict=True)):
        labels, orders = tokens.labels(question, path), _num_orders(asked, question)
        cases += [_Case(number, labels, order * len(labels) // orders) for order in range(orders)]
    return cases


async def _frame(engine: Engine, asked: _Asked) -> tuple[str, str]:
    """The prompt before a question and after it.

    The chat is rendered once, with a mark in the place of the question.
    """
    if engine.renderer is None:
        texts = [message["content"] for message in asked.messages]
        return "\n\n".join([*texts, ""]), PLAIN_END
    mark = uuid.uuid4().hex
    history = History()
    history.messages += asked.messages
    history.user(mark)
    conversation = Conversation(
        messages=history.messages,
        reasoning=ReasoningOptions(enabled=False),
        variables=checked_template_variables(asked.fields.chat_template_kwargs),
    )
    plan = await engine.plan_chat(conversation, messages_param=asked.param)
    asked.warnings.extend(plan.warnings)
    if plan.closes_reasoning:
        asked.warnings.append(_CLOSED)
    before, found, after = (plan.prompt + plan.answer_begin).partition(mark)
    if not found or mark in after:
        raise RequestError(
            "the model's chat template does not write the last message once, as it is; use a template that does "
            "(--chat-template)",
            param=asked.param,
            code="unsupported_template",
        )
    return before, after


def _located(error: RequestError, cases: Sequence[_Case], paths: Sequence[str]) -> RequestError:
    """An error about a prompt, with the path of its question."""
    match = _NUMBERED.fullmatch(error.param or "")
    if match is None:
        return error
    path = paths[cases[int(match[1] or 0)].question]
    message = error.message.replace(match[0], path, 1)
    return RequestError(message, param=path, code=error.code, status=error.status)


def _details(
    fields: DecisionFields, tokens: LabelTokens, case: _Case, answer: PooledAnswer, index: int
) -> AnswerDetails:
    if not fields.return_prompt_token_ids:
        return AnswerDetails()
    return AnswerDetails(
        prompt_token_ids=answer.prompt_ids[index].tolist(),
        label_token_ids=[list(tokens.group(label)) for label in case.labels],
    )


# ---------------------------------------------------------------- answering


def _answer(
    item: AskedItem, decided: Decided, details: AnswerDetails, refuses: bool
) -> PredicateAnswer | ChoiceAnswer | ScoreAnswer | RefusalAnswer:
    common: dict[str, Any] = {"name": item.name, "label_mass": decided.label_mass} | _asdict(details)
    if refuses:
        return RefusalAnswer(**common)
    shares = decided.probabilities
    match item:
        case PredicateItem():
            return PredicateAnswer(probability=shares[0], **common)
        case ChoiceItem():
            values = [choice.value for choice in item.choices]
            return ChoiceAnswer(
                choice=values[decided.best],
                confidence=decided.confidence,
                probabilities=list(map(ChoiceProbability, values, shares)),
                **common,
            )
        case ScoreItem():
            labels = [level.label for level in item.levels]
            return ScoreAnswer(
                score=decided.expected,
                confidence=decided.confidence,
                probabilities=list(map(LevelProbability, range(len(labels)), labels, shares)),
                **common,
            )


def _system_answer(
    item: AskedSystemItem, decided: Decided, details: AnswerDetails, refuses: bool
) -> SystemAnswer:
    common: dict[str, Any] = {"x_label_mass": decided.label_mass} | _asdict(details)
    if refuses:
        return SystemAnswer(type="refusal", **common)
    shares = decided.probabilities
    match item:
        case Noul():
            return SystemAnswer(type="noul", noul=shares[0], **common)
        case SystemChoice():
            keys = list(item.criteria)
            return SystemAnswer(
                type="choice",
                choice=keys[decided.best],
                confidence=decided.confidence,
                probabilities=dict(zip(keys, shares, strict=True)),
                **common,
            )
        case SystemScore():
            return SystemAnswer(
                type="score",
                score=decided.expected,
                confidence=decided.confidence,
                probabilities={str(level): share for level, share in enumerate(shares)},
                legend={str(level): text for level, text in enumerate(item.criteria)},
                **common,
            )


def _asdict(details: AnswerDetails) -> dict[str, Any]:
    return {name: value for name, value in msgspec.structs.asdict(details).items() if value is not UNSET}
