"""Answers to random schemas at random temperatures and lengths: each matches, also where `max_tokens` ends it.

The search for a short end may find none: for patterns, formats and allOf, and now and then for others.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Final

import httpx
import jsonschema_rs
import pytest

from engine.models.hub.built_in.fetch import cached_model

from .conftest import StartServe
from .random_schemas import Question, question
from .serving import DEADLINE_S, EngineServe

pytestmark = pytest.mark.real_process

AT_ONCE: Final = 16
ENDS: Final = ("stop", "length", "cut", "cut although simple")
REFUSED: Final = {"max_tokens_too_small", "unsupported_schema", "unsatisfiable_schema"}


async def answers(engine: EngineServe, questions: list[Question]) -> list[httpx.Response]:
    """The answers of a server, some at the same time."""
    limit = asyncio.Semaphore(AT_ONCE)
    async with httpx.AsyncClient(base_url=engine.url, timeout=4 * DEADLINE_S) as client:

        async def ask(question: Question) -> httpx.Response:
            schema = {"name": "answer", "schema": question.schema, "strict": True}
            body = {
                "messages": [{"role": "user", "content": "Invent something."}],
                "response_format": {"type": "json_schema", "json_schema": schema},
                "temperature": question.temperature,
                "max_tokens": question.max_tokens,
                "seed": question.seed,
            }
            async with limit:
                return await client.post("/v1/chat/completions", json=body)

        return list(await asyncio.gather(*map(ask, questions)))


def check(engine: EngineServe, count: int) -> None:
    """Ask for so many answers; refused requests do not count."""
    ends: Counter[str] = Counter()
    number = 0
    while sum(ends[end] for end in ENDS) < count:
        questions = [question(n) for n in range(number, number + 4 * AT_ONCE)]
        number += len(questions)
        for asked, reply in zip(questions, asyncio.run(answers(engine, questions)), strict=True):
            ends[end_of(asked, reply)] += 1
    assert ends["stop"] > count / 4, ends
    assert ends["length"] > count / 10, ends
    assert ends["cut although simple"] <= ends["length"] / 20, ends
    assert ends["unsupported_schema"] + ends["unsatisfiable_schema"] < count / 5, ends


def finite(text: str) -> float:
    """A number such as 1E400 is JSON and a number of JSON Schema; the validator would take infinity for null."""
    return max(-sys.float_info.max, min(sys.float_info.max, float(text)))


def end_of(asked: Question, reply: httpx.Response) -> str:
    """How one answer ended; it fits."""
    if reply.status_code == 400:
        code: str = reply.json()["error"]["code"]
        assert code in REFUSED, (asked, reply.text)
        return code
    assert reply.status_code == 200, (asked, reply.text)
    body = reply.json()
    [choice] = body["choices"]
    text, reason = choice["message"]["content"], choice["finish_reason"]
    assert "warnings" not in body, (asked, body["warnings"])
    assert reason in ("stop", "length")
    validator = jsonschema_rs.validator_for(asked.schema, validate_formats=True)
    try:
        is_valid = validator.is_valid(json.loads(text, parse_float=finite))
    except ValueError:
        is_valid = False
    if is_valid:
        return str(reason)
    assert reason == "length", (asked, text, body["usage"])
    return "cut" if asked.may_be_cut else "cut although simple"


@pytest.mark.slow
def test_answers_of_a_random_model(start_serve: StartServe, model: Path):
    """New grammars come last on a machine with other work, which must not make one of them late."""
    check(start_serve(str(model), "--dtype", "float32", "--grammar-timeout", "60").wait_until_ready(), 100)


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.timeout(900)
def test_500_answers_of_the_default_model():
    if cached_model() is None:
        pytest.skip("the default model is not in the cache")
    with EngineServe("--grammar-timeout", "60") as engine:
        check(engine.wait_until_ready(), 500)
        assert engine.stop() == 0, engine.log
        assert engine.leftovers() == []
        assert "Traceback" not in engine.log
