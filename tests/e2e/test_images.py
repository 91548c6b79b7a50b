"""Images over HTTP, with a tiny SmolVLM: the answers are those of transformers, and each image is encoded once."""

from __future__ import annotations

import base64
import os
import re
import signal
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anthropic
import httpx
import ollama
import openai
import PIL.Image
import pytest

from tests.tiny_smolvlm import IMAGE_ID, ROWS_PER_TILE, TinySmolVLM
from tests.tokenizer_manager.media.image_files import file_of, picture

from .serving import EngineServe, run_engine

pytestmark = [pytest.mark.real_process, pytest.mark.slow]
LENGTH = 12
SETTINGS = (
    "--mm-detail",
    "high",
    "--dtype",
    "float32",
    "--page-size",
    "4",
    "--max-total-tokens",
    "2048",
    "--chunked-prefill-size",
    "32",
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> TinySmolVLM:
    return TinySmolVLM(tmp_path_factory.mktemp("smolvlm"))


@pytest.fixture(scope="module")
def engine(tiny: TinySmolVLM) -> Iterator[EngineServe]:
    with EngineServe(str(tiny.folder), *SETTINGS, "--allowed-local-media-path", str(tiny.folder)) as engine:
        yield engine.wait_until_ready()
        assert engine.stop() == 0, engine.log
        assert engine.leftovers() == []
        assert "Traceback" not in engine.log


@pytest.fixture
def client(engine: EngineServe) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{engine.url}/v1", api_key="-")


def image_part(image: PIL.Image.Image, kind: str = "PNG") -> dict[str, Any]:
    data = base64.b64encode(file_of(image, kind)).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/{kind.lower()};base64,{data}"}}


def chat(parts: list[str | PIL.Image.Image]) -> tuple[list[Any], list[Any], list[PIL.Image.Image]]:
    """A message for the engine, the same for transformers, and its images."""
    images = [part for part in parts if not isinstance(part, str)]
    texts = [{"type": "text", "text": part} if isinstance(part, str) else None for part in parts]
    own = [{"type": "text", "text": part} if isinstance(part, str) else image_part(part) for part in parts]
    theirs = [text or {"type": "image"} for text in texts]
    return [{"role": "user", "content": own}], [{"role": "user", "content": theirs}], images


def ask(client: openai.OpenAI, messages: list[Any], length: int = LENGTH, **options: Any) -> Any:
    options = {"model": client.models.list().data[0].id, **options}
    return client.chat.completions.create(
        messages=messages, temperature=0, max_tokens=length, logprobs=True, **options
    )


def bytes_of(answer: Any) -> list[list[int]]:
    return [token.bytes for token in answer.choices[0].logprobs.content]


@pytest.mark.parametrize(
    "parts",
    [
        ["Hello!"],
        ["What is it? ", picture(48, 31)],
        [picture(20, 90, seed=1), "And this?"],
        [picture(10, 10, seed=2), " or ", picture(60, 20, seed=3), "?"],
        ["1:", picture(33, 33, seed=4), "2:", picture(7, 3, seed=5), "3:", picture(100, 99, seed=6)],
    ],
    ids=["none", "one", "tall", "two", "three"],
)
def test_answers_are_those_of_transformers(tiny, engine, client, parts):
    own, theirs, images = chat(parts)

    answer = ask(client, own)

    inputs = tiny.prompt(theirs, images)
    assert answer.usage.prompt_tokens == inputs["input_ids"].shape[1]
    expected = tiny.answer(theirs, images, LENGTH)
    assert bytes_of(answer) == [tiny.bytes_of(token_id) for token_id in expected]
    num_tiles = inputs["pixel_values"].shape[1] if images else 0
    num_image_tokens = getattr(answer.usage.prompt_tokens_details, "image_tokens", None) or 0
    assert num_image_tokens == int((inputs["input_ids"] == IMAGE_ID).sum()) <= num_tiles * ROWS_PER_TILE


def test_an_image_is_encoded_once(engine, client):
    image = picture(48, 48, seed=10)
    tiles = 5
    before = engine.idle_metrics()["encoder_tiles_total"]

    first = ask(client, chat(["a", image, "What?"])[0])
    after_first = engine.idle_metrics()["encoder_tiles_total"]
    again = ask(client, chat(["a", image, "What?"])[0])
    other_text = ask(client, chat(["other", image, "What?"])[0])

    assert after_first - before == tiles and engine.idle_metrics()["encoder_tiles_total"] == after_first
    assert re.search(r"encoding \d+ x \d+ pixels takes", engine.log)
    assert bytes_of(first) == bytes_of(again)
    assert again.usage.prompt_tokens_details.cached_tokens > tiles * ROWS_PER_TILE
    assert other_text.usage.prompt_tokens_details.cached_tokens < 20


def test_images_that_differ_in_a_pixel_are_two(tiny, engine, client):
    image = picture(24, 24, seed=11)
    other = image.copy()
    other.putpixel((12, 12), (255, 0, 255))
    before = engine.idle_metrics()["encoder_tiles_total"]

    answers = [ask(client, chat(["a", each, "What?"])[0]) for each in (image, other)]

    assert engine.idle_metrics()["encoder_tiles_total"] - before == 10  # it is scaled to 2 x 2 tiles, too
    assert answers[1].usage.prompt_tokens_details.cached_tokens < 20
    for answer, each in zip(answers, (image, other), strict=True):
        _, theirs, images = chat(["a", each, "What?"])
        assert bytes_of(answer) == [
            tiny.bytes_of(token_id) for token_id in tiny.answer(theirs, images, LENGTH)
        ]


def test_a_stream_with_an_image_survives_a_crash(tiny, engine, client):
    length = 200
    own, theirs, images = chat(["What?", picture(48, 31, seed=12)])
    tokens: list[list[int]] = []

    for chunk in ask(client, own, length, stream=True):
        for choice in chunk.choices:
            tokens += [token.bytes for token in choice.logprobs.content] if choice.logprobs else []
        if len(tokens) == 3:
            os.kill(engine.pids["scheduler"], signal.SIGKILL)

    assert tokens == [tiny.bytes_of(token_id) for token_id in tiny.answer(theirs, images, length)]


def test_a_stream_survives_a_crash_while_its_image_is_encoded(tiny):
    own, theirs, images = chat(["What?", picture(48, 31, seed=13)])
    tokens: list[list[int]] = []
    with EngineServe(str(tiny.folder), *SETTINGS, "--chaos", "slow=1") as engine:
        engine.wait_until_ready()
        client = openai.OpenAI(base_url=f"{engine.url}/v1", api_key="-")
        with ThreadPoolExecutor(1) as thread:
            asked = thread.submit(ask, client, own, 4, stream=True)
            begun = engine.metrics_when(lambda metrics: metrics["encoder_tiles_total"] > 0)
            killed = engine.pids["scheduler"]
            os.kill(killed, signal.SIGKILL)
            for chunk in asked.result():
                for choice in chunk.choices:
                    tokens += [token.bytes for token in choice.logprobs.content] if choice.logprobs else []

        assert begun["encoder_tiles_total"] < 5, "the image has five tiles"
        assert tokens == [tiny.bytes_of(token_id) for token_id in tiny.answer(theirs, images, 4)]
        assert engine.pids["scheduler"] != killed


@pytest.fixture
def answer_of_chat(client: openai.OpenAI) -> str:
    """The answer of chat completions, which is that of transformers, to an image and a text."""
    content: str = ask(client, chat([IMAGE, "What?"])[0]).choices[0].message.content
    return content


IMAGE = picture(48, 31, seed=14)
DATA = base64.b64encode(file_of(IMAGE)).decode()


def _responses(engine: EngineServe, model: str) -> str:
    parts: list[Any] = [
        {"type": "input_image", "image_url": f"data:image/png;base64,{DATA}", "detail": "auto"},
        {"type": "input_text", "text": "What?"},
    ]
    with openai.OpenAI(base_url=f"{engine.url}/v1", api_key="-") as client:
        return client.responses.create(
            model=model,
            input=[{"role": "user", "content": parts}],
            temperature=0,
            max_output_tokens=LENGTH,
        ).output_text


def _anthropic(engine: EngineServe, model: str) -> str:
    blocks: list[Any] = [
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": DATA}},
        {"type": "text", "text": "What?"},
    ]
    with anthropic.Anthropic(base_url=engine.url, api_key="-") as client:
        counted = client.messages.count_tokens(model=model, messages=[{"role": "user", "content": blocks}])
        message = client.messages.create(
            model=model,
            max_tokens=LENGTH,
            messages=[{"role": "user", "content": blocks}],
            extra_body={"temperature": 0},
        )
    usage = message.usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)
    [block] = message.content
    assert block.type == "text"
    return block.text


