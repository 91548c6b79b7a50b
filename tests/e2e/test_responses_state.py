"""Stored responses of a real server: 33 turns with tools by their ids, and answers in the background over `kill -9`."""

from __future__ import annotations

import json
import random
import time
from typing import Any

import httpx
import pytest

from .conftest import openai_client
from .model import make_model
from .serving import DEADLINE_S, EngineServe

TOOL: Any = {
    "type": "function",
    "name": "look_up",
    "description": "Look up a number.",
    "parameters": {
        "type": "object",
        "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}},
        "required": ["n"],
        "additionalProperties": False,
    },
    "strict": True,
}
NUM_TURNS = 33
NUM_KILLS = 4
ONE_MORE = 300
"""Bytes of more than a delta: a server that ends twice without one is taken to end by the response."""
FLAGS = ("--dtype", "float32", "--page-size", "4")


@pytest.mark.slow
def test_33_turns_by_id_are_cached_as_those_that_send_all(start_serve, tmp_path):
    model = make_model(tmp_path / "long", max_model_len=16_384)
    flags = (*FLAGS, "--json-whitespace", "compact", "--state-dir", str(tmp_path / "state"))
    engine = start_serve(str(model), *flags).wait_until_ready()
    told: dict[str, list[str]] = {}
    cached: dict[str, list[int]] = {}
    with openai_client(engine) as client:
        create: Any = client.responses.create
        for kind in ("by id", "all items"):
            items: list[Any] = [{"role": "user", "content": f"begin {kind}"}]
            previous, told[kind], cached[kind] = None, [], []
            for turn in range(NUM_TURNS):
                by_id = kind == "by id" and previous is not None
                answer = create(
                    model=engine.model,
                    input=items[-1:] if by_id else items,
                    tools=[TOOL],
                    tool_choice="required",
                    temperature=0,
                    max_output_tokens=64,
                    store=kind == "by id",
                    **({"previous_response_id": previous} if by_id else {}),
                )
                [call] = answer.output
                assert call.type == "function_call", answer
                previous = answer.id
                told[kind].append(call.arguments)
                assert answer.usage is not None
                cached[kind].append(answer.usage.input_tokens_details.cached_tokens)
                result = {"type": "function_call_output", "call_id": call.call_id, "output": f"{turn}"}
                items += [call.to_dict(), result]
            if kind == "by id":
                context = [
                    each.type for each in client.responses.input_items.list(str(previous), order="asc")
                ]
                assert context == ["message", *["function_call", "function_call_output"] * (NUM_TURNS - 1)]

    assert all(json.loads(each)["n"] in range(10) for each in told["by id"])
    assert cached["by id"][-1] >= 0.98 * cached["all items"][-1] > 0
    assert engine.stop() == 0, engine.log
    assert engine.leftovers() == []


@pytest.mark.slow
def test_a_response_in_the_background_survives_kill_9_at_random_times(start_serve, model, tmp_path):
    flags = (*FLAGS, "--chaos", "slow=0.02", "--state-dir", str(tmp_path / "state"))
    body = {"input": "begin", "background": True, "temperature": 0.9, "seed": 5, "max_output_tokens": 300}
    body |= {"ignore_eos": True}
    rng = random.Random(48)
    response_id, seen = "", b""
    for _ in range(NUM_KILLS):
        with EngineServe(str(model), *flags) as engine:  # its end kills all processes
            engine.wait_until_ready()
            with httpx.Client(base_url=engine.url, timeout=DEADLINE_S) as client:
                if not response_id:
                    response_id = client.post("/v1/responses", json=body).json()["id"]
                until_s = time.monotonic() + rng.uniform(0.0, 0.6)
                streamed = b""
                with client.stream("GET", f"/v1/responses/{response_id}?stream=true") as stream:
                    for part in stream.iter_raw():
                        streamed += part
                        if time.monotonic() > until_s and len(streamed) > len(seen) + ONE_MORE:
                            break
        whole = streamed[: streamed.rfind(b"\n\n") + 2]
        assert whole.startswith(seen) or seen.startswith(whole)
        seen = max(seen, whole, key=len)
    engine = start_serve(str(model), *flags).wait_until_ready()
    with httpx.Client(base_url=engine.url, timeout=DEADLINE_S) as client:
        streamed = client.get(f"/v1/responses/{response_id}?stream=true").content
        answer = client.get(f"/v1/responses/{response_id}").json()
        unbroken = client.post("/v1/responses", json=body | {"background": False}).json()
    assert streamed.startswith(seen) and len(seen) > 1000
    assert answer["status"] == unbroken["status"] == "incomplete"
    texts = [each["output"][0]["content"][0]["text"] for each in (answer, unbroken)]
    assert texts[0] == texts[1]
    assert answer["usage"]["output_tokens"] == 300
    assert engine.stop() == 0, engine.log
