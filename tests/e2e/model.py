"""A model for end-to-end tests: small enough to load at once, and sensitive enough to notice mistakes.

Its weights are random but scaled so that the text depends on every token before it: one changed byte at the start of a
prompt changes the whole answer. With a model whose next token hardly looks back, tests of caches would pass on garbage.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Final

MAX_MODEL_LEN: Final = 2048
EOS_ID: Final = 2
PAGE_SIZE: Final = 16  # the default of `engine serve`

_SPECIAL_TOKENS: Final = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_CORPUS: Final = (
    "the quick brown fox jumps over the lazy dog",
    "a request waits, runs, and is answered once",
    "Größe, façade, naïve; 東京 と 京都; привет мир",
    "one two three four five six seven eight nine ten",
)
_CHAT_TEMPLATE: Final = (
    "{% for m in messages %}"
    "{% if m.content == 'unspeakable' %}{{ raise_exception('this is not said here') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_LAYERS, _HIDDEN, _INTERMEDIATE, _HEADS, _KV_HEADS, _HEAD_DIM = 2, 64, 128, 4, 2, 16


def make_model(folder: Path, max_model_len: int = MAX_MODEL_LEN) -> Path:
    """Write a Llama of 0.2 million weights with a byte-level BPE tokenizer and a chat template into a new folder."""
    folder.mkdir()
    vocab_size = _write_tokenizer(folder)
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": vocab_size,
        "hidden_size": _HIDDEN,
        "intermediate_size": _INTERMEDIATE,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "max_position_embeddings": max_model_len,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "eos_token_id": EOS_ID,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    _write_weights(folder / "model.safetensors", vocab_size)
    return folder


def _write_tokenizer(folder: Path) -> int:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=352,
        special_tokens=list(_SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    core.train_from_iterator(_CORPUS * 3, trainer)
    core.save(str(folder / "tokenizer.json"))
    config = {"eos_token": _SPECIAL_TOKENS[EOS_ID], "chat_template": _CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return int(core.get_vocab_size())


def _write_weights(path: Path, vocab_size: int) -> None:
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(0)

    def linear(num_out: int, num_in: int, gain: float) -> torch.Tensor:
        return torch.randn((num_out, num_in), generator=generator) * (gain / math.sqrt(num_in))

    tensors = {
        "model.embed_tokens.weight": torch.randn((vocab_size, _HIDDEN), generator=generator),
        "model.norm.weight": torch.ones(_HIDDEN),
        "lm_head.weight": linear(vocab_size, _HIDDEN, 3.0),  # logits of deviation 3: likely tokens, and doubt
    }
    for i in range(_LAYERS):
        layer = f"model.layers.{i}."
        tensors |= {
            f"{layer}input_layernorm.weight": torch.ones(_HIDDEN),
            f"{layer}post_attention_layernorm.weight": torch.ones(_HIDDEN),
            f"{layer}self_attn.q_proj.weight": linear(_HEADS * _HEAD_DIM, _HIDDEN, 1.5),
            f"{layer}self_attn.k_proj.weight": linear(_KV_HEADS * _HEAD_DIM, _HIDDEN, 1.5),
            f"{layer}self_attn.v_proj.weight": linear(_KV_HEADS * _HEAD_DIM, _HIDDEN, 2.0),
            f"{layer}self_attn.o_proj.weight": linear(_HIDDEN, _HEADS * _HEAD_DIM, 2.0),
            f"{layer}mlp.gate_proj.weight": linear(_INTERMEDIATE, _HIDDEN, 2.0),
            f"{layer}mlp.up_proj.weight": linear(_INTERMEDIATE, _HIDDEN, 2.0),
            f"{layer}mlp.down_proj.weight": linear(_HIDDEN, _INTERMEDIATE, 1.0),
        }
    save_file(tensors, path)
