"""A tiny random Gemma 3 that sees, with a tokenizer, a chat template and a processor; transformers' answers of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import PIL.Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from engine.models.tokenizer.tokenizer import Tokenizer as EngineTokenizer

SIDE = 24
ROWS = 9
"""Rows of an image."""
_SPECIAL = (
    *("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
    *("<start_of_image>", "<end_of_image>", "<image_soft_token>"),
)
IMAGE_ID = 256 + _SPECIAL.index("<image_soft_token>")
_NAMED = {
    "bos_token": "<bos>",
    "eos_token": "<eos>",
    "boi_token": "<start_of_image>",
    "eoi_token": "<end_of_image>",
    "image_token": "<image_soft_token>",
}
# As that of the published models places texts and images.
_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<start_of_turn>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] | trim }}{% else %}"
    "{% for item in message['content'] %}{% if item['type'] == 'image' %}{{ '<start_of_image>' }}"
    "{% elif item['type'] == 'text' %}{{ item['text'] | trim }}{% endif %}{% endfor %}{% endif %}<end_of_turn>\n"
    "{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
_TEXT = {
    "vocab_size": 256 + len(_SPECIAL),
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "query_pre_attn_scalar": 16,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "sliding_window": 12,
    "max_position_embeddings": 1024,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": 2,
}
_TOWER = {
    "model_type": "siglip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": SIDE,
    "patch_size": 4,
}


class TinyGemma3:
    """The model in a folder.

    Attributes:
        folder: with all files.
    """

    def __init__(self, folder: Path) -> None:
        """Save it."""
        import torch
        import transformers
        from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
        from transformers.models.gemma3.processing_gemma3 import Gemma3Processor

        self.folder = folder
        torch.manual_seed(0)
        config = transformers.Gemma3Config(
            text_config=_TEXT,
            vision_config=_TOWER,
            mm_tokens_per_image=ROWS,
            image_token_index=IMAGE_ID,
            boi_token_index=IMAGE_ID - 2,
            eoi_token_index=IMAGE_ID - 1,
        )
        config._attn_implementation = "eager"
        self._model: Any = transformers.Gemma3ForConditionalGeneration(config).eval()
        with torch.no_grad():
            for name, weight in self._model.named_parameters():
                if "norm" in name:
                    weight.uniform_(-0.5, 0.5)
                else:
                    weight.normal_(0.0, 0.3 if weight.ndim == 1 else 1.5 / weight[0].numel() ** 0.5)
            self._model.get_input_embeddings().weight[256:].mul_(0.1)  # no answer has a special token
        self._model.save_pretrained(folder)
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        core = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
        core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        core.decoder = decoders.ByteLevel()
        core.add_special_tokens([AddedToken(text, special=True) for text in _SPECIAL])
        core.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(json.dumps({**_NAMED, "chat_template": _TEMPLATE}))
        images = {
            "do_pan_and_scan": None,
            "size": {"height": SIDE, "width": SIDE},
            "image_mean": [0.5, 0.4, 0.6],
            "image_std": [0.5, 0.3, 0.7],
            "resample": 2,
        }
        (folder / "preprocessor_config.json").write_text(json.dumps(images))
        self._core_tokenizer = EngineTokenizer.from_folder(folder)
        own = {name: _NAMED[name] for name in ("boi_token", "eoi_token", "image_token")}
        tokenizer = transformers.PreTrainedTokenizerFast(
            tokenizer_object=core, bos_token="<bos>", eos_token="<eos>", extra_special_tokens=own
        )
        self._processor: Any = Gemma3Processor(
            Gemma3ImageProcessorPil(**images), tokenizer, chat_template=_TEMPLATE, image_seq_length=ROWS
        )

    def bytes_of(self, token_id: int) -> list[int]:
        """The bytes of a token of an answer."""
        return list(self._core_tokenizer.token_bytes(token_id))

    def prompt(self, messages: Sequence[Any], images: Sequence[PIL.Image.Image]) -> Any:
        """The inputs of transformers' model; images in messages are `{"type": "image"}`."""
        text = self._processor.apply_chat_template(messages, add_generation_prompt=True)
        return self._processor(text=text, images=[list(images)] if images else None, return_tensors="pt")

    def answer(self, messages: Sequence[Any], images: Sequence[PIL.Image.Image], length: int) -> list[int]:
        """The greedy answer of transformers, token ids."""
        import torch

        inputs = self.prompt(messages, images)
        with torch.inference_mode():
            ids = self._model.generate(**inputs, do_sample=False, max_new_tokens=length)
        return list(map(int, ids[0, inputs["input_ids"].shape[1] :]))
