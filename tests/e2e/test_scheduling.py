"""What clients can ask of the scheduler, over HTTP: siblings, priorities, time limits, pins, salts, policies."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, get_args

import httpx
import openai
import pytest

from engine.runtime.config.engine_config import SchedulePolicyName

from .model import PAGE_SIZE
from .serving import DEADLINE_S, SLOW, EngineServe, run_engine
from .test_endings import Stream

pytestmark = pytest.mark.real_process

QUEUE_TIMEOUT_S: Final = 1.0
LONG_PROMPT: Final = "one two three four five six seven eight nine ten " * 6
NEW_METRICS: Final = (
    "num_swapped_reqs",
    "num_grammar_reqs",
    "host_used_tokens",
    "host_total_tokens",
    "pinned_tokens",
    "evicted_tokens_total",
    "preempted_reqs_total",
    "swapped_out_tokens_total",
    "swapped_in_tokens_total",
    "timed_out_reqs_total",
    "stalled",
)


@pytest.fixture
def http(serve: EngineServe) -> Iterator[httpx.Client]:
    """The shared server, with nothing in its cache."""
    with httpx.Client(base_url=serve.url, timeout=DEADLINE_S) as http:
        serve.idle_metrics()
        assert http.post("/flush_cache").json()["kept_tokens"] == 0
        yield http


@pytest.fixture(scope="module")
def narrow(model: Path) -> Iterator[EngineServe]:
    """A server for one request at a time, the urgent ones first; a `Stream` of it outlasts what the tests wait for."""
    arguments = (
        *SLOW,
        *("--dtype", "float32", "--schedule-policy", "priority", "--max-running-requests", "1"),
        *("--queue-timeout", str(QUEUE_TIMEOUT_S)),
    )
    with EngineServe(str(model), *arguments) as engine:
        yield engine.wait_until_ready()
        assert engine.stop() == 0, engine.log
        assert engine.leftovers() == []
        assert "Traceback" not in engine.log


def complete(http: httpx.Client, **fields: Any) -> dict[str, Any]:
    """The body of a completion of 12 tokens, greedy where `fields` do not say otherwise."""
    body = {"max_tokens": 12, "temperature": 0, "ignore_eos": True} | fields
    response = http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def texts(answer: Mapping[str, Any]) -> list[str]:
    return [choice["text"] for choice in answer["choices"]]


def cached_tokens(answer: Mapping[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def num_tokens(http: httpx.Client, prompt: str) -> int:
    return int(http.post("/tokenize", json={"prompt": prompt}).json()["count"])


# ---------------------------------------------------------------- several answers


def test_siblings_share_the_prompt_and_nothing_else(http, serve):
    """Three answers compute the prompt once, and each is what its seed gives alone."""
    before = serve.idle_metrics()
    sampled = {"prompt": LONG_PROMPT, "temperature": 1.0}
    together = complete(http, **sampled, n=3, seed=5)
    after = serve.idle_metrics()

    length = num_tokens(http, LONG_PROMPT)
    assert length % PAGE_SIZE, "the last page is to be a partial one, which siblings must copy"
    assert together["usage"]["prompt_tokens"] == length
    assert together["usage"]["completion_tokens"] == 36
    assert after["prompt_tokens_total"] - before["prompt_tokens_total"] == 3 * length
    from_siblings = after["cached_tokens_total"] - before["cached_tokens_total"]
    assert from_siblings >= 2 * (length // PAGE_SIZE * PAGE_SIZE)

    alone = [texts(complete(http, **sampled, seed=5 + i))[0] for i in range(3)]
    assert texts(together) == alone
    assert len(set(alone)) == 3


def test_best_of_returns_the_likeliest_of_its_siblings(http):
    sampled = {"prompt": LONG_PROMPT, "temperature": 1.0, "logprobs": 0, "seed": 5}
    all_four = complete(http, **sampled, n=4)
    best = complete(http, **sampled, n=2, best_of=4)

    def likelihood(choice: dict[str, Any]) -> float:
        values = choice["logprobs"]["token_logprobs"]
        return float(sum(values) / len(values))

    by_likelihood = sorted(all_four["choices"], key=likelihood, reverse=True)
    assert texts(best) == [choice["text"] for choice in by_likelihood[:2]]
    assert [choice["index"] for choice in best["choices"]] == [0, 1]
    assert best["usage"]["completion_tokens"] == 48, "what was generated is accounted for, returned or not"


def test_of_a_stream_of_siblings_each_comes_to_its_end(http):
    body = {"prompt": LONG_PROMPT, "n": 3, "seed": 5, "stream": True, "max_tokens": 12, "temperature": 1.0}
    streamed = {0: "", 1: "", 2: ""}
    reasons = {}
    for choice in (choice for event in events(http, body) for choice in event["choices"]):
        streamed[choice["index"]] += choice["text"]
        reasons[choice["index"]] = choice["finish_reason"]
    assert list(streamed.values()) == texts(
        complete(http, prompt=LONG_PROMPT, n=3, seed=5, temperature=1.0, ignore_eos=False)
    )
    assert set(reasons) == {0, 1, 2}
    assert set(reasons.values()) <= {"length", "stop"}


def events(http: httpx.Client, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    with http.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                yield json.loads(line.removeprefix("data: "))


# ---------------------------------------------------------------- priorities


def test_an_urgent_request_takes_the_place_of_a_running_one(narrow, http):
    """Its answer comes while the other one runs, which then goes on as if nothing had been."""
    fields = {"prompt": "for ever", "max_tokens": 400, "min_tokens": 400, "temperature": 0}
    preempted = narrow.idle_metrics()["preempted_reqs_total"]
    with (
        httpx.Client(base_url=narrow.url, timeout=DEADLINE_S) as crowded,
        Stream(narrow, **fields, priority="low") as low,
    ):
        high = complete(crowded, prompt="quick", priority="high")
        # Not over yet: the place it lost it has again, or still waits for it.
        metrics = narrow.metrics_when(lambda now: now["preempted_reqs_total"] > preempted)
        assert metrics["num_running_reqs"] + metrics["num_queue_reqs"] == 1
        *rest, done = low.rest()
    assert done == "data: [DONE]"
    low_texts = [json.loads(line.removeprefix("data: "))["choices"] for line in rest]
    assert narrow.idle_metrics()["preempted_reqs_total"] == preempted + 1

    assert texts(high) == texts(complete(http, prompt="quick"))
    alone = texts(complete(http, **fields))[0]
    streamed = "".join(choice["text"] for choices in low_texts for choice in choices)
    assert alone.endswith(streamed)  # `Stream` has read the first event itself
    assert len(streamed) > len(alone) // 2


def test_a_request_as_urgent_as_the_running_one_waits(narrow):
    preempted = narrow.idle_metrics()["preempted_reqs_total"]
    with (
        httpx.Client(base_url=narrow.url, timeout=DEADLINE_S) as http,
        Stream(narrow, priority=5),
    ):
        response = http.post("/v1/completions", json={"prompt": "x", "priority": 15, "queue_timeout": 0.05})
        assert response.status_code == 503, response.text
    assert narrow.idle_metrics()["preempted_reqs_total"] == preempted


# ---------------------------------------------------------------- time limits


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("own_limit_s", [None, 0.05], ids=["limit of the server", "limit of its own"])
def test_a_request_that_waits_too_long_is_a_503(narrow, own_limit_s, stream):
    """Also a stream: it begins with its first token, and it has none."""
    before = narrow.idle_metrics()["timed_out_reqs_total"]
    body = {"prompt": "x", "stream": stream, "queue_timeout": own_limit_s}
    with Stream(narrow):
        response = httpx.post(f"{narrow.url}/v1/completions", json=body, timeout=DEADLINE_S)
    assert response.status_code == 503
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    limit_s = QUEUE_TIMEOUT_S if own_limit_s is None else own_limit_s
    assert f"the limit is {limit_s:g} s" in error["message"]
    assert "queue_timeout" in error["message"]
    assert narrow.idle_metrics()["timed_out_reqs_total"] == before + 1


def test_a_request_that_takes_too_long_is_a_504(narrow):
    client = openai.OpenAI(base_url=f"{narrow.url}/v1", api_key="unused", max_retries=0, timeout=DEADLINE_S)
    with client, pytest.raises(openai.InternalServerError) as caught:
        client.completions.create(
            model="small-llama",
            prompt="x",
            max_tokens=2000,
            extra_body={"timeout": 0.1, "min_tokens": 2000},
        )
    assert caught.value.status_code == 504
    assert "the limit is 0.1 s" in caught.value.message
    narrow.idle_metrics()


@pytest.mark.slow
def test_a_stream_that_takes_too_long_ends_with_an_error_event(narrow):
    with Stream(
        narrow, timeout=5
    ) as stream:  # 40 s long, and long enough for its first token on a busy machine
        *_, kind, data = stream.rest()
    assert kind == "event: error"
    error = json.loads(data.removeprefix("data: "))["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert "the limit is 5 s" in error["message"]
    narrow.idle_metrics()


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize(
    ("name", "value"), [("timeout", 0), ("queue_timeout", -1), ("timeout", "soon"), ("priority", "urgent")]
)
def test_a_wish_that_makes_no_sense_is_a_400_that_names_it(http, name, value):
    response = http.post("/v1/completions", json={"prompt": "x", name: value})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == name


# ---------------------------------------------------------------- the prefix cache


def test_a_pinned_prefix_is_found_again_and_can_be_let_go(http, serve):
    pages = num_tokens(http, LONG_PROMPT) // PAGE_SIZE * PAGE_SIZE
    complete(http, prompt=LONG_PROMPT)
    pinned = http.post("/v1/cache/pins", json={"prompt": LONG_PROMPT, "ttl": 600}).json()
    assert pinned["pinned_tokens"] == pages
    assert serve.idle_metrics()["pinned_tokens"] == pages

    released = http.post("/v1/cache/pins", json={"prompt": LONG_PROMPT, "ttl": 0}).json()
    assert released["pinned_tokens"] == 0
    assert serve.idle_metrics()["pinned_tokens"] == 0


def test_what_is_not_cached_is_not_pinned_and_said(http, serve):
    answer = http.post("/v1/cache/pins", json={"prompt": "never seen " * 20, "ttl": 60}).json()
    assert answer["pinned_tokens"] == 0
    assert answer["asked_tokens"] > 0
    assert answer["reason"]
    assert serve.idle_metrics()["pinned_tokens"] == 0


def test_salts_divide_the_cache(http):
    """A prompt is found under its own salt alone, and its text is the same under all."""
    answers = [complete(http, prompt=LONG_PROMPT, cache_salt=salt) for salt in ("a", "b", "a")]
    plain = [complete(http, prompt=LONG_PROMPT) for _ in range(2)]
    assert [cached_tokens(answer) > 0 for answer in (*answers, *plain)] == [False, False, True, False, True]
    assert len({text for answer in (*answers, *plain) for text in texts(answer)}) == 1


# ---------------------------------------------------------------- the server


def test_metrics_and_health_of_the_scheduler(http, serve):
    metrics = serve.idle_metrics()
    assert [name for name in NEW_METRICS if name not in metrics] == []
    assert metrics["stalled"] == metrics["num_swapped_reqs"] == metrics["host_used_tokens"] == 0
    assert metrics['schedule_policy_info{policy="fcfs"}'] == 1
    for name in NEW_METRICS:
        assert f"# TYPE engine:{name} {'counter' if name.endswith('_total') else 'gauge'}\n" in metrics.page
    assert http.get("/health").status_code == 200


def test_what_waits_is_counted_by_reason(narrow):
    async def wait(http: httpx.AsyncClient) -> None:
        """Again if the server's limit came first, as it may on a busy machine."""
        while (await http.post("/v1/completions", json={"prompt": "x"})).status_code == 503:
            pass

    async def waiting() -> None:
        async with httpx.AsyncClient(base_url=narrow.url, timeout=DEADLINE_S) as http:
            waits = asyncio.create_task(wait(http))
            metrics = await asyncio.to_thread(narrow.metrics_when, lambda now: now["num_queue_reqs"] == 1)
            by_reason = [
                value for name, value in metrics.items() if name.startswith("num_queue_reqs_by_reason")
            ]
            assert by_reason == [1]
            assert (await http.get("/health")).status_code == 200
            stream.__exit__()
            await waits

    with Stream(narrow) as stream:
        asyncio.run(waiting())
    narrow.idle_metrics()


