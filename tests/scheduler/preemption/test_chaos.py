"""Tests of `scheduler/preemption/chaos.py`: faults on purpose come as often as asked for, and cost nobody a token."""

from __future__ import annotations

import os
import signal
import time

import pytest

from engine.runtime.config.engine_config import SchedulerConfig
from engine.runtime.errors import ConfigError
from engine.scheduler.preemption.chaos import with_chaos


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
    "text",
    [
        "oom=2:5",
        "oom=0.1:3,oom=0.1:3",
        "retract=2:5",
        "retract=0.5",
        "swap=0.5:5",
        "retract=1.2.3:5",
        "retract=nan:1",
        "slow=0.01:5",
        "slow=2",
        "slow=",
        "slow=0.1,slow=0.2",
        "kill=",
        "kill=-1",
        "kill=1,kill=2",
        "",
    ],
)
def test_anything_else_is_refused(text):
    with pytest.raises(ConfigError, match="retract=PROBABILITY:COUNT"):
        SchedulerConfig(chaos=text)


@pytest.mark.parametrize("text", ["oom=1:5", "retract=0.5:9,oom=1:5"])
def test_steps_lose_their_results_as_often_as_asked_for(make_scheduler, text):
    harness = make_scheduler(chaos=text, num_pages=128)
    harness.runner = with_chaos(harness.runner, SchedulerConfig(chaos=text), page_size=4)
    for _ in range(4):
        harness.submit(prompt_len=20, max_new_tokens=30)
    for _ in range(400):
        harness.step()
        if not harness.scheduler.num_unfinished:
            break
    harness.check_answers()

    failed = [each for each in harness.scheduler.decisions if getattr(each, "out_of_memory", "")]
    assert [each.out_of_memory for each in failed] == ["asked for by --chaos"] * 5
    assert all(len(answer.tokens) == 30 for answer in harness.answers.values())


@pytest.mark.parametrize("took_s", [0.0, 0.0625, 0.125, 5.0])
def test_slow_steps_take_the_time_that_was_asked_for(make_scheduler, monkeypatch, took_s):
    now_s = [100.0]
    slept_s: list[float] = []
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    monkeypatch.setattr(time, "sleep", slept_s.append)
    harness = make_scheduler(num_pages=128)
    harness.runner = with_chaos(harness.runner, SchedulerConfig(chaos="slow=0.125"), page_size=4)
    harness.submit(max_new_tokens=1)
    batch = harness.scheduler.next_batch(now_s[0])
    pending = harness.runner.launch(batch.plan)
    now_s[0] += took_s

    result = pending.wait()
    assert (result.step_id, result.forward_s) == (batch.plan.step_id, 0.125)
    assert slept_s == [max(0.0, 0.125 - took_s)]


def test_each_round_of_a_burst_takes_that_time(make_scheduler, monkeypatch):
    now_s = [100.0]
    slept_s: list[float] = []
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    monkeypatch.setattr(time, "sleep", slept_s.append)
    harness = make_scheduler(num_pages=128, multi_step_ms=500.0)
    harness.runner = with_chaos(harness.runner, SchedulerConfig(chaos="slow=0.125"), page_size=4)
    harness.submit(max_new_tokens=6)
    for _ in range(3):
        harness.step()
    assert slept_s == [0.125, 0.125, 0.5]


@pytest.mark.parametrize("text", [None, "retract=0.5:9", "oom=0.5:0", "slow=0"])
def test_other_runners_stay_as_they_are(make_scheduler, text):
    runner = make_scheduler().runner
    assert with_chaos(runner, SchedulerConfig(chaos=text), page_size=4) is runner


def test_only_a_prompt_with_the_token_kills(make_scheduler, monkeypatch):
    killed: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda pid, signum: killed.append((pid, signum)))
    harness = make_scheduler(num_pages=128)
    harness.runner = with_chaos(harness.runner, SchedulerConfig(chaos="kill=9"), page_size=4)
    harness.submit(prompt=[7, 8, 10], max_new_tokens=1)
    harness.step()
    assert killed == []
    harness.submit(prompt=[8, 9], max_new_tokens=1)
    harness.step()

    assert killed == [(os.getpid(), signal.SIGKILL)]
