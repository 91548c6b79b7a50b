"""Images over HTTP with a tiny Gemma 3: the prompts and answers are those of transformers, whatever is cached."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import openai
import pytest

from tests.tiny_gemma3 import IMAGE_ID, ROWS, TinyGemma3
from tests.tokenizer_manager.media.image_files import picture

from .serving import EngineServe
from .test_images import LENGTH, ask, bytes_of, chat

pytestmark = [pytest.mark.real_process, pytest.mark.slow]
# A chunk is shorter than an image.
SETTINGS = (
    "--dtype",
    "float32",
    "--page-size",
    "4",
    "--max-total-tokens",
    "2048",
    "--chunked-prefill-size",
    "8",
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> TinyGemma3:
    return TinyGemma3(tmp_path_factory.mktemp("gemma3"))


@pytest.fixture(scope="module")
def engine(tiny: TinyGemma3) -> Iterator[EngineServe]:
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
        [picture(33, 33, seed=4), picture(7, 3, seed=5), picture(100, 99, seed=6)],
    ],
    ids=["none", "one", "two", "three, one after the other"],
)
def test_answers_are_those_of_transformers(tiny, engine, client, parts):
    own, theirs, images = chat(parts)

    answers = [ask(client, own) for _ in range(2)]

    inputs = tiny.prompt(theirs, images)
    tokens = httpx.post(f"{engine.url}/tokenize", json={"messages": own}).json()["tokens"]
    assert tokens == inputs["input_ids"][0].tolist()
    assert tokens.count(IMAGE_ID) == len(images) * ROWS
    expected = [tiny.bytes_of(token_id) for token_id in tiny.answer(theirs, images, LENGTH)]
    assert [bytes_of(answer) for answer in answers] == [expected] * 2
    found = [getattr(answer.usage.prompt_tokens_details, "image_tokens", None) or 0 for answer in answers]
    assert found == [len(images) * ROWS] * 2
    assert answers[1].usage.prompt_tokens_details.cached_tokens >= len(tokens) - 6


def test_a_question_after_an_image_finds_it_and_one_with_another_pixel_does_not(tiny, engine, client):
    image = picture(24, 24, seed=11)
    other = image.copy()
    other.putpixel((12, 12), (255, 0, 255))
    before = engine.idle_metrics()["encoder_tiles_total"]

    answers = [
        ask(client, chat([each, text])[0]) for each, text in ((image, "a"), (image, "b"), (other, "b"))
    ]

    assert engine.idle_metrics()["encoder_tiles_total"] - before == 2
    cached = [answer.usage.prompt_tokens_details.cached_tokens for answer in answers]
    start = len("<") + len("user\n") + 2  # the tokens before the image's own
    assert cached[1] >= start + ROWS and cached[2] <= start + 4, cached
    for answer, each, text in zip(answers, (image, image, other), ("a", "b", "b"), strict=True):
        _, theirs, images = chat([each, text])
        assert bytes_of(answer) == [tiny.bytes_of(one) for one in tiny.answer(theirs, images, LENGTH)]


def test_texts_of_a_client_do_not_become_images(engine, client):
    for text in ("<start_of_image>", "<image_soft_token>", "a<end_of_image>"):
        messages = [{"role": "user", "content": text}]
        tokens = httpx.post(f"{engine.url}/tokenize", json={"messages": messages}).json()["tokens"]
        assert not {IMAGE_ID, IMAGE_ID - 1, IMAGE_ID - 2} & set(tokens)
