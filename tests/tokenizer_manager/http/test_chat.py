from __future__ import annotations

import json
from typing import Any

import pytest

from engine.runtime.messages import Finish, FinishKind, GenerateRequest, TextOutput
from engine.runtime.sampling_params import SamplingParams
from engine.runtime.transport.message_base import Logprobs

from ..conftest import Serve
from ..fake_engine import LENGTH, MODEL, STOP, TOKENIZER, WAIT_S, floats, ids_of, row, say_all

PATH = "/v1/chat/completions"
HI = {"messages": [{"role": "user", "content": "hi"}]}
RENDERED = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def events(text: str) -> list[Any]:
    """The data of a stream's events; checks framing and the end."""
    blocks = text.split("\n\n")
    assert blocks[-2:] == ["data: [DONE]", ""]
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks[:-1])
    return [json.loads(block.removeprefix("data: ")) for block in blocks[:-2]]


def test_an_answer_in_one_piece(serve: Serve):
    served = serve(say_all("Hel", "lo", cached=16))
    reply = served.client.post(PATH, json=HI)
    body = reply.json()

    assert reply.status_code == 200
    assert reply.headers["content-type"] == "application/json"
    assert ids_of(served.engine.next_request()) == TOKENIZER.encode(RENDERED)
    assert body.pop("id").startswith("chatcmpl-")
    assert body.pop("created") > 1_700_000_000
    assert set(body.pop("timings")) >= {"cache_n", "prompt_n", "prompt_ms", "predicted_n", "predicted_ms"}
    assert body == {
        "object": "chat.completion",
        "model": MODEL,
        "system_fingerprint": "engine-0.0.0-float32",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": 21,
            "completion_tokens": 5,
            "total_tokens": 26,
            "prompt_tokens_details": {"cached_tokens": 16},
        },
    }


def test_usage_counts_right_and_wrong_drafts(serve: Serve):
    served = serve(lambda request: [row(request, "Hello", finish=STOP, drafts=(7, 4))])
    usage = served.client.post(PATH, json=HI | {"speculative": False, "n": 2}).json()["usage"]
    assert usage["completion_tokens_details"] == {
        "accepted_prediction_tokens": 8,
        "rejected_prediction_tokens": 6,
    }
    assert served.engine.next_request().sampling.speculative is False


def test_a_stream_is_role_deltas_finish_done(serve: Serve):
    served = serve(say_all("Hel", "", "lo"))
    reply = served.client.post(PATH, json=HI | {"stream": True})
    chunks = events(reply.text)

    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert reply.headers["cache-control"] == "no-cache"
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == len({chunk["created"] for chunk in chunks}) == 1
    assert [chunk["choices"] for chunk in chunks] == [
        [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}]
        for delta, finish in [
            ({"role": "assistant", "content": "", "refusal": None}, None),
            ({"content": "Hel"}, None),
            ({"content": "lo"}, None),
            ({}, "stop"),
        ]
    ]
    assert all("usage" not in chunk for chunk in chunks)
    assert ["timings" in chunk for chunk in chunks] == [False, False, False, True]


def test_text_in_the_last_row_comes_before_the_finish_chunk(serve: Serve):
    served = serve(say_all("Hello", finish=LENGTH))
    chunks = events(served.client.post(PATH, json=HI | {"stream": True}).text)

    assert [chunk["choices"][0]["delta"].get("content") for chunk in chunks] == ["", "Hello", None]
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


def test_the_usage_chunk_has_no_choices_and_all_others_have_null(serve: Serve):
    served = serve(say_all("a", "b"))
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = events(served.client.post(PATH, json=HI | options).text)

    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * 4
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 2
    assert "timings" in chunks[-1]


def test_usage_in_every_chunk_on_demand(serve: Serve):
    served = serve(say_all("a", "b"))
    options = {"stream": True, "stream_options": {"continuous_usage_stats": True}}
    chunks = events(served.client.post(PATH, json=HI | options).text)

    usages = [chunk["usage"] for chunk in chunks]
    assert [usage["completion_tokens"] for usage in usages] == [0, 1, 2, 2]  # the role chunk has no token
    assert all(
        usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"] for usage in usages
    )


