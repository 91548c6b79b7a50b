"""The official `openai` client against a real server: what it parses, and what it does with errors."""

from __future__ import annotations

import math

import httpx
import openai
import pytest

from .model import MAX_MODEL_LEN, PAGE_SIZE

pytestmark = pytest.mark.real_process

MODEL = "small-llama"
PROMPT = "a request waits, runs, and is answered once; the quick brown fox"
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "one two three"}]
NO_EOS = {"ignore_eos": True}


def complete(client, prompt=PROMPT, **fields):
    fields = {"model": MODEL, "temperature": 0, "max_tokens": 24, "extra_body": NO_EOS} | fields
    return client.completions.create(prompt=prompt, **fields)


def chat(client, messages=CHAT, **fields):
    fields = {"model": MODEL, "temperature": 0, "max_tokens": 24, "extra_body": NO_EOS} | fields
    return client.chat.completions.create(messages=messages, **fields)


def test_models_are_listed_and_found_by_name(client):
    (model,) = client.models.list().data
    assert (model.id, model.object) == (MODEL, "model")
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError) as refused:
        client.models.retrieve("gpt-5")
    assert (refused.value.code, refused.value.param) == ("model_not_found", "model")


def test_a_chat_and_its_stream_say_the_same(client):
    whole = chat(client)
    chunks = list(chat(client, stream=True, stream_options={"include_usage": True}))

    (choice,) = whole.choices
    assert (choice.message.role, choice.message.refusal, choice.finish_reason) == (
        "assistant",
        None,
        "length",
    )
    assert (whole.object, whole.model, whole.usage.completion_tokens) == ("chat.completion", MODEL, 24)
    assert {(chunk.object, chunk.id, chunk.model) for chunk in chunks} == {
        ("chat.completion.chunk", chunks[0].id, MODEL)
    }
    assert chunks[0].choices[0].delta.role == "assistant"
    *texts, finish, usage = chunks
    assert "".join(chunk.choices[0].delta.content or "" for chunk in texts) == choice.message.content
    assert {chunk.choices[0].finish_reason for chunk in texts} == {None}
    assert (finish.choices[0].finish_reason, finish.choices[0].delta.content) == ("length", None)
    assert usage.choices == []
    assert usage.usage.total_tokens == whole.usage.total_tokens


def test_a_completion_and_its_stream_say_the_same(client):
    whole = complete(client)
    chunks = list(complete(client, stream=True, stream_options={"include_usage": True}))
    assert whole.object == chunks[0].object == "text_completion"
    assert "".join(c.text for chunk in chunks for c in chunk.choices) == whole.choices[0].text
    assert [c.finish_reason for chunk in chunks for c in chunk.choices if c.finish_reason] == ["length"]
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 24


def test_characters_of_several_tokens_come_whole(client):
    """Nearly every character of this noise is several tokens, or a broken one."""
    whole = complete(client, temperature=1, seed=1, max_tokens=200).choices[0].text
    chunks = complete(client, temperature=1, seed=1, max_tokens=200, stream=True)
    parts = [chunk.choices[0].text for chunk in chunks]
    assert "".join(parts) == whole
    assert any(not char.isascii() and char != "�" for char in whole), "the seed shows nothing; take another"


def test_seeds_reproduce_and_n_answers_differ(client):
    first = complete(client, temperature=1, seed=5, n=2)
    again = complete(client, temperature=1, seed=5, n=2)
    other = complete(client, temperature=1, seed=99)
    texts = [choice.text for choice in first.choices]
    assert [choice.index for choice in first.choices] == [0, 1]
    assert [choice.text for choice in again.choices] == texts
    assert len({*texts, other.choices[0].text}) == 3
    assert first.usage.completion_tokens == 48
    assert complete(client, temperature=1, seed=5).choices[0].text == texts[0]


