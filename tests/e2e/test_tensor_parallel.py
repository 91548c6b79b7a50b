"""`engine serve --tp 2` with real processes: the same answers as one rank, and its end when a rank dies or freezes."""

from __future__ import annotations

import os
import signal
from typing import Any

import httpx
import pytest

from .serving import DEADLINE_S, SLOW, EngineServe

pytestmark = pytest.mark.real_process

ARGUMENTS = ("--dtype", "float32", "--tp", "2", "--max-restarts", "0", *SLOW)


def answers(url: str) -> list[Any]:
    texts = []
    for number in range(3):
        fields = {
            "model": "small-llama",
            "prompt": f"client {number} jumps over the lazy dog " * (1 + 8 * number),
            "max_tokens": 12,
            "temperature": number / 2,
            "seed": number,
            "logprobs": 2,
        }
        choice = httpx.post(f"{url}/v1/completions", json=fields, timeout=DEADLINE_S).json()["choices"][0]
        texts.append((choice["text"], choice["logprobs"]["tokens"], choice["finish_reason"]))
    return texts


def begin_a_long_answer(engine: EngineServe, client: httpx.Client) -> Any:
    fields = {
        "model": "small-llama",
        "prompt": "one two three",
        "max_tokens": 1900,
        "ignore_eos": True,
        "stream": True,
    }
    request = client.build_request("POST", f"{engine.url}/v1/completions", json=fields)
    lines = client.send(request, stream=True).iter_lines()
    assert next(lines).startswith("data: ")
    return lines


@pytest.mark.slow
def test_two_ranks_answer_as_one_and_end_together_when_one_is_killed(serve, start_serve, model):
    engine = start_serve(str(model), *ARGUMENTS).wait_until_ready()
    assert set(engine.pids) == {"scheduler", "detokenizer", "tokenizer_manager", "model_runner_1"}
    assert answers(engine.url) == answers(serve.url)

    with httpx.Client(timeout=DEADLINE_S) as client:
        lines = begin_a_long_answer(engine, client)
        os.kill(engine.pids["model_runner_1"], signal.SIGKILL)
        told = [line for line in lines if "error" in line]

    assert engine.wait() == 1
    (cause,) = engine.causes
    assert cause.startswith("engine: model_runner of rank 1 was killed by SIGKILL")
    assert "model_runner of rank 1 was killed by SIGKILL" in told[-1]
    assert engine.leftovers() == []


@pytest.mark.slow
def test_a_clean_end_leaves_nothing_behind(start_serve, model):
    engine = start_serve(str(model), *ARGUMENTS).wait_until_ready()
    answers(engine.url)

    assert engine.stop() == 0
    assert engine.leftovers() == []
    for word in ("Traceback", "Fatal Python error", "terminate called"):
        assert word not in engine.log


@pytest.mark.slow
@pytest.mark.parametrize("busy", [True, False])
@pytest.mark.parametrize(
    ("role", "name"), [("model_runner_1", "model_runner of rank 1"), ("scheduler", "scheduler (rank 0)")]
)
def test_a_stopped_rank_ends_the_engine_in_seconds_and_is_named(start_serve, model, role, name, busy):
    engine = start_serve(str(model), *ARGUMENTS).wait_until_ready()

    with httpx.Client(timeout=DEADLINE_S) as client:
        if busy:
            begin_a_long_answer(engine, client)
        os.kill(engine.pids[role], signal.SIGSTOP)
        assert engine.wait() == 1

    (cause,) = engine.causes  # not the watchdog's, which would take a minute
    assert cause.startswith(f"engine: {name} was stopped by a signal (SIGSTOP or SIGTSTP)")
    assert engine.leftovers() == []


@pytest.mark.slow
def test_a_killed_rank_0_is_named_and_not_the_rank_that_lost_it(start_serve, model):
    engine = start_serve(str(model), *ARGUMENTS).wait_until_ready()

    with httpx.Client(timeout=DEADLINE_S) as client:
        begin_a_long_answer(engine, client)
        os.kill(engine.pids["scheduler"], signal.SIGKILL)
        assert engine.wait() == 1

    (cause,) = engine.causes
    assert cause.startswith("engine: scheduler was killed by SIGKILL")
    assert engine.leftovers() == []


@pytest.mark.slow
def test_three_ranks_that_do_not_fit_are_refused_at_once(start_serve, model):
    engine = start_serve(str(model), "--tp", "3")

    assert engine.wait() == 2
    (cause,) = engine.causes
    assert cause.endswith("4 attention heads cannot be divided by it; for this model --tp can be 1, 2, 4")
