"""A tiny random SmolVLM with a tokenizer, a chat template and a processor, and transformers' answers of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import PIL.Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from engine.models.tokenizer.tokenizer import Tokenizer as EngineTokenizer

SIDE = 24
"""Pixels of a tile's side; an image has at most 2 x 2 tiles and the small copy."""
ROWS_PER_TILE = 9
_SPECIAL = (
    *("<|im_start|>", "<end_of_utterance>", "<fake_token_around_image>", "<image>", "<global-img>"),
    *(f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)),
)
IMAGE_ID = 256 + _SPECIAL.index("<image>")
# That of the published models.
TEMPLATE = (
    "<|im_start|>{% for message in messages %}{{message['role'] | capitalize}}"
    "{% if message['content'][0]['type'] == 'image' %}{{':'}}{% else %}{{': '}}{% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{line['text']}}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n"
    "{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
TEXT = {
    "model_type": "llama",
    "vocab_size": 256 + len(_SPECIAL),
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": 2,
}
TOWER = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": SIDE,
    "patch_size": 4,
}


class TinySmolVLM:
    """The model in a folder.

    Attributes:
        folder: with all files.
        model: of transformers.
    """

    def __init__(self, folder: Path) -> None:
        """Save it."""
        import torch
        import transformers
        from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
        from transformers.models.idefics3.processing_idefics3 import Idefics3Processor

        self.folder = folder
        torch.manual_seed(0)
        config = transformers.AutoConfig.for_model(
            "smolvlm", text_config=TEXT, vision_config=TOWER, image_token_id=IMAGE_ID, scale_factor=2
        )
        config._attn_implementation = "eager"
        self.model: Any = transformers.SmolVLMForConditionalGeneration(config).eval()
        with torch.no_grad():
            for name, weight in self.model.named_parameters():
                if "norm" in name:
                    weight.uniform_(0.5, 1.5)
                else:
                    weight.normal_(0.0, 0.3 if weight.ndim == 1 else 1.5 / weight[0].numel() ** 0.5)
            for token_id in (IMAGE_ID, 257):  # no answer has a placeholder, or ends early
                self.model.lm_head.weight[token_id] = 0.0
        self.model.save_pretrained(folder)
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        core = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
        core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        core.decoder = decoders.ByteLevel()
        core.add_special_tokens([AddedToken(text, special=True) for text in _SPECIAL])
        core.save(str(folder / "tokenizer.json"))
        named = {"bos_token": "<|im_start|>", "eos_token": "<end_of_utterance>", "chat_template": TEMPLATE}
        (folder / "tokenizer_config.json").write_text(json.dumps(named))
        images = {
            "max_image_size": {"longest_edge": SIDE},
            "size": {"longest_edge": 2 * SIDE},
            "image_mean": [0.5, 0.4, 0.6],
            "image_std": [0.5, 0.3, 0.7],
            "do_image_splitting": True,
            "resample": 1,
        }
        (folder / "preprocessor_config.json").write_text(json.dumps(images))
        self._core_tokenizer = EngineTokenizer.from_folder(folder)
        tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=core, **named)
        self._processor: Any = Idefics3Processor(
            Idefics3ImageProcessorPil(**images),
            tokenizer,
            image_seq_len=ROWS_PER_TILE,
            chat_template=TEMPLATE,
        )

    def bytes_of(self, token_id: int) -> list[int]:
        """The bytes of a token of an answer."""
        return list(self._core_tokenizer.token_bytes(token_id))

    def prompt(
        self, messages: Sequence[Any], images: Sequence[PIL.Image.Image], *, splits: bool = True
    ) -> Any:
        """The inputs of transformers' model; images in messages are `{"type": "image"}`; one tile without `splits`."""
        text = self._processor.apply_chat_template(messages, add_generation_prompt=True)
        return self._processor(
            text=text,
            images=[list(images)] if images else None,
            do_image_splitting=splits,
            return_tensors="pt",
        )

    def answer(
        self,
        messages: Sequence[Any],
        images: Sequence[PIL.Image.Image],
        length: int,
        *,
        splits: bool = True,
        model: Any = None,
    ) -> list[int]:
        """The greedy answer of transformers, token ids; `model`: another one, such as that with an adapter."""
        import torch

        inputs = self.prompt(messages, images, splits=splits)
        with torch.inference_mode():
            ids = (model or self.model).generate(**inputs, do_sample=False, max_new_tokens=length)
        return list(map(int, ids[0, inputs["input_ids"].shape[1] :]))