def _ollama_chat(engine: EngineServe, model: str) -> str:
    with ollama.Client(engine.url) as client:
        reply = client.chat(
            model,
            [ollama.Message(role="user", content="What?", images=[ollama.Image(value=file_of(IMAGE))])],
            options={"temperature": 0, "num_predict": LENGTH},
        )
    return reply.message.content or ""


def _ollama_generate(engine: EngineServe, model: str) -> str:
    with ollama.Client(engine.url) as client:
        assert "vision" in (client.show(model).capabilities or [])
        options = {"temperature": 0, "num_predict": LENGTH}
        text: str = client.generate(model, "What?", images=[file_of(IMAGE)], options=options).response
    return text


def _generate(engine: EngineServe, _model: str) -> str:
    body = {
        "text": "<|im_start|>User:<image>What?<end_of_utterance>\nAssistant:",
        "add_special_tokens": False,
        "image_data": DATA,
        "sampling_params": {"temperature": 0, "max_new_tokens": LENGTH},
    }
    text: str = httpx.post(f"{engine.url}/generate", json=body, timeout=60).raise_for_status().json()["text"]
    return text


def _command(engine: EngineServe, _model: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "a.png")
        path.write_bytes(file_of(IMAGE))
        options = ("--temperature", "0", "--max-tokens", str(LENGTH), "--quiet")
        ran = run_engine(Path(folder), "chat", "--url", engine.url, "--image", str(path), *options, "What?")
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.removesuffix("\n")


