"""Models for `check.py` and `bench.py`: tiny random ones with weights, and shapes of real ones without weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import torch

SHAPES: Final[dict[str, dict[str, Any]]] = json.loads(
    (Path(__file__).parents[1] / "shapes.json").read_text()
)["gpu"]
"""config.json of the models with performance targets."""

TINY_SHAPE: Final = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
    "rope_theta": 1e4,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}

TINY_VOCAB: Final = 512
ARCHITECTURES: Final[dict[str, dict[str, Any]]] = {
    "llama": {},
    "mistral": {"sliding_window": 64},
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": {
        "moe_intermediate_size": 64,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
    },
    "gemma3_text": {"num_hidden_layers": 7, "sliding_window": 64, "query_pre_attn_scalar": 64},
    "phi3": {},
    "olmo2": {},  # not an engine model: transformers' code with the engine's attention
}
"""model_type -> the fields that its configuration adds to `_TINY`."""
_TINY: Final = {
    "vocab_size": TINY_VOCAB,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def write_shape(folder: Path, config: dict[str, Any]) -> Path:
    """A folder for `--load-format dummy`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_tiny_model(folder: Path, model_type: str, dtype: str, seed: int = 0, **sizes: int) -> Any:
    """A tiny random model with weights and a tokenizer of bytes, saved; returns transformers' model, in float32.

    `sizes`: fields of its configuration that differ.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, logging

    logging.disable_progress_bar()
    torch.manual_seed(seed)
    config = AutoConfig.for_model(model_type, **{**_TINY, **ARCHITECTURES[model_type], **sizes})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            else:  # large enough that logits differ clearly
                parameter.normal_(0.0, 0.3 if parameter.ndim == 1 else 1.5 / parameter.shape[-1] ** 0.5)
    model = model.to(getattr(torch, dtype))
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return model.float()


def write_tokenizer(folder: Path) -> None:
    """Bytes, three special tokens and a chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {text: n for n, text in enumerate(specials)} | {char: 3 + n for n, char in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in specials])
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<|im_end|>", "chat_template": template})
    )
