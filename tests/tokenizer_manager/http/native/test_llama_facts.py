"""llama-server's routes that generate no text, and the bodies that its page sends."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine.runtime.messages import LiveRequest, RequestList
from engine.tokenizer_manager.http.native.llama_server import DEFAULTS
from tests.adapter_files import loaded, write_adapter

from ...conftest import Serve
from ...fake_engine import (
    CAPACITY,
    LENGTH,
    MODEL,
    SPEC,
    TEMPLATE,
    TOKENIZER,
    WAIT_S,
    make_tokenizer,
    row,
    say_all,
)
from ..pooling.test_embeddings import ANSWER, EMBEDDER

MESSAGES = [{"role": "user", "content": "hi"}]
PAGE: dict[str, Any] = {
    "messages": MESSAGES,
    "stream": True,
    "return_progress": True,
    "model": MODEL,
    "reasoning_format": "auto",
    "chat_template_kwargs": {"enable_thinking": True},
    "reasoning_control": True,
    "max_tokens": -1,
    "temperature": 0.8,
    "dynatemp_range": 0,
    "top_k": 40,
    "top_p": 0.95,
    "min_p": 0.05,
    "xtc_probability": 0,
    "typ_p": 1,
    "repeat_last_n": 64,
    "repeat_penalty": 1,
    "dry_multiplier": 0,
    "dry_base": 1.75,
    "samplers": ["top_k", "typ_p", "top_p", "min_p", "temperature"],
    "timings_per_token": True,
}
"""As llama-server's page sends a message."""
PAGE_PREPARES = {"messages": MESSAGES, "stream": False, "n_predict": 0}
"""As it sends a conversation that has ended, so that its next turn is cached."""


def test_props_say_what_the_page_and_clients_read(serve: Serve):
    body = serve(say_all("x")).client.get("/props").json()
    settings = body["default_generation_settings"]
    assert (settings["n_ctx"], settings["is_processing"]) == (CAPACITY.max_model_len, False)
    assert {name: settings["params"][name] for name in DEFAULTS.values()} == DEFAULTS.values()
    assert settings["params"]["n_predict"] == -1
    assert (body["total_slots"], body["model_alias"]) == (CAPACITY.max_running_requests, MODEL)
    assert (body["chat_template"], body["eos_token"]) == (TEMPLATE, "<|im_end|>")
    assert (body["modalities"], body["is_sleeping"]) == ({"vision": False, "audio": False}, False)


def test_slots_are_the_running_requests_in_numbers(serve: Serve):
    served = serve()
    reply = served.post_later("/v1/completions", json={"prompt": "secret", "user": "secret"})
    request = served.engine.next_request()
    waiting = LiveRequest("waits", "waiting", 9, 0, 5, 0, 1.25)
    prefill = LiveRequest("begins", "prefill", 7, 0, 4, 0, 1.0)
    running = LiveRequest(request.rid, "decode", 6, 1, 16, 2, 0.5)
    served.engine.live = RequestList([running, prefill, waiting], 3)

    shown = served.client.get(f"/slots?model={MODEL}")
    first, second = shown.json()
    assert first == {
        "id": 0,
        "id_task": -1,
        "n_ctx": CAPACITY.max_model_len,
        "speculative": False,
        "is_processing": True,
        "n_prompt_tokens": 6,
        "next_token": {"has_next_token": True, "n_remain": 15, "n_decoded": 1},
    }
    assert (second["id"], second["n_prompt_tokens"]) == (1, 7)
    assert "secret" not in shown.text and request.rid not in shown.text
    served.engine.say(row(request, "x", finish=LENGTH))
    assert reply.result(WAIT_S).status_code == 200


def test_fail_on_no_slot_says_that_all_rows_are_taken(serve: Serve):
    served = serve()
    busy = [LiveRequest(str(n), "decode", 6, 1, 16, 2, 0.5) for n in range(CAPACITY.max_running_requests)]
    served.engine.live = RequestList(busy[1:], len(busy))
    assert served.client.get("/slots?fail_on_no_slot=1").status_code == 200
    served.engine.live = RequestList(busy, len(busy))
    assert served.client.get("/slots?fail_on_no_slot=0").status_code == 200
    reply = served.client.get("/slots?fail_on_no_slot=1")
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "no_slot")
    assert served.client.get("/slots?fail_on_no_slot=yes").status_code == 400


def test_files_of_slots_are_not_there(serve: Serve):
    client = serve(say_all("x")).client
    for action in ("save", "restore", "erase"):
        reply = client.post(f"/slots/0?action={action}", json={"filename": "a.bin"})
        assert (reply.status_code, reply.json()["error"]["code"]) == (501, "not_implemented")


def test_adapters_are_numbered_and_apply_only_by_name(serve: Serve, tmp_path):
    names = ("sql", "chat")
    adapters = [
        loaded(write_adapter(tmp_path / name, SPEC), SPEC, number, name)
        for number, name in enumerate(names, start=1)
    ]
    served = serve(say_all("x"), adapters=adapters)
    assert served.client.get("/lora-adapters").json() == [
        {"id": number, "path": str(tmp_path / name), "scale": 0.0} for number, name in enumerate(names)
    ]