@pytest.mark.parametrize("way", [_responses, _anthropic, _ollama_chat, _ollama_generate, _generate, _command])
def test_every_api_gives_the_same_answer(engine, client, answer_of_chat, way):
    assert way(engine, client.models.list().data[0].id) == answer_of_chat


def test_a_file_of_the_listed_folder_is_read_and_nothing_is_fetched(tiny, engine, client, answer_of_chat):
    (tiny.folder / "a.png").write_bytes(file_of(IMAGE))

    def messages(url: str) -> list[Any]:
        parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What?"}]
        return [{"role": "user", "content": parts}]

    answer = ask(client, messages(f"file://{tiny.folder}/a.png"))

    assert answer.choices[0].message.content == answer_of_chat
    for url, cause in (
        (f"file://{tiny.folder}/../b.png", "is not below --allowed-local-media-path"),
        ("https://example.org/a.png", "--allowed-media-domains example.org"),
    ):
        with pytest.raises(openai.BadRequestError, match=cause):
            ask(client, messages(url))


def test_damaged_images_are_refused_and_the_server_lives(engine, client):
    content = file_of(picture(48, 48))
    for bad in (content[:60], b"%PDF-1.7", b"", bytes(1000)):
        url = "data:image/png;base64," + base64.b64encode(bad).decode()
        message = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}
        with pytest.raises(openai.BadRequestError) as error:
            ask(client, [message])
        assert error.value.param == "messages[0].content[0].image_url.url"

    assert ask(client, chat([picture(48, 48)])[0]).choices[0].message.content is not None
