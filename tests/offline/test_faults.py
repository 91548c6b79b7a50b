"""Steps for which the device has no memory, by `--chaos`, on a real model: nobody's text changes."""

from __future__ import annotations

from typing import Any

import pytest

from engine import LLM, SamplingParams
from engine.scheduler.journal.log_file import read_runs
from engine.scheduler.journal.replay import replay
from engine.scheduler.records.decision_log import Settled

SETTINGS: dict[str, Any] = {"dtype": "float32", "num_threads": 1, "page_size": 4, "max_total_tokens": 512}
PROMPTS = [f"prompt {n}" + " and more" * n for n in range(5)]
PARAMS = SamplingParams(temperature=1.0, seed=3, max_new_tokens=10, ignore_eos=True)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("overlap", [False, True])
def test_a_device_without_memory_costs_nobody_a_token(tiny_model, tmp_path, overlap):
    log = tmp_path / "decisions.edl"
    with LLM(str(tiny_model), **SETTINGS) as llm:
        expected = [output.text for output in llm.generate(PROMPTS, PARAMS)]
    faults = {"chaos": "oom=0.6:8,retract=0.2:4", "overlap": overlap, "decision_log": str(log)}
    with LLM(str(tiny_model), **SETTINGS, **faults) as llm:
        outputs = llm.generate(PROMPTS, PARAMS)
        sentences = [llm.why(output.request_id).sentence for output in outputs]

    assert [output.text for output in outputs] == expected
    assert any("the device had no memory for its step" in sentence for sentence in sentences)
    [run] = [list(each.records) for each in read_runs(log)]
    assert sum(bool(record.out_of_memory) for record in run if isinstance(record, Settled)) >= 2
    [result] = [replay(each) for each in read_runs(log)]
    assert result.is_equal, result.difference
