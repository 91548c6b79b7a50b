"""Tests of `scheduler/phases.py`: how prompts and running requests share the steps."""

from __future__ import annotations

import pytest

from engine.runtime.step_plan import ForwardMode

from .harness import extend_lens

LETTERS = {ForwardMode.EXTEND: "e", ForwardMode.DECODE: "d", ForwardMode.MIXED: "m"}


def run(harness):
    """A request that decodes for long, and a prompt of eight chunks that comes when it does."""
    harness.submit(prompt_len=8, max_new_tokens=24)
    harness.step()
    harness.step()
    harness.submit(prompt_len=64, max_new_tokens=1)
    return harness.run_until_idle()


@pytest.mark.parametrize(
    ("config", "modes"),
    [
        ({"phases": "mixed"}, "mmmmmmmmm"),
        ({"phases": "decode-first", "max_num_batched_tokens": 9}, "mmmmmmmm"),
        ({"phases": "prefill-first"}, "eeeeeeeed"),
        ({"phases": "prefill-first", "max_prefill_steps_in_a_row": 3}, "eeedeeedeed"),
        ({"phases": "prefill-first", "prefill_decode_interval": 1}, "edededede"),
        ({"phases": "prefill-first", "prefill_decode_interval": 3}, "ddedddeddd"),
    ],
    ids=str,
)
def test_the_rhythm_of_steps(make_scheduler, config, modes):
    harness = make_scheduler(chunked_prefill_size=8, **config)

    letters = "".join(LETTERS[step.plan.mode] for step in run(harness))

    assert letters.startswith(modes), letters


def test_decode_first_never_exceeds_its_one_budget(make_scheduler):
    """vLLM V1's order: the tokens of all, running or new, come out of one budget, and the running are served first."""
    harness = make_scheduler(
        phases="decode-first", max_num_batched_tokens=16, chunked_prefill_size=64, num_pages=128
    )
    for _ in range(6):
        harness.submit(prompt_len=20, max_new_tokens=12)

    steps = harness.run_until_idle()

    assert max(step.plan.total_num_scheduled_tokens for step in steps) == 16
    for step in steps:
        assert sum(extend_lens(step)) <= 16 - (len(step.reqs) - step.num_extends)
