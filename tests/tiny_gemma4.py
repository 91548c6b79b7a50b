"""A tiny random Gemma 4 that sees, with a tokenizer, a chat template and a processor; transformers' answers of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from engine.models.tokenizer.tokenizer import Tokenizer as EngineTokenizer
from tests.model_runner.vision.test_gemma4 import FORMS, PROCESSOR, save_random
from tests.tiny_gemma3 import TinyGemma3

_SPECIAL = ("<pad>", "<eos>", "<bos>", "<|turn>", "<turn|>", "<|image>", "<image|>", "<|image|>", "<|video|>")
_NAMED = {
    "bos_token": "<bos>",
    "eos_token": "<eos>",
    "boi_token": "<|image>",
    "eoi_token": "<image|>",
    "image_token": "<|image|>",
}
_OF_AUDIO = {"audio_token": "<|audio|>", "boa_token": "<|audio>", "eoa_token": "<audio|>"}
# As that of the published models places texts and images.
_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|turn>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] | trim }}{% else %}"
    "{% for item in message['content'] %}{% if item['type'] == 'image' %}{{ '\n\n<|image|>\n\n' }}"
    "{% elif item['type'] == 'text' %}{{ item['text'] | trim }}{% endif %}{% endfor %}{% endif %}<turn|>\n"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|turn>model\n' }}{% endif %}"
)


def id_of(special: str) -> int:
    return 256 + _SPECIAL.index(special)


class TinyGemma4(TinyGemma3):
    """The model in a folder, in one of the `FORMS`."""

    def __init__(self, folder: Path, form: str) -> None:
        """Save it."""
        import transformers
        from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
        from transformers.models.gemma4.processing_gemma4 import Gemma4Processor

        class Processor(Gemma4Processor):  # type: ignore[misc]
            """Without the parts for videos and audio, which need torchvision."""

            def check_argument_for_proper_class(self, name: str, argument: Any) -> None: ...

        self.folder = folder
        text, tower = FORMS[form]
        ids = {
            "vocab_size": 256 + len(_SPECIAL),
            "bos_token_id": id_of("<bos>"),
            "eos_token_id": id_of("<eos>"),
        }
        ids |= {"pad_token_id": id_of("<pad>"), "vocab_size_per_layer_input": 256 + len(_SPECIAL)}
        self._model = save_random(
            folder,
            text | ids | {"max_position_embeddings": 1024},
            tower,
            image_token_id=id_of("<|image|>"),
            boi_token_id=id_of("<|image>"),
            eoi_token_id=id_of("<image|>"),
            video_token_id=id_of("<|video|>"),
            audio_token_id=1 << 20,
        )
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        core = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
        core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        core.decoder = decoders.ByteLevel()
        core.add_special_tokens([AddedToken(each, special=True) for each in _SPECIAL])
        core.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(json.dumps({**_NAMED, "chat_template": _TEMPLATE}))
        self._core_tokenizer = EngineTokenizer.from_folder(folder)
        own = {name: text for name, text in (_NAMED | _OF_AUDIO).items() if name[:3] not in ("bos", "eos")}
        tokenizer = transformers.PreTrainedTokenizerFast(
            tokenizer_object=core,
            bos_token="<bos>",
            eos_token="<eos>",
            pad_token="<pad>",
            extra_special_tokens=own,
        )
        images = Gemma4ImageProcessorPil(**PROCESSOR)
        self._processor = Processor(None, images, tokenizer, None, chat_template=_TEMPLATE)