def test_the_role_chunk_counts_the_tokens_of_other_answers(serve: Serve):
    served = serve()
    options = {"stream": True, "n": 2, "stream_options": {"continuous_usage_stats": True}}
    reply = served.post_later(PATH, json=HI | options)
    first, second = served.engine.next_request(), served.engine.next_request()
    served.engine.say(row(second, "xy"))
    served.engine.say(row(first, "abc"))
    served.engine.say(row(second, "", total=2, token_ids=[], finish=LENGTH))
    served.engine.say(row(first, "", total=3, token_ids=[], finish=LENGTH))
    chunks = events(reply.result(WAIT_S).text)

    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [0, 2, 2, 5, 5, 5]


@pytest.mark.parametrize("path", [PATH, "/v1/completions"])
@pytest.mark.parametrize(
    ("options", "in_chunks", "at_end"),
    [
        ({}, False, False),
        ({"include_usage": True}, None, True),
        ({"include_usage": False}, False, False),
        ({"continuous_usage_stats": True}, True, False),
        ({"include_usage": True, "continuous_usage_stats": True}, True, True),
        ({"include_usage": False, "continuous_usage_stats": True}, False, False),
        ({"include_usage": False, "continuous_usage_stats": None}, False, False),
    ],
)
def test_which_chunks_have_usage(
    serve: Serve, path: str, options: dict[str, Any], in_chunks: Any, at_end: bool
):
    body = HI if path == PATH else {"prompt": "hi"}
    reply = serve(say_all("a", "b")).client.post(
        path, json=body | {"stream": True, "stream_options": options}
    )
    chunks = events(reply.text)

    assert (chunks[-1]["choices"] == []) is at_end
    for chunk in chunks[:-1] if at_end else chunks:
        kind = False if "usage" not in chunk else None if chunk["usage"] is None else True
        assert kind is in_chunks


def test_n_answers_are_interleaved_by_index(serve: Serve):
    served = serve()
    body = HI | {"stream": True, "n": 2, "seed": 5}
    reply = served.post_later(PATH, json=body)
    first, second = served.engine.next_request(), served.engine.next_request()
    served.engine.say(row(second, "x"), row(first, "a"))
    served.engine.say(row(second, "y", total=2, finish=LENGTH))
    served.engine.say(row(first, "b", total=2, finish=LENGTH))
    chunks = events(reply.result(WAIT_S).text)

    seen = [(chunk["choices"][0]["index"], chunk["choices"][0]["delta"].get("content")) for chunk in chunks]
    assert seen == [(1, ""), (1, "x"), (0, ""), (0, "a"), (1, "y"), (1, None), (0, "b"), (0, None)]
    assert [first.sampling.seed, second.sampling.seed] == [5, 6]


def test_n_answers_in_one_piece_count_the_prompt_once(serve: Serve):
    served = serve(say_all("ab", cached=4))
    body = served.client.post(PATH, json=HI | {"n": 3}).json()

    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert body["usage"] == {
        "prompt_tokens": 21,
        "completion_tokens": 6,
        "total_tokens": 27,
        "prompt_tokens_details": {"cached_tokens": 4},
    }


def test_every_sampling_field_reaches_the_scheduler(serve: Serve):
    served = serve(say_all("x"))
    fields = {
        "max_completion_tokens": 12.0,
        "min_tokens": 2,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.05,
        "seed": 3,
        "stop": ["a", "b"],
        "stop_token_ids": [5],
        "ignore_eos": True,
        "frequency_penalty": 0.25,
        "presence_penalty": -0.5,
        "repetition_penalty": 1.5,
        "logit_bias": {"7": 2},
        "skip_special_tokens": False,
        "include_stop_str_in_output": True,
        "logprobs": True,
        "top_logprobs": 3,
        "priority": 4,
        "cache_salt": "s",
        "user": "u",
        "n": 1,
    }
    served.client.post(PATH, json=HI | fields)
    request = served.engine.next_request()

    assert request.sampling == SamplingParams(
        max_new_tokens=12,
        min_new_tokens=2,
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        min_p=0.05,
        seed=3,
        stop=("a", "b"),
        stop_token_ids=(5,),
        ignore_eos=True,
        frequency_penalty=0.25,
        presence_penalty=-0.5,
        repetition_penalty=1.5,
        logit_bias={7: 2.0},
        skip_special_tokens=False,
        include_stop_str_in_output=True,
        logprobs=3,
    )
    assert (request.priority, request.extra_key, request.tenant) == (4, "s", "u")


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_can_compute_its_prompt_only(serve: Serve, stream: bool):
    served = serve(say_all("never seen"))
    options = {"prewarm": True, "mode": "explicit"}
    body = HI | {"prompt_cache_options": options, "logprobs": True, "n": 2, "min_tokens": 5}
    text = served.client.post(PATH, json=body | {"stream": stream}).text
    request = served.engine.next_request()

    assert (request.keep_s, request.sampling.max_new_tokens, request.group) == (0.0, 1, "")
    assert "never" not in text and '"finish_reason":"length"' in text
    assert stream or '"completion_tokens":0' in text


