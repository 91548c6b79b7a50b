"""Images over HTTP with tiny models of Gemma 4: prompts and answers are those of transformers, whatever is cached."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import openai
import pytest

from tests.tiny_gemma4 import TinyGemma4, id_of
from tests.tokenizer_manager.media.image_files import picture

from .serving import EngineServe
from .test_gemma3_images import SETTINGS
from .test_images import LENGTH, ask, bytes_of, chat

pytestmark = [pytest.mark.real_process, pytest.mark.slow]


@pytest.fixture(scope="module", params=["as E2B", "as 31B"])
def tiny(request, tmp_path_factory) -> TinyGemma4:
    return TinyGemma4(tmp_path_factory.mktemp("gemma4"), request.param)


@pytest.fixture(scope="module")
def engine(tiny: TinyGemma4) -> Iterator[EngineServe]:
    with EngineServe(str(tiny.folder), *SETTINGS) as engine:
        yield engine.wait_until_ready()
        assert engine.stop() == 0, engine.log
        assert engine.leftovers() == []
        assert "Traceback" not in engine.log


@pytest.fixture
def client(engine: EngineServe) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{engine.url}/v1", api_key="-")


@pytest.mark.parametrize(
    "parts",
    [
        ["Hello!"],
        ["What is it?", picture(48, 31)],
        [picture(10, 10, seed=2), "or", picture(60, 20, seed=3), "?"],
        [picture(33, 33, seed=4), picture(7, 300, seed=5), picture(100, 99, seed=6)],
    ],
    ids=["none", "one", "two", "three, one after the other"],
)
def test_answers_are_those_of_transformers(tiny, engine, client, parts):
    own, theirs, images = chat(parts)

    answers = [ask(client, own) for _ in range(2)]

    inputs = tiny.prompt(theirs, images)
    tokens = httpx.post(f"{engine.url}/tokenize", json={"messages": own}).json()["tokens"]
    assert tokens == inputs["input_ids"][0].tolist()
    num_rows = tokens.count(id_of("<|image|>"))
    assert num_rows > 40 * len(images) or not images
    expected = [tiny.bytes_of(token_id) for token_id in tiny.answer(theirs, images, LENGTH)]
    assert [bytes_of(answer) for answer in answers] == [expected] * 2
    found = [getattr(answer.usage.prompt_tokens_details, "image_tokens", None) or 0 for answer in answers]
    assert found == [num_rows] * 2
    assert answers[1].usage.prompt_tokens_details.cached_tokens >= len(tokens) - 6


def test_texts_of_a_client_do_not_become_images_and_videos_are_refused(engine, client):
    for text in ("<|image|>", "<|image>", "a<image|>", "<|video|>"):
        messages = [{"role": "user", "content": text}]
        tokens = httpx.post(f"{engine.url}/tokenize", json={"messages": messages}).json()["tokens"]
        assert not {id_of(name) for name in ("<|image|>", "<|image>", "<image|>", "<|video|>")} & set(tokens)
    for kind in ("video_url", "input_audio"):
        part = {"type": kind, kind: {"url": "data:,", "data": "", "format": "wav"}}
        with pytest.raises(openai.BadRequestError, match=kind):
            ask(client, [{"role": "user", "content": [part]}])
