"""`LLM(decision_log=FILE)`: what is recorded in the caller's process can be replayed and asked, as a server's can."""

from __future__ import annotations

import os
from collections.abc import Generator
from typing import Any

import pytest

from engine import LLM, ConfigError, SamplingParams
from engine.runtime.messages import Call
from engine.scheduler.journal.log_file import Input, read_runs
from engine.scheduler.journal.replay import replay
from engine.scheduler.queries.why import explain
from engine.scheduler.records.decision_log import PassRecord

SETTINGS: dict[str, Any] = {"dtype": "float32", "num_threads": 1, "page_size": 4}
GREEDY = SamplingParams(temperature=0, max_new_tokens=12, ignore_eos=True)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "decisions.edl"


def test_everything_an_llm_decided_is_replayed(tiny_model, path):
    """Batches, siblings, an abort by the detokenizer, one by the caller, a pin, faults on purpose, idle times."""
    with LLM(
        str(tiny_model),
        **SETTINGS,
        max_running_requests=3,
        max_total_tokens=256,
        chaos="retract=0.3:20",
        decision_log=str(path),
    ) as llm:
        texts = [output.text for output in llm.generate([f"prompt {i}" for i in range(8)], GREEDY)]
        llm.sample("siblings", 3, SamplingParams(max_new_tokens=5, seed=1))
        # A stop string that crosses tokens is found by the detokenizer, which then ends the request.
        stopped = llm.generate(
            "prompt 0",
            SamplingParams(temperature=0, max_new_tokens=12, ignore_eos=True, stop=(texts[0][2:4],)),
        )
        stream = llm.generate("left early", SamplingParams(max_new_tokens=200, ignore_eos=True), stream=True)
        assert isinstance(stream, Generator)
        next(stream)
        stream.close()
        llm.pin("prompt 0", ttl=60)
        llm.flush_cache()

    assert stopped.finish_reason == "stop"
    [result] = [replay(run) for run in read_runs(path)]
    assert result.is_equal, result.difference
    assert (result.num_requests, result.num_equal) == (13, result.num_passes)
    assert result.num_steps >= 8 * 12 / 3
    [inputs] = [
        [record.message for record in run.records if isinstance(record, Input)] for run in read_runs(path)
    ]
    kinds = {type(each.request if isinstance(each, Call) else each).__name__ for each in inputs}
    assert kinds == {"GenerateRequest", "AbortRequest", "PinPrefix", "FlushCache"}


@pytest.mark.slow
def test_bursts_give_the_text_of_single_steps_and_are_replayed(tiny_model, path):
    prompts, texts = ["one", "two prompts", "three"], []
    for burst_ms in (0, 1e6):
        with LLM(str(tiny_model), **SETTINGS, multi_step_ms=burst_ms, decision_log=str(path)) as llm:
            greedy, seeded = GREEDY, SamplingParams(max_new_tokens=25, seed=3, ignore_eos=True)
            outputs = [*llm.generate(prompts, greedy), *llm.generate(prompts, seeded)]
            texts.append([output.text for output in outputs])

    single, bursts = ([*run.records] for run in read_runs(path))
    assert texts[0] == texts[1]
    assert max(each.num_rounds for each in single if isinstance(each, PassRecord)) == 1
    assert max(each.num_rounds for each in bursts if isinstance(each, PassRecord)) == 8
    assert all(replay(run).is_equal for run in read_runs(path))


def test_the_file_knows_what_the_llm_answers(tiny_model, path):
    with LLM(str(tiny_model), **SETTINGS, decision_log=str(path)) as llm:
        output = llm.generate("Hello", GREEDY)
        live = llm.why(output.request_id)
    [from_file] = [explain(run.decisions, output.request_id) for run in read_runs(path)]
    assert live.found
    assert (from_file.sentence, from_file.rows) == (live.sentence, live.rows)


@pytest.mark.slow
def test_a_second_llm_adds_a_run(tiny_model, path):
    for _ in range(2):
        with LLM(str(tiny_model), **SETTINGS, decision_log=str(path)) as llm:
            llm.generate("Hello", GREEDY)
    results = [replay(run) for run in read_runs(path)]
    assert [(result.is_equal, result.num_requests) for result in results] == [(True, 1)] * 2


def test_two_at_a_time_cannot_share_a_file(tiny_model, path):
    with LLM(str(tiny_model), **SETTINGS, decision_log=str(path)) as llm:
        with pytest.raises(ConfigError, match="another process is writing"):
            LLM(str(tiny_model), **SETTINGS, decision_log=str(path))
        assert len(llm.generate("Hello", GREEDY).token_ids) == 12


def test_a_file_that_is_something_else_is_left_as_it_was(tiny_model, path):
    path.write_text("my letters")
    with pytest.raises(ConfigError, match="is no decision log"):
        LLM(str(tiny_model), **SETTINGS, decision_log=str(path))
    assert path.read_text() == "my letters"


def test_without_the_setting_nothing_is_written(tiny_model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with LLM(str(tiny_model), **SETTINGS) as llm:
        llm.generate("Hello", GREEDY)
    assert os.listdir(tmp_path) == []
