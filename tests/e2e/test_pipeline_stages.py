"""`engine serve --pp` with real processes: the same answers as one process, and its end when a stage dies."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from engine.scheduler.journal.log_file import read_runs
from engine.scheduler.journal.replay import replay

from .serving import DEADLINE_S, SLOW
from .test_several_machines import free_address, write_key
from .test_tensor_parallel import begin_a_long_answer

pytestmark = pytest.mark.real_process

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def answers(url: str, num: int = 8) -> list[Any]:
    """Of requests at the same time: short and long prompts, greedy and sampled, with grammars, penalties."""

    def answer(number: int) -> Any:
        fields: dict[str, Any] = {
            "model": "small-llama",
            "prompt": f"client {number} jumps over the lazy dog " * (1 + 30 * (number % 3)),
            "max_tokens": 12,
            "temperature": (number % 2) * 0.9,
            "frequency_penalty": 0.3 * (number % 4),
            "seed": number,
            "logprobs": 2,
        }
        if number % 4 == 3:
            fields["response_format"] = {
                "type": "json_schema",
                "json_schema": {"name": "n", "schema": SCHEMA},
            }
        answered = httpx.post(f"{url}/v1/completions", json=fields, timeout=DEADLINE_S).json()
        choice = answered["choices"][0]
        return choice["text"], choice["logprobs"]["tokens"], choice["finish_reason"]

    with ThreadPoolExecutor(num) as pool:
        return list(pool.map(answer, range(num)))


@pytest.mark.slow
def test_two_stages_answer_as_one_process_and_end_when_one_is_killed(serve, start_serve, model):
    engine = start_serve(str(model), "--dtype", "float32", "--pp", "2", "--max-restarts", "0", *SLOW)
    engine.wait_until_ready()
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
@pytest.mark.parametrize("role", ["model_runner_1", "scheduler"])
def test_a_lost_stage_is_started_again_and_its_requests_go_on(serve, start_serve, model, role):
    engine = start_serve(str(model), "--dtype", "float32", "--pp", "2", *SLOW).wait_until_ready()
    before = dict(engine.pids)
    with ThreadPoolExecutor(1) as pool:
        given = pool.submit(answers, engine.url)
        os.kill(before[role], signal.SIGKILL)
        assert given.result() == answers(serve.url)
    assert answers(engine.url) == answers(serve.url)
    assert engine.pids["scheduler"] != before["scheduler"]
    assert engine.pids["model_runner_1"] != before["model_runner_1"]
    assert engine.stop() == 0
    assert engine.leftovers() == []


@pytest.mark.slow
def test_two_stages_of_two_ranks_answer_as_two_ranks(start_serve, model):
    both = [
        start_serve(str(model), "--dtype", "bfloat16", "--tp", "2", "--num-threads", "1", *options)
        for options in ((), ("--pp", "2", "--chunked-prefill-size", "64"))
    ]
    two, four = [engine.wait_until_ready() for engine in both]
    assert set(four.pids) >= {"model_runner_1", "model_runner_2", "model_runner_3"}
    assert answers(four.url) == answers(two.url)
    for engine in both:
        assert engine.stop() == 0
        for word in ("Traceback", "Fatal Python error", "terminate called"):
            assert word not in engine.log


@pytest.mark.slow
def test_every_decision_of_a_run_with_stages_can_be_made_again(start_serve, model, tmp_path):
    path = tmp_path / "decisions.log"
    engine = start_serve(str(model), "--pp", "2", "--chunked-prefill-size", "64", "--decision-log", str(path))
    engine.wait_until_ready()
    answers(engine.url)
    assert engine.stop() == 0

    (result,) = [replay(run) for run in read_runs(path)]
    assert result.is_equal, result


@pytest.mark.slow
def test_more_stages_than_layers_are_refused_at_once(start_serve, model):
    engine = start_serve(str(model), "--pp", "3")

    assert engine.wait() == 2
    (cause,) = engine.causes
    assert cause.endswith("pp is 3, but the model has 2 layers, and each stage needs one; lower --pp")


@pytest.mark.slow
def test_stages_on_two_machines_answer_as_one_process(serve, start_serve, model, tmp_path):
    key = write_key(tmp_path / "cluster.key", "s" * 64)
    shared = ["--dtype", "float32", "--pp", "2", "--nnodes", "2", "--cluster-key-file", key]
    shared += ["--dist-init-addr", free_address()]
    first, second = (start_serve(str(model), *shared, "--node-rank", rank) for rank in ("0", "1"))
    first.wait_until_ready()

    assert answers(first.url) == answers(serve.url)
    assert first.stop() == 0
    assert second.wait() == 0
