"""`LLM.chat` with images, on tiny random models of Qwen: prompts and answers are those of transformers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import PIL.Image
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from engine import LLM, SamplingParams
from engine.models.tokenizer.tokenizer import Tokenizer as EngineTokenizer
from engine.runtime.errors import RequestError
from tests.model_runner.vision.test_qwen_vl import FAMILIES, TEXT
from tests.tokenizer_manager.media.image_files import picture

pytestmark = pytest.mark.slow
SPECIAL = (
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
IMAGE_ID = 256 + SPECIAL.index("<|image_pad|>")
# The part of the published template that concerns images.
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for content in message['content'] %}"
    "{% if content['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif 'text' in content %}{{ content['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=12)
IMAGES = {
    "patch_size": 4,
    "size": {"shortest_edge": 64, "longest_edge": 2304},
    "image_mean": [0.5, 0.4, 0.6],
    "image_std": [0.5, 0.3, 0.7],
}


class TinyQwen:
    """The model in a folder, and transformers' answers of it."""

    def __init__(self, outer: str, folder: Path) -> None:
        import torch
        import transformers
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        torch.manual_seed(0)
        self.folder = folder
        name, text, vision = FAMILIES[outer]
        ids = {f"{each}_token_id": 256 + SPECIAL.index(f"<|{each}|>") for each in SPECIAL_IDS}
        text = TEXT | text | {"vocab_size": 256 + len(SPECIAL), "eos_token_id": 257, "pad_token_id": None}
        config = transformers.AutoConfig.for_model(
            outer,
            text_config=text | {"bos_token_id": 256},
            vision_config=vision,
            image_token_id=IMAGE_ID,
            video_token_id=IMAGE_ID + 1,
            **ids,
        )
        config._attn_implementation = "eager"
        self._model: Any = getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()
        with torch.no_grad():
            for name, weight in self._model.named_parameters():
                if "norm" in name or "ln_q" in name:
                    weight.uniform_(0.5, 1.5)
                elif weight.ndim > 1:
                    weight.normal_(0.0, 1.5 / weight[0].numel() ** 0.5)
            self._model.lm_head.weight[256:] = 0.0  # answers have no special tokens and do not end early
        self._model.save_pretrained(folder)
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        core = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
        core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        core.decoder = decoders.ByteLevel()
        core.add_special_tokens([AddedToken(each, special=True) for each in SPECIAL])
        core.save(str(folder / "tokenizer.json"))
        named = {"eos_token": "<|im_end|>", "chat_template": TEMPLATE}
        (folder / "tokenizer_config.json").write_text(json.dumps(named))
        (folder / "preprocessor_config.json").write_text(json.dumps(IMAGES))
        tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=core, **named)
        self._tokenizer: Any = tokenizer
        self._images: Any = Qwen2VLImageProcessorPil(**IMAGES)
        self._own_tokenizer = EngineTokenizer.from_folder(folder)

    def bytes_of(self, token_ids: Sequence[int]) -> list[int]:
        """The bytes of an answer."""
        return [byte for token_id in token_ids for byte in self._own_tokenizer.token_bytes(token_id)]

    def prompt(self, messages: Sequence[Any], images: Sequence[PIL.Image.Image]) -> dict[str, Any]:
        """The inputs of transformers' model, by the steps of `Qwen2VLProcessor`, which wants a processor of videos."""
        import torch

        text = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        found = dict(self._images(images=list(images), return_tensors="pt")) if images else {}
        for grid in found.get("image_grid_thw", []):
            text = text.replace("<|image_pad|>", "<placeholder>" * (int(grid.prod()) // 4), 1)
        ids = self._tokenizer(text.replace("<placeholder>", "<|image_pad|>"), return_tensors="pt")[
            "input_ids"
        ]
        return {**found, "input_ids": ids, "mm_token_type_ids": (ids == IMAGE_ID).to(torch.int32)}

    def answer(self, messages: Sequence[Any], images: Sequence[PIL.Image.Image], length: int) -> list[int]:
        """The greedy answer of transformers, token ids."""
        import torch

        self._model.model.rope_deltas = None
        inputs = self.prompt(messages, images)
        with torch.inference_mode():
            ids = self._model.generate(**inputs, do_sample=False, max_new_tokens=length)
        return list(map(int, ids[0, inputs["input_ids"].shape[1] :]))


SPECIAL_IDS = ("vision_start", "vision_end")


def chat(*parts: Any) -> list[Any]:
    content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return [{"role": "user", "content": content}]


def seen(image: PIL.Image.Image) -> dict[str, Any]:
    return {"type": "image", "image": image}


THEIRS = {"type": "image"}


@pytest.mark.parametrize(
    ("outer", "options"),
    [
        ("qwen2_5_vl", {"chunked_prefill_size": 16, "speculative": "ngram"}),
        ("qwen3_vl", {}),
        ("qwen3_5", {"chunked_prefill_size": 16}),
    ],
)
def test_chats_with_images(tmp_path: Path, outer: str, options: dict[str, Any]) -> None:
    """Also several images, the same again in a second question, and text alone."""
    tiny = TinyQwen(outer, tmp_path)
    first, second = picture(45, 30, seed=1), picture(17, 64, seed=2)
    asked: list[tuple[list[Any], list[Any], list[PIL.Image.Image]]] = [
        (chat("What?", seen(first)), chat("What?", THEIRS), [first]),
        (chat("What?", seen(first), "And?"), chat("What?", THEIRS, "And?"), [first]),
        (chat(seen(second), "or", seen(first)), chat(THEIRS, "or", THEIRS), [second, first]),
        (chat("Only text"), chat("Only text"), []),
    ]
    with LLM(
        str(tmp_path), dtype="float32", page_size=4, max_total_tokens=4096, mm_detail="high", **options
    ) as llm:
        for own, theirs, images in asked:
            output = llm.chat(own, GREEDY)
            prompt = tiny.prompt(theirs, images)["input_ids"][0].tolist()
            assert output.prompt_token_ids == prompt
            assert output.token_ids == tiny.answer(theirs, images, 12)
        outputs = llm.chat([own for own, _, _ in asked], GREEDY)
        assert [each.token_ids for each in outputs] == [
            tiny.answer(theirs, images, 12) for _, theirs, images in asked
        ]
        assert outputs[0].usage.cached_tokens > 8, "the beginning of the image is found"
        with pytest.raises(RequestError, match="video"):
            llm.chat(chat({"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}), GREEDY)
        written = llm.chat(chat("<|vision_start|><|image_pad|><|vision_end|>", seen(first)), GREEDY)
        assert written.prompt_token_ids.count(IMAGE_ID) == outputs[0].prompt_token_ids.count(IMAGE_ID)
