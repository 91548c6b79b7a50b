"""Images with `--tp`, `--dp` and adapters: the answers are those of transformers; with `--pp` they are refused."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.model_runner.adapters.peft_adapters import ALL_LINEAR, make_adapter
from tests.offline.test_qwen_images import TinyQwen
from tests.tiny_gemma3 import TinyGemma3
from tests.tiny_smolvlm import TinySmolVLM
from tests.tokenizer_manager.media.image_files import picture

from .conftest import StartServe
from .serving import EngineServe
from .test_gemma3_images import SETTINGS as GEMMA3
from .test_images import LENGTH, SETTINGS, ask, bytes_of, chat

pytestmark = [pytest.mark.real_process, pytest.mark.slow]

CHATS: tuple[list[Any], ...] = (
    ["Hello!"],
    ["What is it? ", picture(48, 31)],
    [picture(10, 10, seed=2), " or ", picture(60, 20, seed=3), "?"],
    ["And ", picture(48, 31), " again?"],
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinySmolVLM:
    return TinySmolVLM(tmp_path_factory.mktemp("smolvlm"))


def expected(tiny: Any, parts: list[Any], **options: Any) -> list[list[int]]:
    """The bytes of each token of transformers' answer."""
    _, theirs, images = chat(parts)
    ids = tiny.answer(theirs, images, LENGTH, **options)
    if isinstance(tiny, TinyQwen):
        return [tiny.bytes_of([token_id]) for token_id in ids]
    return [tiny.bytes_of(token_id) for token_id in ids]


def client_of(engine: EngineServe) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{engine.url}/v1", api_key="-")


@pytest.mark.parametrize("flag", ["--tp", "--dp"])
def test_two_processes_answer_as_one(tiny: TinySmolVLM, start_serve: StartServe, flag: str) -> None:
    """All chats at once, twice."""
    check_answers(tiny, start_serve, SETTINGS, flag)


@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3"])
def test_two_ranks_of_other_families(start_serve: StartServe, tmp_path: Path, family: str) -> None:
    """Three axes of positions and rows after the first layers; tokens that see their whole image."""
    if family == "gemma3":
        check_answers(TinyGemma3(tmp_path), start_serve, GEMMA3, "--tp")
    else:
        check_answers(TinyQwen(family, tmp_path), start_serve, SETTINGS, "--tp")


def check_answers(tiny: Any, start_serve: StartServe, settings: Sequence[str], flag: str) -> None:
    engine = start_serve(str(tiny.folder), *settings, flag, "2").wait_until_ready()
    with ThreadPoolExecutor(len(CHATS)) as threads, client_of(engine) as client:
        for _ in range(2):
            answers = list(threads.map(lambda parts: ask(client, chat(parts)[0]), CHATS))
            for parts, answer in zip(CHATS, answers, strict=True):
                assert bytes_of(answer) == expected(tiny, parts)
    assert engine.stop() == 0
    assert engine.leftovers() == []
    assert "Traceback" not in engine.log


@pytest.mark.parametrize("options", [(), ("--tp", "2")], ids=["one", "tp"])
def test_an_adapter_sees_images(
    tiny: TinySmolVLM, start_serve: StartServe, tmp_path: Path, options: tuple[str, ...]
) -> None:
    """Beside requests for the model itself, about the same images."""
    targets = rf".*text_model.*\.({'|'.join(ALL_LINEAR)})"
    adapter = make_adapter(tiny.model, tmp_path / "a", seed=1, size=0.7, target_modules=targets)
    engine = start_serve(str(tiny.folder), *SETTINGS, "--lora", f"a={adapter.folder}", *options)
    engine.wait_until_ready()
    with ThreadPoolExecutor(2 * len(CHATS)) as threads, client_of(engine) as client:
        names = [each.id for each in client.models.list().data]
        asked = [(name, parts) for parts in CHATS for name in names]

        def answer(pair: tuple[str, list[Any]]) -> list[list[int]]:
            return bytes_of(ask(client, chat(pair[1])[0], model=pair[0]))

        answers = list(threads.map(answer, asked))
    for (name, parts), got in zip(asked, answers, strict=True):
        assert got == expected(tiny, parts, model=adapter.reference if name == "a" else None), (name, parts)
    assert any(expected(tiny, parts) != expected(tiny, parts, model=adapter.reference) for parts in CHATS[1:])
    assert engine.stop() == 0


def test_stages_refuse_images_by_the_flag(tiny: TinySmolVLM, start_serve: StartServe) -> None:
    engine = start_serve(str(tiny.folder), *SETTINGS, "--pp", "2").wait_until_ready()
    with client_of(engine) as client:
        with pytest.raises(openai.BadRequestError, match="--pp does not take"):
            ask(client, chat(CHATS[1])[0])
        assert bytes_of(ask(client, chat(["Hello!"])[0])) == expected(tiny, ["Hello!"])
    assert engine.stop() == 0
