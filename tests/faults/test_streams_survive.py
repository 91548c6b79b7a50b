"""Processes that are killed, crash or freeze while requests of every kind run: clients see a pause and nothing else."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.e2e.serving import DEADLINE_S, SLOW, EngineServe
from tests.offline.test_draft_model import deep_model, head
from tests.offline.test_mtp import glm, qwen

from .load import KINDS, Load, answers_of

__all__ = ["deep_model", "glm", "head", "qwen"]  # fixtures

pytestmark = pytest.mark.real_process

WATCHDOG_S = 6.0  # longer than a busy machine keeps a healthy process from a heartbeat
ARGUMENTS = ("--watchdog-timeout", str(WATCHDOG_S), "--max-restarts", "100", *SLOW)
SHORT = {"prompt": "one two", "max_tokens": 8, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def engine(model):
    """A server that all tests of the file share: each leaves it whole and idle."""
    with EngineServe(str(model), "--dtype", "float32", *ARGUMENTS) as engine:
        yield engine.wait_until_ready()
        assert engine.stop() == 0, engine.log
        assert engine.leftovers() == []


@pytest.fixture(scope="module")
def bodies(engine):
    """One request of each kind, and one that ends with a stop string in the middle of its answer."""
    sampled = KINDS["with penalties"]  # whose text does not run in circles
    probe = dict(sampled, stream=False)
    answer = httpx.post(f"{engine.url}/v1/completions", json=probe, timeout=DEADLINE_S).json()
    text = answer["choices"][0]["text"]
    middle = 3 * len(text) // 4
    stops = (text[middle : middle + length] for length in range(4, 40))
    stop = next(stop for stop in stops if text.index(stop) == middle)
    return [*KINDS.values(), dict(sampled, stop=[stop])]


@pytest.fixture(scope="module")
def undisturbed(engine, bodies):
    """What they are answered when nothing happens."""
    answers = answers_of(engine, bodies)
    assert all(answer.complete for answer in answers)
    return answers


def health(engine):
    return httpx.get(f"{engine.url}/health", timeout=DEADLINE_S)


def wait_for_health(engine, status, reason=""):
    deadline_s = time.monotonic() + DEADLINE_S
    while (response := health(engine)).status_code != status or reason not in response.text:
        assert time.monotonic() < deadline_s, engine.log
        engine.leave_the_core_to_it()


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    ("role", "signum"),
    [
        ("scheduler", signal.SIGKILL),
        ("detokenizer", signal.SIGKILL),
        pytest.param("scheduler", signal.SIGSEGV, marks=pytest.mark.slow),
        pytest.param("detokenizer", signal.SIGSEGV, marks=pytest.mark.slow),
        pytest.param("scheduler", signal.SIGSTOP, marks=pytest.mark.slow),
        pytest.param("detokenizer", signal.SIGSTOP, marks=pytest.mark.slow),
    ],
)
def test_every_answer_is_what_it_would_have_been(engine, bodies, undisturbed, role, signum):
    resumed_before = engine.idle_metrics()["resumed_reqs_total"]
    with Load(engine, bodies) as load, ThreadPoolExecutor(1) as later:
        load.wait_until_they_run()
        lost = engine.pids[role]
        os.kill(lost, signum)
        # It says itself that the heartbeat is old, before the supervisor says that somebody hangs.
        reason = "hangs" if signum == signal.SIGSTOP else f"was killed by {signum.name}"
        wait_for_health(engine, 503, f"{role} {reason}")
        # Whoever comes now waits, and is not refused.
        new = later.submit(httpx.post, f"{engine.url}/v1/completions", json=SHORT, timeout=DEADLINE_S)
        wait_for_health(engine, 200)
        answers = load.answers()
        assert new.result().status_code == 200

    assert engine.pids[role] != lost
    for answer, before in zip(answers, undisturbed, strict=True):
        answer.assert_equals(before)
    assert engine.idle_metrics()["resumed_reqs_total"] > resumed_before


@pytest.mark.slow
def test_a_lost_tokenizer_manager_breaks_connections_and_is_back_on_its_port(engine, bodies):
    before = engine.pids
    with Load(engine, bodies[:2]) as load:
        load.wait_until_they_run()
        os.kill(before["tokenizer_manager"], signal.SIGKILL)
        for failure in load.failures():
            # Not an end that looks like one: the client's library sees that the response is not complete.
            assert isinstance(failure, httpx.RemoteProtocolError | httpx.ReadError)

    deadline_s = time.monotonic() + DEADLINE_S
    while True:
        try:
            health(engine)
        except httpx.TransportError:
            assert time.monotonic() < deadline_s, engine.log
            engine.leave_the_core_to_it()
        else:
            break
    assert engine.pids["scheduler"] == before["scheduler"]
    engine.idle_metrics()  # waits until nothing runs and nothing is held
    assert httpx.post(f"{engine.url}/v1/completions", json=SHORT, timeout=DEADLINE_S).status_code == 200


@pytest.mark.slow
def test_a_drain_waits_for_streams_that_are_being_recovered(start_serve, bodies, undisturbed):
    engine = start_serve(*SLOW)
    with Load(engine, bodies[:2]) as load:
        load.wait_until_they_run()
        os.kill(engine.pids["scheduler"], signal.SIGKILL)
        wait_for_health(engine, 503)
        engine.process.terminate()
        answers = load.answers()

    for answer, before in zip(answers, undisturbed, strict=False):
        answer.assert_equals(before)
    assert engine.wait() == 0
    assert engine.leftovers() == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("role", "signum"),
    [
        ("model_runner_1", signal.SIGKILL),
        ("scheduler", signal.SIGKILL),
        ("model_runner_1", signal.SIGSTOP),  # the other one hangs in a collective then
        ("scheduler", signal.SIGSTOP),
    ],
)
def test_a_lost_rank_costs_a_pause(start_serve, role, signum):
    engine = start_serve("--tp", "2", *SLOW)
    bodies = list(KINDS.values())
    undisturbed = answers_of(engine, bodies)
    before = engine.pids
    with Load(engine, bodies) as load:
        load.wait_until_they_run()
        os.kill(before[role], signum)
        answers = load.answers()

    for answer, expected in zip(answers, undisturbed, strict=True):
        answer.assert_equals(expected)
    kept = {name for name, pid in engine.pids.items() if pid == before[name]}
    assert kept == {"tokenizer_manager"}
    assert engine.stop() == 0
    assert engine.leftovers() == []


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["draft", "eagle3", "mtp", "mtp with states"])
def test_answers_with_drafts_of_the_runner_are_those_without(
    start_serve: Callable[..., EngineServe],
    tiny_model: Path,
    deep_model: Path,
    head: Path,
    glm: Path,
    qwen: Path,
    drafter: str,
):
    """The new process drafts again; what the lost one's drafter knew is computed anew, with the prompt."""
    settings = ("--page-size", "4", "--max-total-tokens", "4096", *SLOW)
    folder = {"mtp": glm, "mtp with states": qwen}.get(drafter, deep_model)
    models = {"draft": tiny_model, "eagle3": head}
    drafts: tuple[str, ...] = ("--speculative", drafter.split(maxsplit=1)[0])
    if drafter in models:
        drafts += ("--speculative-model", str(models[drafter]))
    bodies = list(KINDS.values())
    undisturbed = answers_of(start_serve(*settings, model=folder), bodies)
    engine = start_serve(*settings, *drafts, model=folder)
    before = engine.pids["scheduler"]
    with Load(engine, bodies) as load:
        load.wait_until_they_run()
        os.kill(before, signal.SIGKILL)
        answers = load.answers()

    for answer, expected in zip(answers, undisturbed, strict=True):
        answer.assert_equals(expected)
    assert engine.pids["scheduler"] != before
    assert engine.idle_metrics()["resumed_reqs_total"] >= len(bodies)
    assert any(answer.usage["completion_tokens_details"]["rejected_prediction_tokens"] for answer in answers)
    assert engine.stop() == 0
    assert engine.leftovers() == []
