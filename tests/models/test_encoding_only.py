"""Tokenizers of encoders, WordPiece and Unigram: texts and pairs get the tokens that transformers gives them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer as CoreTokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from engine.models.tokenizer.tokenizer import Tokenizer
from engine.runtime.errors import ConfigError, RequestError

CORPUS = [
    "The quick brown fox can't jump over 12345 lazy dogs, we'll see: it's 2024!",
    "Größe, naïve café, 中文字符 한국어 日本語 🙂🙂 e\u0301e\u0301 ½ ... --- ///",
    "HELLO World helloWorld unbelievable embeddings of sentences",
] * 3
TEXTS = [
    "",
    " ",
    "\n\t",
    "a",
    *CORPUS[:3],
    "👩\u200d👩\u200d👧 \u00a0 \u2028 ﬁ",
    "\x00\x7f\ufeff",
    "x" * 300,
    "[SEP] a [MASK]",
]


def word_piece() -> CoreTokenizer:
    """As of BERT, uncased; tokens of the second text have the type 1."""
    core = CoreTokenizer(models.WordPiece(unk_token="[UNK]"))
    core.normalizer = normalizers.BertNormalizer(lowercase=True)
    core.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    core.train_from_iterator(CORPUS, trainers.WordPieceTrainer(vocab_size=200, special_tokens=special))
    core.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    core.decoder = decoders.WordPiece()
    return core


def unigram() -> CoreTokenizer:
    """As of XLM-RoBERTa: no token has the type 1."""
    core = CoreTokenizer(models.Unigram())
    core.normalizer = normalizers.NFKC()
    core.pre_tokenizer = pre_tokenizers.Metaspace()
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    core.train_from_iterator(
        CORPUS, trainers.UnigramTrainer(vocab_size=150, special_tokens=special, unk_token="<unk>")
    )
    core.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    core.decoder = decoders.Metaspace()
    return core


NAMED = {
    "word-piece": {
        "unk_token": "[UNK]",
        "cls_token": "[CLS]",
        "sep_token": "[SEP]",
        "pad_token": "[PAD]",
        "mask_token": "[MASK]",
    },
    "unigram": {
        "unk_token": "<unk>",
        "bos_token": "<s>",
        "cls_token": "<s>",
        "eos_token": "</s>",
        "sep_token": "</s>",
        "pad_token": "<pad>",
        "mask_token": "<mask>",
    },
}


@pytest.fixture(scope="module", params=["word-piece", "unigram"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that transformers has saved."""
    path = tmp_path_factory.mktemp(request.param)
    core = word_piece() if request.param == "word-piece" else unigram()
    core.enable_truncation(16)  # of the training script
    names = ["input_ids", "token_type_ids", "attention_mask"]
    PreTrainedTokenizerFast(
        tokenizer_object=core, model_input_names=names, **NAMED[request.param]
    ).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def reference(folder: Path) -> PreTrainedTokenizerFast:
    loaded = PreTrainedTokenizerFast.from_pretrained(folder)
    assert isinstance(loaded, PreTrainedTokenizerFast)
    return loaded


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(folder, encode_only=True)


def test_texts(tokenizer: Tokenizer, reference: PreTrainedTokenizerFast) -> None:
    assert tokenizer.encode_batch(TEXTS) == [reference(text, truncation=False)["input_ids"] for text in TEXTS]


@pytest.mark.fast_cases(4)
@pytest.mark.parametrize("max_length", [None, 5, 8, 11, 64, 1000])
def test_pairs(tokenizer: Tokenizer, reference: PreTrainedTokenizerFast, max_length: int | None) -> None:
    chosen = random.Random(7)
    pairs = [(chosen.choice(TEXTS), chosen.choice(TEXTS)) for _ in range(60)]

    encoded = tokenizer.encode_pairs(pairs, max_length)

    expected = reference(
        pairs,  # several at once, as a CrossEncoder gives them: of one alone, an empty second text would be dropped
        return_token_type_ids=True,
        truncation=False if max_length is None else "longest_first",
        max_length=max_length,
    )
    assert [pair.ids for pair in encoded] == expected["input_ids"]
    for found, types in zip(encoded, expected["token_type_ids"], strict=True):
        start = found.second_start or len(found.ids)
        assert types == [0] * start + [1] * (len(found.ids) - start)


def test_tokens_can_be_shown(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("unbelievable", add_special_tokens=False)

    assert b"".join(map(tokenizer.token_bytes, ids)).strip() == b"unbelievable"
    assert tokenizer.decode(ids) == "unbelievable"


def test_a_model_that_generates_needs_exact_bytes(folder: Path) -> None:
    if folder.name.startswith("word-piece"):
        with pytest.raises(ConfigError, match=r"decoder is of an unsupported kind \(WordPiece\)"):
            Tokenizer.from_folder(folder)
    else:
        assert Tokenizer.from_folder(folder).encode("a") == Tokenizer.from_folder(
            folder, encode_only=True
        ).encode("a")


def test_a_lone_surrogate_is_an_error_of_the_request(tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match="lone surrogate at character 1"):
        tokenizer.encode_pairs([("a", "b\ud800")])


@pytest.mark.parametrize(
    ("config", "start"),
    [
        ({"tokenizer_class": "BertTokenizer"}, 3),
        ({"tokenizer_class": "TokenizersBackend"}, 0),
        ({"tokenizer_class": "TokenizersBackend", "model_input_names": ["input_ids", "token_type_ids"]}, 3),
        ({"model_input_names": ["input_ids", "attention_mask"]}, 0),
        ({}, 3),
    ],
)
def test_types_are_given_as_transformers_gives_them(
    tmp_path: Path, config: dict[str, object], start: int
) -> None:
    word_piece().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))

    (pair,) = Tokenizer.from_folder(tmp_path, encode_only=True).encode_pairs([("a", "b")])

    assert pair.second_start == start


@pytest.mark.parametrize("wanted", [True, False])
def test_case_is_folded_if_sentence_transformers_does(tmp_path: Path, wanted: bool) -> None:
    core = word_piece()
    core.normalizer = normalizers.BertNormalizer(lowercase=False, strip_accents=False)
    core.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps({"do_lower_case": wanted}))

    tokenizer = Tokenizer.from_folder(tmp_path, encode_only=True)

    assert (tokenizer.encode("FOX") == tokenizer.encode("fox")) is wanted


@pytest.mark.parametrize("make", [word_piece, unigram])
def test_no_bound_is_certain(make: Callable[[], CoreTokenizer], tmp_path: Path) -> None:
    """A word of any length can be one unknown token."""
    make().save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_folder(tmp_path, encode_only=True)

    assert tokenizer.min_num_tokens("中" * 1000) == 0