def test_the_streams_of_n_answers_are_told_apart(client):
    whole = chat(client, temperature=1, seed=8, n=2)
    texts = {0: "", 1: ""}
    finishes = {}
    for chunk in chat(client, temperature=1, seed=8, n=2, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            if choice.finish_reason:
                finishes[choice.index] = choice.finish_reason
    assert [texts[0], texts[1]] == [choice.message.content for choice in whole.choices]
    assert finishes == {0: "length", 1: "length"}


def test_a_stop_string_over_several_tokens_is_cut_off_and_never_streamed(client):
    free = complete(client, max_tokens=64)
    text = free.choices[0].text
    middle = next(
        i for i in range(20, len(text)) if "�" not in text[i : i + 6] and text.find(text[i : i + 6]) == i
    )
    stop = text[middle : middle + 6]
    assert len(tokenize(client, stop)) > 1

    cut = complete(client, max_tokens=64, stop=["never in the text", stop])
    chunks = list(complete(client, max_tokens=64, stop=stop, stream=True))

    assert (cut.choices[0].text, cut.choices[0].finish_reason) == (text[:middle], "stop")
    assert cut.usage.completion_tokens < 64
    assert "".join(chunk.choices[0].text for chunk in chunks) == text[:middle]
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_the_beginning_of_a_stop_string_comes_when_the_length_ends_the_answer(client):
    text = complete(client, max_tokens=12).choices[0].text
    chunks = complete(client, max_tokens=12, stop=text[-1] + "and more", stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == text


def test_the_end_of_sequence_token_ends_an_answer(client):
    answer = complete(client, logit_bias={"2": 100}, extra_body=None)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("", "stop")


def test_logprobs_of_a_chat(client):
    answer = chat(client, logprobs=True, top_logprobs=3, max_tokens=8)
    entries = answer.choices[0].logprobs.content
    assert len(entries) == 8
    assert (
        b"".join(bytes(entry.bytes) for entry in entries).decode(errors="replace")
        == answer.choices[0].message.content
    )
    for entry in entries:
        assert [top.logprob for top in entry.top_logprobs] == sorted(
            (t.logprob for t in entry.top_logprobs), reverse=True
        )
        assert len(entry.top_logprobs) == 3
        assert (entry.top_logprobs[0].bytes, entry.top_logprobs[0].logprob) == (
            entry.bytes,
            entry.logprob,
        )  # greedy
        assert entry.logprob <= 0
    streamed = [
        entry.logprob
        for chunk in chat(client, logprobs=True, top_logprobs=3, max_tokens=8, stream=True)
        for choice in chunk.choices
        if choice.logprobs
        for entry in choice.logprobs.content
    ]
    assert streamed == [entry.logprob for entry in entries]


def test_echo_and_logprobs_of_a_completion(client):
    answer = complete(client, "lazy dog", echo=True, logprobs=2, max_tokens=4)
    (choice,) = answer.choices
    assert choice.text.startswith("lazy dog")
    logprobs = choice.logprobs
    num_prompt = answer.usage.prompt_tokens
    assert logprobs.token_logprobs[0] is None
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.text_offset) == num_prompt + 4
    assert "".join(logprobs.tokens[:num_prompt]) == "lazy dog"
    assert all(value <= 0 for value in logprobs.token_logprobs[1:])


def test_prompts_as_token_ids_and_as_lists(client):
    ids = tokenize(client, PROMPT)
    as_text = complete(client).choices[0].text
    assert complete(client, ids).choices[0].text == as_text
    batch = complete(client, [PROMPT, "lazy dog", PROMPT], n=2)
    assert [choice.index for choice in batch.choices] == [0, 1, 2, 3, 4, 5]
    assert [batch.choices[i].text for i in (0, 1, 4, 5)] == [as_text] * 4
    assert batch.choices[2].text == complete(client, "lazy dog").choices[0].text
    assert complete(client, [ids, ids[:9]]).choices[0].text == as_text


def test_usage_tells_what_the_cache_had(client):
    prompt = "Größe 東京: a prompt that nobody else in these tests sends, longer than some pages of the cache"
    num_tokens = len(tokenize(client, prompt))
    first, second = complete(client, prompt).usage, complete(client, prompt).usage
    assert (first.prompt_tokens, second.prompt_tokens) == (num_tokens, num_tokens)
    assert first.prompt_tokens_details.cached_tokens == 0
    assert second.prompt_tokens_details.cached_tokens == (num_tokens - 1) // PAGE_SIZE * PAGE_SIZE > 0
    assert second.total_tokens == num_tokens + 24


def test_a_cache_salt_keeps_the_cache_apart(client):
    prompt = "naïve façade: a prompt that is cached under one salt, and must not be found under another one"
    salted = [
        complete(
            client, prompt, extra_body=NO_EOS | {"cache_salt": salt}
        ).usage.prompt_tokens_details.cached_tokens
        for salt in ("mine", "yours", "mine")
    ]
    assert salted[:2] == [0, 0]
    assert salted[2] > 0


def test_errors_are_those_of_the_client_library(client):
    with pytest.raises(openai.BadRequestError) as refused:
        complete(client, max_tokens=MAX_MODEL_LEN + 1)
    assert (refused.value.param, refused.value.code) == ("max_tokens", "context_length_exceeded")
    with pytest.raises(openai.NotFoundError) as not_found:
        complete(client, model="gpt-5")
    assert not_found.value.param == "model"
    with pytest.raises(openai.BadRequestError) as refused:
        chat(client, tools=[{"type": "function", "function": {"name": "f g", "parameters": {}}}])
    assert refused.value.param == "tools[0].function.name"
    with pytest.raises(openai.BadRequestError) as refused:
        chat(client, response_format={"type": "grammar"})
    assert refused.value.param == "response_format.type"


def test_a_request_id_comes_back(client):
    answer = client.completions.with_raw_response.create(
        model=MODEL, prompt="x", max_tokens=1, extra_headers={"X-Request-Id": "mine-1"}
    )
    assert answer.headers["x-request-id"] == "mine-1"
    assert chat(client, max_tokens=1)._request_id


def tokenize(client, text: str) -> list[int]:
    response = httpx.post(
        str(client.base_url).replace("/v1/", "/tokenize"), json={"prompt": text}, timeout=30
    )
    tokens: list[int] = response.json()["tokens"]
    return tokens


def test_a_decision_has_the_probabilities_that_the_model_gives_its_labels(client):
    levels = [{"label": "low"}, {"label": "high"}, {"label": "higher"}]
    questions = [{"type": "score", "instructions": each, "levels": levels} for each in ("the fox", "one two")]

    decision = client.decisions.create(
        model=MODEL, input=PROMPT, questions=questions, extra_body={"return_prompt_token_ids": True}
    )

    for answer in decision.model_dump()["answers"]:
        ids = answer["prompt_token_ids"]
        masses = []
        for group in answer["label_token_ids"]:
            echoed = [
                complete(client, prompt=[*ids, each], max_tokens=1, echo=True, logprobs=0) for each in group
            ]
            told = [each.choices[0].logprobs.token_logprobs[len(ids)] for each in echoed]
            masses.append(sum(map(math.exp, told)))
        assert answer["label_mass"] == pytest.approx(sum(masses), rel=1e-4)
        shares = [each["probability"] for each in answer["probabilities"]]
        assert shares == pytest.approx([mass / sum(masses) for mass in masses], rel=1e-4)