@pytest.mark.slow  # without servers: tests/scheduler/policy/test_in_scheduler.py
@pytest.mark.parametrize("policy", get_args(SchedulePolicyName))
def test_every_policy_answers_everybody_the_same(policy, start_serve, model, client):
    """More requests than run at once, of two tenants and several priorities: whoever goes first, each gets its text."""
    arguments = ("--schedule-policy", policy, "--max-running-requests", "3", "--static-batch-wait", "0.05")
    engine = start_serve(str(model), "--dtype", "float32", *arguments).wait_until_ready()
    bodies = [
        {
            "prompt": f"{LONG_PROMPT if number % 2 else ''}policy {number}",
            "max_tokens": 6 + 4 * number,
            "temperature": 0,
            "user": f"tenant {number % 2}",
            "priority": (number % 3 - 1) * 20,
            "min_tokens": 6 + 4 * number,
        }
        for number in range(6)
    ]

    async def all_at_once() -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=engine.url, timeout=DEADLINE_S) as http:
            return list(await asyncio.gather(*(http.post("/v1/completions", json=body) for body in bodies)))

    answers = asyncio.run(all_at_once())
    assert [answer.status_code for answer in answers] == [200] * 6
    metrics = engine.idle_metrics()
    shown = [name for name in metrics if name.startswith("schedule_policy_info")]
    assert len(shown) == 1
    assert policy in shown[0] or policy == "adaptive"
    expected = [httpx.post(f"{client.base_url}completions", json=body, timeout=DEADLINE_S) for body in bodies]
    assert [texts(answer.json()) for answer in answers] == [texts(answer.json()) for answer in expected]
    assert engine.stop() == 0, engine.log
    assert engine.leftovers() == []
    assert "Traceback" not in engine.log


