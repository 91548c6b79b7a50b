"""`engine serve --dp 2`: the answers of one replica, also while processes of one of the two are killed or freeze."""

from __future__ import annotations

import os
import signal
import time

import httpx
import pytest

from tests.e2e.serving import DEADLINE_S, SLOW, EngineServe

from .load import KINDS, Load, answers_of

# In one process: `tests/tokenizer_manager/dispatch/test_replicas.py`.
pytestmark = [pytest.mark.real_process, pytest.mark.slow]

ARGUMENTS = ("--dtype", "float32", "--watchdog-timeout", "6", "--max-restarts", "100", *SLOW)
BODIES = list(KINDS.values())
BEGINNING = "the quick brown fox jumps over the lazy dog " * 40


@pytest.fixture(scope="module")
def one_replica(shared_serve):
    """What one replica answers."""
    answers = answers_of(shared_serve, BODIES)
    assert all(answer.complete for answer in answers)
    return answers


@pytest.fixture(scope="module")
def engine(model):
    """A server with two, which all tests of the file share: each leaves it whole and idle."""
    with EngineServe(str(model), *ARGUMENTS, "--dp", "2") as engine:
        yield engine.wait_until_ready()
        assert engine.stop() == 0, engine.log
        assert engine.leftovers() == []


def both_run(metrics):
    return metrics['replica_healthy{replica="0"}'] == metrics['replica_healthy{replica="1"}'] == 1


@pytest.mark.parametrize(
    ("lost", "signum"),
    [
        (["scheduler_of_replica_1"], signal.SIGKILL),
        (["detokenizer_of_replica_0"], signal.SIGKILL),
        (["scheduler_of_replica_0"], signal.SIGSTOP),
        (["scheduler_of_replica_0", "scheduler_of_replica_1"], signal.SIGKILL),
    ],
)
def test_every_answer_is_what_one_replica_says(engine, one_replica, lost, signum):
    engine.metrics_when(both_run)
    before = engine.pids
    with Load(engine, BODIES) as load:
        load.wait_until_they_run()
        for role in lost:
            os.kill(before[role], signum)
        answers = load.answers()

    for answer, expected in zip(answers, one_replica, strict=True):
        answer.assert_equals(expected)
    metrics = engine.metrics_when(both_run)
    assert metrics["resumed_reqs_total"] > 0
    engine.idle_metrics()
    for role in {f"scheduler_of_replica_{replica}" for replica in (0, 1)} - set(lost):
        assert engine.pids[role] == before[role]


def test_a_lost_tokenizer_manager_is_back_with_both_replicas(engine):
    before = engine.pids
    with Load(engine, BODIES[:2]) as load:
        load.wait_until_they_run()
        os.kill(before["tokenizer_manager"], signal.SIGKILL)
        for failure in load.failures():
            assert isinstance(failure, httpx.RemoteProtocolError | httpx.ReadError)
    deadline_s = time.monotonic() + DEADLINE_S
    while True:
        try:
            if httpx.get(f"{engine.url}/health", timeout=DEADLINE_S).status_code == 200:
                break
        except httpx.TransportError:
            assert time.monotonic() < deadline_s, engine.log
        engine.leave_the_core_to_it()
    engine.metrics_when(both_run)
    engine.idle_metrics()  # the schedulers have dropped what nobody waits for
    assert {role: engine.pids[role] for role in before if "replica" in role} == {
        role: pid for role, pid in before.items() if "replica" in role
    }


def complete(engine, **fields):
    body = {"max_tokens": 2, "temperature": 0, "ignore_eos": True} | fields
    reply = httpx.post(f"{engine.url}/v1/completions", json=body, timeout=DEADLINE_S)
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_prompts_find_their_prefix_and_clients_may_choose(engine):
    """Equal beginnings meet in one cache; a replica that is asked for gets the request, cached there or not."""
    info = httpx.get(f"{engine.url}/server_info", timeout=DEADLINE_S).json()
    assert info["dp_size"] == 2
    cached = []
    for number in range(4):
        usage = complete(engine, prompt=f"{BEGINNING} {number}")["usage"]
        cached.append(usage["prompt_tokens_details"]["cached_tokens"] / usage["prompt_tokens"])
    assert cached[0] < 0.5 and min(cached[1:]) > 0.9

    def seen():
        return [
            engine.metrics_when(lambda metrics: True)[f'replica_prompt_tokens_total{{replica="{replica}"}}']
            for replica in (0, 1)
        ]

    for replica in (0, 1):
        before = seen()
        num_tokens = complete(engine, prompt="one two", data_parallel_rank=replica)["usage"]["prompt_tokens"]
        after = seen()
        assert after[replica] - before[replica] == num_tokens
        assert after[1 - replica] == before[1 - replica]
    refused = httpx.post(
        f"{engine.url}/generate", json={"text": "x", "data_parallel_rank": 2}, timeout=DEADLINE_S
    )
    assert refused.status_code == 400
    assert "data_parallel_rank is 2, but the server has 2 replicas" in refused.text