def test_a_template_is_applied_as_for_a_chat(serve: Serve):
    served = serve(say_all("x"))
    prompt = served.client.post("/apply-template", json={"messages": MESSAGES}).json()["prompt"]
    assert prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert served.client.post("/apply-template", json={"messages": []}).status_code == 400
    assert served.engine.generate.empty()
    served.client.post("/completion", json={"prompt": prompt})
    as_text = served.engine.next_request().input_ids
    served.client.post("/v1/chat/completions", json={"messages": MESSAGES})
    assert served.engine.next_request().input_ids == as_text


@pytest.mark.parametrize(("asked", "normalized"), [(None, True), (2, True), (-1, False)])
def test_vectors_come_in_lists(serve: Serve, asked, normalized):
    served = serve(ANSWER, pooling=EMBEDDER)
    body = served.client.post("/embedding", json={"content": ["a", "bc"], "embd_normalize": asked}).json()
    first, second = (TOKENIZER.encode(text)[0] for text in ("a", "b"))
    assert body == [
        {"index": 0, "embedding": [[1.0, first, 0.5, -1.0]]},
        {"index": 1, "embedding": [[2.0, second, 0.5, -1.0]]},
    ]
    pooling = served.engine.next_request().pooling
    assert pooling is not None and pooling.normalize == normalized


def test_another_norm_is_refused_and_so_is_a_model_without_vectors(serve: Serve):
    reply = serve(ANSWER, pooling=EMBEDDER).client.post(
        "/embedding", json={"content": "a", "embd_normalize": 1}
    )
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "embd_normalize")
    assert serve(say_all("x")).client.post("/embedding", json={"content": "a"}).status_code == 400


def test_a_text_is_tokenized_in_llama_server_s_form(serve: Serve):
    client = serve(say_all("x")).client
    ids = TOKENIZER.encode("hé")
    assert client.post("/tokenize", json={"content": "hé"}).json() == {"tokens": ids}
    pieces = client.post("/tokenize", json={"content": "hé", "with_pieces": True}).json()
    parts = ["h", [0xC3], [0xA9]]
    assert pieces == {"tokens": [{"id": i, "piece": part} for i, part in zip(ids, parts, strict=True)]}
    assert client.post("/tokenize", json={"content": ""}).json() == {"tokens": []}
    assert client.post("/tokenize", json={"prompt": "hé"}).json()["count"] == len(ids)
    both = client.post("/tokenize", json={"content": "a", "prompt": "a"})
    plain = client.post("/tokenize", json={"content": "a", "parse_special": False})
    assert (both.status_code, plain.status_code) == (400, 400)
    assert client.post("/detokenize", json={"tokens": ids}).json()["content"] == "hé"


def test_add_special_adds_what_the_model_begins_with(serve: Serve):
    client = serve(say_all("x"), tokenizer=make_tokenizer(adds_bos=True)).client
    [plain, special] = (
        client.post("/tokenize", json={"content": "a", "add_special": add}).json()["tokens"]
        for add in (False, True)
    )
    assert special == [256, *plain]


def test_the_page_s_chat_is_answered_with_the_progress_of_its_prompt(serve: Serve):
    served = serve(say_all("x"))
    lines = served.client.post("/v1/chat/completions", json=PAGE).text.splitlines()
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert chunks[0]["id"].startswith("chatcmpl-")
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == "x"
    [progress] = [chunk["prompt_progress"] for chunk in chunks if "prompt_progress" in chunk]
    assert progress["processed"] == progress["total"] > 0


def test_the_page_s_preparation_computes_the_prompt_only(serve: Serve):
    served = serve(say_all("x"))
    body = served.client.post("/v1/chat/completions", json=PAGE_PREPARES).json()
    assert body["choices"][0]["message"]["content"] in ("", None)
    assert served.engine.next_request().sampling.max_new_tokens == 1
    served.client.post("/v1/chat/completions", json=PAGE_PREPARES | {"n_predict": 3})
    assert served.engine.next_request().sampling.max_new_tokens == 3


def test_progress_comes_until_the_first_token_and_with_it(serve: Serve):
    def reads(request):
        yield row(request, "", total=0, processed=2, cached=1)
        yield row(request, "a", cached=1)
        yield row(request, "b", total=2, cached=1, finish=LENGTH)

    asked = {"prompt": [5, 6, 7], "stream": True}
    client = serve(reads).client
    with_progress, without = (
        [
            json.loads(line[6:])
            for line in client.post("/completion", json=asked | more).text.splitlines()
            if line
        ]
        for more in ({"return_progress": True}, {})
    )
    told = [part.get("prompt_progress") for part in with_progress]
    assert all(each is None or (each["total"], each["cache"]) == (3, 1) for each in told)
    processed = [each["processed"] for each in told if each is not None]
    assert processed[-1] == 3 and processed in ([2, 3], [3])  # rows that come at once are one part
    assert "".join(part["content"] for part in with_progress) == "ab"
    assert not any("prompt_progress" in part for part in without)
