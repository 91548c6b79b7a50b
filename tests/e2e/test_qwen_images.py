"""Images over HTTP with a tiny Qwen3-VL: answers whose positions jump after an image survive a crash."""

from __future__ import annotations

import os
import signal
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import PIL.Image
import pytest

from tests.offline.test_qwen_images import TinyQwen
from tests.tokenizer_manager.media.image_files import picture

from .serving import SLOW, EngineServe
from .test_images import ask, chat

pytestmark = [pytest.mark.real_process, pytest.mark.slow]
LENGTH = 40
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
    "16",
)
PARTS: list[str | PIL.Image.Image] = [
    "What? ",
    picture(45, 30, seed=1),
    " and ",
    picture(17, 64, seed=2),
    " Say more about both.",
]


@pytest.fixture(scope="module", params=["off", "ngram"])
def engine(request: pytest.FixtureRequest, tiny: TinyQwen) -> Iterator[EngineServe]:
    with EngineServe(str(tiny.folder), *SETTINGS, *SLOW, "--speculative", request.param) as engine:
        yield engine.wait_until_ready()
        assert engine.stop() == 0, engine.log
        assert engine.leftovers() == []


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyQwen:
    return TinyQwen("qwen3_vl", tmp_path_factory.mktemp("qwen"))


@pytest.fixture
def client(engine: EngineServe) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{engine.url}/v1", api_key="-")


def tokens_of(chunks: Any, kill: EngineServe | None = None) -> dict[int, list[int]]:
    """The bytes of each choice; after 10 chunks the scheduler of `kill` is killed."""
    found: dict[int, list[int]] = defaultdict(list)
    for number, chunk in enumerate(chunks):
        if number == 10 and kill is not None:
            os.kill(kill.pids["scheduler"], signal.SIGKILL)
        for choice in chunk.choices:
            for token in choice.logprobs.content if choice.logprobs else ():
                found[choice.index] += token.bytes
    return dict(found)


def test_answers_about_images_survive_a_crash(
    tiny: TinyQwen, engine: EngineServe, client: openai.OpenAI
) -> None:
    """The greedy ones are those of transformers, also two of one prompt; the sampled ones those without a crash."""
    own, theirs, images = chat(PARTS)
    expected = tiny.bytes_of(tiny.answer(theirs, images, LENGTH))
    sampled = {"n": 2, "stream": True, "seed": 7, "extra_body": {"temperature": 1.0}}
    undisturbed = tokens_of(ask(client, own, LENGTH, **sampled))
    before = engine.pids["scheduler"]
    with ThreadPoolExecutor(2) as threads:
        others = threads.submit(lambda: tokens_of(ask(client, own, LENGTH, **sampled)))
        greedy = tokens_of(ask(client, own, LENGTH, n=2, stream=True), kill=engine)
        assert others.result() == undisturbed

    assert engine.pids["scheduler"] != before
    assert greedy == {0: expected, 1: expected}
    assert undisturbed[0] != undisturbed[1]
    assert engine.idle_metrics()["resumed_reqs_total"] >= 2
