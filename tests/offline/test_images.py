"""`LLM.chat` with images, on a tiny SmolVLM: the answers are those of transformers."""

from __future__ import annotations

import base64
from collections.abc import Iterator

import numpy as np
import pytest

from engine import LLM, SamplingParams
from engine.runtime.errors import RequestError
from engine.runtime.installation import cache_dir
from tests.fake_hub import FakeHub
from tests.mmproj_files import write_pair
from tests.tiny_smolvlm import IMAGE_ID, TinySmolVLM
from tests.tokenizer_manager.media.image_files import file_of, picture

pytestmark = pytest.mark.slow
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=10)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> TinySmolVLM:
    return TinySmolVLM(tmp_path_factory.mktemp("smolvlm"))


@pytest.fixture(scope="module")
def llm(tiny: TinySmolVLM) -> Iterator[LLM]:
    with LLM(
        str(tiny.folder), dtype="float32", page_size=4, max_total_tokens=2048, max_images=2, mm_detail="high"
    ) as llm:
        yield llm


def chat(part):
    return [{"role": "user", "content": [{"type": "text", "text": "What?"}, part]}]


THEIRS = chat({"type": "image"})


@pytest.mark.parametrize("form", ["pillow", "array", "url"])
def test_an_image_in_each_form(tiny, llm, form):
    image = picture(40, 30, seed=3)
    url = "data:image/png;base64," + base64.b64encode(file_of(image)).decode()
    part = {
        "pillow": {"type": "image", "image": image},
        "array": {"type": "image", "image": np.asarray(image)},
        "url": {"type": "image_url", "image_url": url},
    }[form]

    output = llm.chat(chat(part), GREEDY)

    assert output.token_ids == tiny.answer(THEIRS, [image], 10)
    assert output.prompt_token_ids == tiny.prompt(THEIRS, [image])["input_ids"][0].tolist()
    assert llm.render_chat(chat(part)) == output.prompt_token_ids


def test_several_chats_in_a_batch_and_as_a_stream(tiny, llm):
    images = [picture(40, 30, seed=seed) for seed in range(3)]
    chats = [chat({"type": "image", "image": image}) for image in images]

    outputs = llm.chat(chats, GREEDY)
    streamed = [token for chunk in llm.chat(chats[0], GREEDY, stream=True) for token in chunk.token_ids]

    assert [output.token_ids for output in outputs] == [tiny.answer(THEIRS, [image], 10) for image in images]
    assert streamed == outputs[0].token_ids and IMAGE_ID in outputs[0].prompt_token_ids


@pytest.mark.parametrize(
    ("part", "cause"),
    [
        ({"type": "image", "image": np.zeros((2, 2, 2, 2))}, "an array of a message is no image"),
        ({"type": "image_url", "image_url": "data:;base64,AAAA"}, r"content\[1\]\.image_url is not an image"),
        ({"type": "image", "image": "x.png"}, "only images are read"),
    ],
)
def test_what_is_no_image_is_refused(llm, part, cause):
    with pytest.raises(RequestError, match=cause):
        llm.chat(chat(part), GREEDY)


def test_too_many_images_are_refused(llm):
    part = {"type": "image", "image": picture(4, 4)}

    with pytest.raises(RequestError, match="the limit is 2"):
        llm.chat([{"role": "user", "content": [part] * 3}], GREEDY)


def test_a_gguf_pair_answers_as_the_folder(tiny, tmp_path):
    """Also the tokens around an image are those of the GGUF file's vocabulary."""
    image = picture(40, 30, seed=3)

    folder = str(write_pair(tiny.folder, tmp_path))
    with LLM(folder, dtype="float32", page_size=4, max_total_tokens=2048, mm_detail="high") as llm:
        output = llm.chat(chat({"type": "image", "image": image}), GREEDY)

    assert output.token_ids == tiny.answer(THEIRS, [image], 10)
    assert output.prompt_token_ids == tiny.prompt(THEIRS, [image])["input_ids"][0].tolist()


def test_a_gguf_model_of_the_hub_comes_with_its_tower(tiny, tmp_path, monkeypatch):
    (tmp_path / "pair").mkdir()
    pair = write_pair(tiny.folder, tmp_path / "pair").parent
    image = picture(40, 30, seed=3)

    with FakeHub() as hub:
        hub.add_folder("org/vlm", pair)
        hub.serve_this_process(tmp_path / "hf", cache_dir(), monkeypatch)
        with LLM("org/vlm", dtype="float32", page_size=4, max_total_tokens=2048, mm_detail="high") as llm:
            output = llm.chat(chat({"type": "image", "image": image}), GREEDY)

    assert output.token_ids == tiny.answer(THEIRS, [image], 10)


@pytest.mark.parametrize(
    "settings", [{}, {"mm_processor_kwargs": {"do_image_splitting": False}, "mm_detail": "high"}]
)
def test_one_tile_is_that_of_transformers_without_splitting(tiny, settings):
    image = picture(40, 30, seed=8)
    expected = tiny.prompt(THEIRS, [image], splits=False)["input_ids"][0].tolist()

    with LLM(str(tiny.folder), dtype="float32", page_size=4, max_total_tokens=2048, **settings) as llm:
        output = llm.chat(chat({"type": "image", "image": image}), GREEDY)
        assert llm.sees_images and llm.config.media.mm_detail == settings.get("mm_detail", "low")

    assert output.prompt_token_ids == expected and expected.count(IMAGE_ID) == 9
    assert output.token_ids == tiny.answer(THEIRS, [image], 10, splits=False)
