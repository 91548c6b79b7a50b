"""`/v1/chat/completions/render` and `/v1/completions/render`: what would be scheduled, and the same errors."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine.runtime.messages import GenerateRequest
from tests.tokenizer_manager.conftest import Serve
from tests.tokenizer_manager.fake_engine import MODEL, TOKENIZER, WAIT_S, ids_of, say_all
from tests.tokenizer_manager.http.serving import ROOMY

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HI: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]
OPTIONS: dict[str, Any] = {
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 5,
    "seed": 3,
    "stop": "x",
    "stop_token_ids": [9],
    "logit_bias": {"5": 1.5},
    "min_tokens": 2,
    "max_tokens": 30,
    "include_stop_str_in_output": True,
    "response_format": FORMAT,
    "priority": "high",
    "cache_salt": "salt",
}


def facts(request: GenerateRequest) -> tuple[Any, ...]:
    """What decides the answer, and where it may be cached."""
    return (
        ids_of(request),
        request.sampling,
        request.grammar,
        request.extra_key,
        request.priority,
    )


@pytest.mark.parametrize("options", [{}, OPTIONS, {"n": 2, "seed": 0}])
@pytest.mark.parametrize(("path", "prompt"), [(CHAT, {"messages": HI}), (COMPLETIONS, {"prompt": "hello"})])
def test_generate_takes_what_was_rendered(serve: Serve, path, prompt, options):
    served = serve(say_all("x"))
    rendered = served.client.post(f"{path}/render", json=prompt | options).json()
    assert served.engine.generate.empty(), "nothing is scheduled"
    if path == COMPLETIONS:
        (rendered,) = rendered

    assert served.client.post(path, json=prompt | options).status_code == 200
    wanted = [facts(served.engine.next_request()) for _ in range(options.get("n", 1))]
    kept = ("sampling_params", "priority", "cache_salt")
    body = {"input_ids": rendered["token_ids"]} | {name: rendered[name] for name in kept if name in rendered}
    assert served.client.post("/generate", json=body).status_code == 200

    assert [facts(served.engine.next_request()) for _ in wanted] == wanted
    assert rendered["prompt"] == TOKENIZER.decode(rendered["token_ids"], skip_special_tokens=False)
    assert (rendered["model"], rendered["stream"], "warnings" in rendered) == (MODEL, False, False)


def test_completions_are_a_list_of_prompts_of_any_form(serve: Serve):
    client = serve().client

    texts = client.post(
        f"{COMPLETIONS}/render", json={"prompt": ["a", "bc"], "logprobs": 2, "color": 1}
    ).json()
    ids = client.post(f"{COMPLETIONS}/render", json={"prompt": [[1, 2], [3]], "stream": True}).json()

    assert [each["token_ids"] for each in texts] == [TOKENIZER.encode("a"), TOKENIZER.encode("bc")]
    assert [each["prompt"] for each in texts] == ["a", "bc"]
    assert [(each["return_logprob"], each["top_logprobs_num"]) for each in texts] == [(True, 2)] * 2
    assert texts[0]["warnings"] == ["unknown field color was ignored"]
    assert [each["token_ids"] for each in ids] == [[1, 2], [3]]
    assert all(each["stream"] and "prompt" not in each for each in ids)


def test_a_grammar_of_tools_has_no_field_in_generate(serve: Serve):
    body = {"messages": HI, "tools": TOOLS, "tool_choice": "required"}
    rendered = serve(capacity=ROOMY).client.post(f"{CHAT}/render", json=body).json()

    assert "sampling_params has no field" in rendered["warnings"][0]
    assert not rendered["sampling_params"].keys() & {"json_schema", "response_format"}


@pytest.mark.parametrize(
    "fields",
    [
        {"model": "gpt-x"},
        {"messages": [{"role": "user", "content": "x" * 400}], "prompt": "x" * 400},
        {"messages": [{"role": "user", "content": "x" * 200}], "prompt": "x" * 200, "max_tokens": 200},
        {"messages": [], "prompt": ""},
        {"temperature": 3},
        {"n": 100},
        {"min_tokens": 500},
        {"logit_bias": {"999": 1}},
        {"stream_options": {"include_usage": True}},
        {"response_format": {"type": "xml"}},
        {"data_parallel_rank": 1},
        {"data_parallel_rank": -1},
        {"response_format": FORMAT, "max_tokens": 1},
    ],
)
def test_a_request_is_refused_as_by_the_endpoint_itself(serve: Serve, fields):
    served = serve(say_all("x"))
    for path in (CHAT, COMPLETIONS):
        body = {"messages": HI, "prompt": "hi"} | fields
        body.pop("prompt" if path == CHAT else "messages")
        refused, rendered = (
            served.client.post(path, json=body),
            served.client.post(f"{path}/render", json=body),
        )

        assert (rendered.status_code, rendered.json()) == (refused.status_code, refused.json())
        assert 400 <= rendered.status_code < 500, json.dumps(rendered.json())
    assert served.engine.generate.empty()


def test_a_full_queue_does_not_matter_and_a_dead_engine_does(serve: Serve):
    served = serve(max_queued_requests=1)
    waiting = [served.post_later(COMPLETIONS, json={"prompt": "hi", "n": 3}) for _ in range(3)]
    for _ in range(9):
        served.engine.next_request()
    assert served.client.post(COMPLETIONS, json={"prompt": "a"}).status_code == 429

    assert served.client.post(f"{COMPLETIONS}/render", json={"prompt": "a"}).status_code == 200

    served.engine.loop.call_soon_threadsafe(served.services.manager.engine_died, "over")  # type: ignore[union-attr]
    for path, body in ((CHAT, {"messages": HI}), (COMPLETIONS, {"prompt": "a"})):
        reply = served.client.post(f"{path}/render", json=body)
        assert (reply.status_code, "over" in reply.text) == (503, True)
    assert [one.result(WAIT_S).status_code for one in waiting] == [503] * 3