def test_nulls_mean_absent(serve: Serve):
    served = serve(say_all("x"))
    fields = [
        "max_tokens",
        "temperature",
        "top_p",
        "seed",
        "stop",
        "n",
        "logprobs",
        "stream",
        "stream_options",
        "tools",
    ]
    reply = served.client.post(PATH, json=HI | dict.fromkeys(fields))

    assert reply.status_code == 200
    assert served.engine.next_request().sampling == SamplingParams(max_new_tokens=235, seed=7)
    assert "warnings" not in reply.json()


def test_logprobs_name_the_bytes_of_each_token(serve: Serve):
    first, second = TOKENIZER.encode("é")  # one character, two tokens
    logprobs = Logprobs(
        floats(-0.5, float("-inf")),
        memoryview(b"").tobytes() + b"".join(i.to_bytes(4, "little") for i in (first, 64, second, 65)),
        floats(-0.5, -1.5, -0.25, float("nan")),
        2,
    )

    def script(request):
        yield row(request, "é", token_ids=[first, second], logprobs=logprobs, finish=LENGTH)

    served = serve(script)
    fields = {"logprobs": True, "top_logprobs": 2}
    whole = served.client.post(PATH, json=HI | fields).json()["choices"][0]["logprobs"]
    chunks = events(served.client.post(PATH, json=HI | fields | {"stream": True}).text)

    assert whole == {
        "content": [
            {
                "token": "\ufffd",
                "logprob": -0.5,
                "bytes": [0xC3],
                "top_logprobs": [
                    {"token": "\ufffd", "logprob": -0.5, "bytes": [0xC3]},
                    {"token": "a", "logprob": -1.5, "bytes": [97]},
                ],
            },
            {
                "token": "\ufffd",
                "logprob": -9999.0,
                "bytes": [0xA9],
                "top_logprobs": [
                    {"token": "\ufffd", "logprob": -0.25, "bytes": [0xA9]},
                    {"token": "b", "logprob": -9999.0, "bytes": [98]},
                ],
            },
        ],
        "refusal": None,
    }
    assert [chunk["choices"][0]["logprobs"] for chunk in chunks] == [None, whole, None]


def test_text_parts_are_joined_and_developers_are_the_system(serve: Serve):
    served = serve(say_all("x"))
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "developer", "content": "be"}, {"role": "user", "content": parts}]
    served.client.post(PATH, json={"messages": messages, "add_generation_prompt": False})

    text = TOKENIZER.decode(ids_of(served.engine.next_request()), skip_special_tokens=False)
    assert text == "<|im_start|>system\nbe<|im_end|>\n<|im_start|>user\na\nb<|im_end|>\n"


def test_unknown_fields_are_warned_of_in_both_forms(serve: Serve):
    served = serve(say_all("x"))
    messages = [{"role": "user", "content": "hi", "mood": "good"}]
    body = {"messages": messages, "temprature": 1}
    warnings = ["unknown field temprature was ignored", "unknown field messages[0].mood was ignored"]
    chunks = events(served.client.post(PATH, json=body | {"stream": True}).text)

    assert served.client.post(PATH, json=body).json()["warnings"] == warnings
    assert chunks[0]["warnings"] == warnings
    assert all("warnings" not in chunk for chunk in chunks[1:])


@pytest.mark.parametrize(
    ("given", "echoed"), [("abc-1", True), ("x" * 129, False), ("a b", False), ("", False)]
)
def test_a_request_id_is_echoed_if_it_is_usable(serve: Serve, given: str, echoed: bool):
    served = serve(say_all("x"))
    for body in (HI, HI | {"stream": True}, {}):
        reply = served.client.post(PATH, json=body, headers={"X-Request-Id": given})
        assert (reply.headers["x-request-id"] == given) is echoed
        assert reply.headers["x-request-id"]


