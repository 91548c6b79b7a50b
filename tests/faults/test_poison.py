"""A request that really kills the scheduler, among others that have done nothing."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.e2e.serving import DEADLINE_S, EngineServe

pytestmark = [pytest.mark.real_process, pytest.mark.slow]

POISON = 77  # a token of the vocabulary that nobody else sends
RUNNING = 3
BODY = {"max_tokens": 40, "ignore_eos": True, "temperature": 0.7, "seed": 5}


def post(engine: EngineServe, prompt: list[int]) -> httpx.Response:
    body = BODY | {"prompt": prompt}
    return httpx.post(f"{engine.url}/v1/completions", json=body, timeout=4 * DEADLINE_S)


def text_of(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["text"])


def test_only_the_request_that_kills_pays_and_who_waited_is_not_tried(start_serve):
    engine = start_serve(
        *(
            "--max-running-requests",
            str(RUNNING),
            "--max-restarts",
            "3",
            "--chaos",
            f"kill={POISON},slow=0.01",
        )
    )
    prompts = [[10, 11, 12 + idx] for idx in range(6)]
    undisturbed = [text_of(post(engine, prompt)) for prompt in prompts]
    prompts.insert(1, [10, 11, POISON])

    with ThreadPoolExecutor(len(prompts)) as threads:
        answers = []
        with engine.stopped():  # so that they begin in this order, and at once
            for prompt in prompts:
                answers.append(threads.submit(post, engine, prompt))
                engine.wait_for_requests(len(answers))
        poison = answers.pop(1).result()
        texts = [text_of(answer.result()) for answer in answers]

    assert (poison.status_code, poison.json()["error"]["code"]) == (500, "poison_request")
    assert texts == undisturbed
    verdicts = re.findall(r"streams go on live_requests=(\d+) failed=(\d+) quarantined=(\d+)", engine.log)
    (_, _, first), (_, _, second), (_, num_failed, third) = verdicts
    assert (first, num_failed, third) == ("0", "1", "0")
    assert 2 <= int(second) <= RUNNING
    engine.idle_metrics()
    assert engine.stop() == 0
    assert engine.leftovers() == []
