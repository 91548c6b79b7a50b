"""Tiny random models without text as whole folders: embedders and a reranker, as sentence-transformers saves them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

MAX_LEN: Final = 64
SIZE: Final = 48
"""Numbers of a vector."""
WORDS: Final = (  # noqa: SIM905
    "the quick brown fox jumps over lazy dog a request waits runs and is answered once one two three four five six "
    "seven eight nine ten cat kitten stock market bread water salt oven train noon"
).split()
_SPECIAL: Final = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_CHARS: Final = "abcdefghijklmnopqrstuvwxyz0123456789.,:;!?-"


def make_embedder(folder: Path, *, prompts: dict[str, str] | None = None) -> Path:
    """A BERT whose vectors are the mean of all tokens, of length 1."""
    from transformers import BertConfig, BertModel

    _save(BertModel(_bert_config(BertConfig, folder), add_pooling_layer=False), folder)
    _write(
        folder / "modules.json",
        [
            {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
            {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
            {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"},
        ],
    )
    _write(folder / "1_Pooling" / "config.json", _pooling("mean_tokens"))
    _write(folder / "sentence_bert_config.json", {"max_seq_length": MAX_LEN, "do_lower_case": False})
    if prompts is not None:
        _write(
            folder / "config_sentence_transformers.json", {"prompts": prompts, "default_prompt_name": None}
        )
    return folder


def make_reranker(folder: Path, num_labels: int = 1) -> Path:
    """A BERT that scores pairs of texts, as cross-encoders do."""
    from transformers import BertConfig, BertForSequenceClassification

    config = _bert_config(BertConfig, folder)
    config.num_labels = num_labels
    _save(BertForSequenceClassification(config), folder)
    return folder


def make_decoder_embedder(folder: Path) -> Path:
    """A Qwen3 whose vector is that of the last token, as Qwen3-Embedding has it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import Qwen3Config, Qwen3Model

    folder.mkdir(parents=True)
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    core.train_from_iterator([" ".join(WORDS)], trainer)
    core.post_processor = processors.TemplateProcessing(
        single="$A <|endoftext|>", special_tokens=[("<|endoftext|>", 0)]
    )
    core.save(str(folder / "tokenizer.json"))
    _write(folder / "tokenizer_config.json", {"eos_token": "<|endoftext|>"})
    config = Qwen3Config(
        vocab_size=core.get_vocab_size(),
        hidden_size=SIZE,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        eos_token_id=0,
    )
    _save(Qwen3Model(config), folder)
    _write(
        folder / "modules.json",
        [
            {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
            {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
            {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"},
        ],
    )
    _write(folder / "1_Pooling" / "config.json", _pooling("lasttoken"))
    return folder


def _bert_config(config_class: Any, folder: Path) -> Any:
    folder.mkdir(parents=True)
    return config_class(
        vocab_size=_write_word_pieces(folder),
        hidden_size=SIZE,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=96,
        max_position_embeddings=MAX_LEN,
        initializer_range=0.4,  # texts of different words have vectors that differ
    )


def _write_word_pieces(folder: Path) -> int:
    """A tokenizer of lower-case word pieces; the size of its vocabulary."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

    pieces = [*_SPECIAL, *dict.fromkeys([*WORDS, *_CHARS]), *(f"##{char}" for char in _CHARS)]
    core = Tokenizer(models.WordPiece({piece: n for n, piece in enumerate(pieces)}, unk_token="[UNK]"))
    core.normalizer = normalizers.BertNormalizer(lowercase=True)
    core.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    core.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", pieces.index("[CLS]")), ("[SEP]", pieces.index("[SEP]"))],
    )
    core.save(str(folder / "tokenizer.json"))
    _write(
        folder / "tokenizer_config.json",
        {"tokenizer_class": "BertTokenizer", "do_lower_case": True, "model_max_length": MAX_LEN}
        | {f"{name}_token": f"[{name.upper()}]" for name in ("cls", "sep", "pad", "unk", "mask")},
    )
    return len(pieces)


def _pooling(kind: str) -> dict[str, Any]:
    kinds = ("cls_token", "mean_tokens", "max_tokens", "lasttoken")
    return {"word_embedding_dimension": SIZE} | {f"pooling_mode_{name}": name == kind for name in kinds}


def _save(model: Any, folder: Path) -> None:
    import torch

    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                parameter.copy_(
                    torch.randn(parameter.shape, generator=generator) * (1.5 / parameter.shape[1] ** 0.5)
                )
            elif name.endswith("bias"):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    model.eval().save_pretrained(folder, safe_serialization=True)


def _write(path: Path, document: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document))