def test_unknown_fields_inside_are_warned_of_with_their_path(serve: Serve):
    served = serve(say_all("x"))
    part = {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}, "size": 1}
    body = {
        "messages": [{"role": "user", "content": [part]}],
        "stream": True,
        "stream_options": {"include_usge": True},
    }
    chunks = events(served.client.post(PATH, json=body).text)

    assert chunks[0]["warnings"] == [
        "unknown field stream_options.include_usge was ignored",
        "unknown field messages[0].content[0].size was ignored",
    ]


def test_wishes_and_the_group_of_siblings_reach_the_scheduler(serve: Serve):
    served = serve(say_all("x"))
    wishes = {"priority": "high", "cache_salt": "s", "user": "u", "queue_timeout": 2, "timeout": 3.5, "n": 2}
    messages = [{"role": "user", "content": "hi"}]
    assert served.client.post(PATH, json={"messages": messages} | wishes).status_code == 200
    first, second = served.engine.next_request(), served.engine.next_request()

    for request in (first, second):
        assert (request.priority, request.extra_key, request.tenant) == (20, "s", "u")
        assert (request.queue_timeout_s, request.timeout_s) == (2.0, 3.5)
    assert first.group == second.group != ""


def progress_rows(request: GenerateRequest) -> list[TextOutput]:
    """Chunks of a prompt of which one is computed twice, then two rows of text."""
    processed = [row(request, "", cached=4, processed=each) for each in (8, 16, 8, 16, 20)]
    return [*processed, row(request, "a", cached=4), row(request, "b", cached=4, total=2, finish=STOP)]


@pytest.mark.parametrize("path", [PATH, "/v1/completions"])
def test_a_stream_says_how_much_of_the_prompt_is_read(serve: Serve, path: str):
    served = serve(progress_rows)
    body = HI if path == PATH else {"prompt": "x" * 21}
    options = {"stream": True, "return_progress": True, "stream_options": {"continuous_usage_stats": True}}
    chunks = events(served.client.post(path, json=body | options).text)
    assert served.engine.next_request().reports_progress

    told = [chunk for chunk in chunks if "prompt_progress" in chunk]
    figures = [chunk["prompt_progress"] for chunk in told]
    assert [each["processed"] for each in figures] == [8, 16, 20, 21]
    assert {(each["total"], each["cache"]) for each in figures} == {(21, 4)}
    times = [each["time_ms"] for each in figures]
    assert times == sorted(times)
    assert {chunk["usage"]["completion_tokens"] for chunk in told} == {0}
    assert [chunk["choices"][0].get("delta", {}) for chunk in told] == [{}] * 4
    texts = [
        choice.get("text") or choice.get("delta", {}).get("content")
        for chunk in chunks
        for choice in chunk["choices"]
    ]
    assert "".join(filter(None, texts)) == "ab"
    assert figures[-1]["time_ms"] <= chunks[-1]["timings"]["prompt_ms"] + 1e-3


@pytest.mark.parametrize(
    "options", [{"return_progress": True}, {"stream": True}, {"stream": True, "return_progress": False}]
)
def test_an_answer_says_nothing_about_its_prompt_unless_it_is_asked_and_streams(
    serve: Serve, options: dict[str, Any]
):
    served = serve(say_all("a", "b"))
    reply = served.client.post(PATH, json=HI | options)
    assert not served.engine.next_request().reports_progress
    assert "prompt_progress" not in reply.text and "warnings" not in reply.text


def test_a_prompt_that_is_not_read_to_its_end_is_not_said_to_be(serve: Serve):
    def script(request: GenerateRequest) -> list[TextOutput]:
        abort = Finish(FinishKind.ABORT, message="aborted")
        return [row(request, "", processed=8), row(request, "", total=0, finish=abort)]

    served = serve(script)
    reply = served.client.post(PATH, json=HI | {"stream": True, "return_progress": True})
    assert '"processed":8' in reply.text
    assert '"processed":21' not in reply.text


def test_each_answer_of_several_says_how_much_of_its_prompt_is_read(serve: Serve):
    served = serve(progress_rows)
    reply = served.client.post(PATH, json=HI | {"stream": True, "return_progress": True, "n": 2})
    told = [
        (chunk["choices"][0]["index"], chunk["prompt_progress"]["processed"])
        for chunk in events(reply.text)
        if "prompt_progress" in chunk
    ]
    for index in range(2):
        assert [processed for number, processed in told if number == index] == [8, 16, 20, 21]
