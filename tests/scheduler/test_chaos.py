"""Tests of `scheduler/chaos.py`: faults on purpose come as often as asked for, and cost nobody a token."""

from __future__ import annotations

import pytest

from engine.runtime.config import SchedulerConfig
from engine.runtime.errors import ConfigError


def causes(harness):
    return [each.cause for record in harness.scheduler.decisions.passes for each in record.retractions]


@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("phases", ["mixed", "prefill-first", "decode-first"])
def test_as_often_as_asked_for_and_no_token_is_lost(make_scheduler, overlap, phases):
    harness = make_scheduler(chaos="retract=1:20", overlap=overlap, phases=phases, num_pages=128)
    for _ in range(6):
        harness.submit(prompt_len=20, max_new_tokens=30)

    harness.run_until_idle()

    assert causes(harness) == ["chaos"] * 20


def test_the_same_seed_gives_the_same_faults(make_scheduler):
    retracted = []
    for seed in (1, 1, 2):
        harness = make_scheduler(chaos="retract=0.3:10", policy_seed=seed)
        for idx in range(4):
            harness.submit(f"r{idx}", max_new_tokens=30)
        harness.run_until_idle()
        retracted.append([rid for record in harness.scheduler.decisions.passes for rid in record.retracted])

    assert retracted[0] == retracted[1] != retracted[2]


@pytest.mark.parametrize(
    "text", ["retract=2:5", "retract=0.5", "swap=0.5:5", "retract=1.2.3:5", "retract=nan:1", ""]
)
def test_anything_else_is_refused(text):
    with pytest.raises(ConfigError, match="retract=PROBABILITY:COUNT"):
        SchedulerConfig(chaos=text)
