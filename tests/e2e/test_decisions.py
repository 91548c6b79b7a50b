"""Decisions of a served model: its own log-probabilities, the same bits in any company, calibrated, and replayed."""

from __future__ import annotations

import itertools
import json
import math
import re
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from .conftest import StartServe
from .serving import EngineServe, run_engine

pytestmark = [pytest.mark.real_process, pytest.mark.slow]

STATE = "The parcel came broken. I want my money back. " * 3
QUESTIONS: list[dict[str, Any]] = [
    {"type": "predicate", "instructions": "A refund is asked for."},
    {"type": "choice", "instructions": "Who?", "choices": [{"value": "a"}, {"value": "b"}, {"value": True}]},
    {"type": "score", "instructions": "How angry?", "levels": [{"label": "calm"}, {"label": "furious"}]},
    {"type": "predicate", "instructions": "It is about a parcel."},
]


def ask(server: EngineServe, questions: list[dict[str, Any]], **fields: Any) -> list[dict[str, Any]]:
    """The answers of the official client."""
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0)
    body: Any = {"model": server.model, "input": STATE, "questions": questions}
    answers: list[dict[str, Any]] = client.decisions.create(**body, extra_body=fields).model_dump()["answers"]
    return answers


def shares_of(answer: dict[str, Any]) -> list[float]:
    if answer["type"] == "predicate":
        return [answer["probability"], 1 - answer["probability"]]
    return [each["probability"] for each in answer["probabilities"]]


@pytest.fixture(scope="module")
def exact(model: Path) -> Any:
    with EngineServe(str(model), "--dtype", "bfloat16", "--deterministic") as server:
        yield server.wait_until_ready()
        assert server.stop() == 0, server.log
        assert server.leftovers() == []


def test_probabilities_are_the_models_own(exact: EngineServe) -> None:
    for answer in ask(exact, QUESTIONS, return_prompt_token_ids=True):
        groups = answer["label_token_ids"]
        ids = list(itertools.chain(*groups))
        body = {
            "model": exact.model,
            "prompt": answer["prompt_token_ids"],
            "max_tokens": 1,
            "logprobs": 0,
            "logprob_token_ids": ids,
            "return_tokens_as_token_ids": True,
        }
        [choice] = httpx.post(f"{exact.url}/v1/completions", json=body).raise_for_status().json()["choices"]
        found = choice["logprobs"]["top_logprobs"][0]
        masses = [math.fsum(math.exp(found[f"token_id:{each}"]) for each in group) for group in groups]
        expected = [mass / math.fsum(masses) for mass in masses]
        assert shares_of(answer) == pytest.approx(expected, abs=1e-6)
        assert answer["label_mass"] == pytest.approx(math.fsum(masses), abs=1e-6)
        assert math.fsum(shares_of(answer)) == pytest.approx(1.0, abs=1e-12)


def test_an_answer_is_the_same_alone_in_a_group_and_in_any_order(exact: EngineServe) -> None:
    """To the last bit, whether the input is cached or not."""
    together = ask(exact, QUESTIONS, cache_salt="together")
    for order in ([3, 2, 1, 0], [2, 0, 3, 1]):
        answers = ask(exact, [QUESTIONS[at] for at in order], cache_salt=f"order {order}")
        assert answers == [together[at] for at in order]
    for at, question in enumerate(QUESTIONS):
        assert ask(exact, [question], cache_salt=f"alone {at}") == [together[at]]
    assert ask(exact, QUESTIONS, cache_salt="together") == together
    many = [QUESTIONS[at % 4] | {"name": str(at)} for at in range(60)]
    for at, answer in enumerate(ask(exact, many, cache_salt="many")):
        assert answer | {"name": None} == together[at % 4]


def test_a_calibrated_server_decides_with_the_temperatures_of_its_file(
    start_serve: StartServe, model: Path, tmp_path: Path, exact: EngineServe
) -> None:
    """The file is what `engine decisions fit` has written, and every decision of the scheduler can be replayed."""
    labeled, fitted, log = tmp_path / "labeled.jsonl", tmp_path / "fitted.json", tmp_path / "log.edl"
    rights = [True, "b", 1, False]
    lines = [
        {
            "input": f"{STATE}{number}",
            "questions": [each | {"answer": right} for each, right in zip(QUESTIONS, rights, strict=True)],
        }
        for number in range(10)
    ]
    labeled.write_text("\n".join(map(json.dumps, lines)))
    done = run_engine(tmp_path, "decisions", "fit", str(labeled), "-o", str(fitted), "--url", exact.url)
    assert (done.returncode, done.stderr) == (0, ""), done
    temperatures = json.loads(fitted.read_text())
    assert list(temperatures) == ["choice", "choice.3", "predicate", "score", "score.2"]

    options = ("--dtype", "bfloat16", "--deterministic", "--decision-calibration", str(fitted))
    server = start_serve(str(model), *options, "--decision-log", str(log)).wait_until_ready()
    expected = [ask(exact, [each], temperature=temperatures[each["type"]])[0] for each in QUESTIONS]
    assert ask(server, QUESTIONS) == expected
    ask(server, [QUESTIONS[at % 4] for at in range(40)])
    assert server.stop() == 0, server.log

    replayed = run_engine(tmp_path, "replay", str(log))
    assert (replayed.returncode, replayed.stderr) == (0, "")
    match = re.search(r"([\d,]+) passes, ([\d,]+) equal \(100 %\)", replayed.stdout)
    assert match and match[1] == match[2], replayed.stdout


def test_a_wrong_file_ends_the_start_with_one_line(
    start_serve: StartServe, model: Path, tmp_path: Path
) -> None:
    file = tmp_path / "wrong.json"
    file.write_text('{"predicate": -1}')

    server = start_serve(str(model), "--decision-calibration", str(file))

    assert server.wait() == 2
    [line] = server.log.strip().splitlines()
    assert line.endswith(
        "'predicate' is -1, but it must be a number above 0 and at most 100; mend it, or write it with `engine "
        "decisions fit`"
    )