# ---------------------------------------------------------------- settings


def test_a_preset_is_seen_in_the_configuration_and_gives_way(model, tmp_path):
    done = run_engine(tmp_path, "serve", str(model), "--preset", "rag", "--look-ahead", "3", "--print-config")
    assert (done.returncode, done.stderr) == (0, "")
    lines = {line.split(":")[0].split()[0]: line for line in done.stdout.splitlines() if line.split()}
    assert "lpm" in lines["schedule_policy"]
    assert "preset rag" in lines["schedule_policy"]
    assert "3" in lines["look_ahead"]
    assert "preset" not in lines["look_ahead"]


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--max-num-seqs", "4", "--max-running-requests", "5"), ("max-num-seqs", "max-running-requests")),
        (("--preset", "rga"), ("rga", "rag")),
        (("--schedule-policy", "lmp"), ("lmp", "lpm")),
        (("--chaos", "retract=2:5"), ("retract=2:5", "retract=0.5:500")),
        (("--queue-timeout", "0"), ("queue_timeout", "above 0")),
        (("--swap-space", "-1"), ("swap_space",)),
        (
            ("--max-num-partial-prefills", "1", "--max-long-partial-prefills", "2"),
            ("max_num_partial_prefills",),
        ),
    ],
    ids=" ".join,
)
def test_settings_that_cannot_be_are_one_line(arguments, words, model, tmp_path):
    done = run_engine(tmp_path, "serve", str(model), "--port", "0", *arguments)
    assert done.returncode == 2, done
    causes = [line for line in done.stderr.splitlines() if line.startswith("engine: ")]
    assert len(causes) == 1, done.stderr
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in causes[0]


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    ("name", "words"),
    [("letter", "exists and is no decision log"), ("", "directory")],
    ids=["file", "folder"],
)
def test_a_decision_log_that_cannot_be_written_is_one_line(start_serve, model, tmp_path, name, words):
    letter = tmp_path / "letter"
    letter.write_text("Dear engine")
    engine = start_serve(str(model), "--decision-log", str(tmp_path / name))
    assert engine.wait() == 2, engine.log
    (cause,) = engine.causes
    assert f"decision_log is '{tmp_path / name}'" in cause
    assert words in cause
    assert "Traceback" not in engine.log
    assert engine.leftovers() == []
    assert letter.read_text() == "Dear engine"
