"""Tokenizers read from a folder and from GGUF metadata, against the library that wrote or defines them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as CoreTokenizer

from engine.detokenizer.incremental import IncrementalDecoder
from engine.models.gguf.gguf_file import GGUFFile
from engine.models.tokenizer.tokenizer import Tokenizer
from engine.runtime.errors import ConfigError, RequestError
from tests.selection import examples

MakeGGUF = Callable[..., Path]

CORPUS = [
    "The quick brown fox can't jump over 12345 lazy dogs, we'll see: it's 2024!",
    "def main():\n    return {'naïve': 1.5, 'größe': 77777}\r\n\r\n\tpass",
    "HELLO World helloWorld 中文字符 한국어 日本語 🙂🙂 e\u0301e\u0301 ½ ... --- ///",
] * 3
SPECIAL = ["<|end|>", "<|start|>"]
TEXTS = [
    *CORPUS[:3],
    "",
    " ",
    "   leading and trailing   ",
    "<|start|>user\nhi<|end|>\n<|start|>",
    "a<tool>b",
    "🇩🇪 👩\u200d👩\u200d👧 \u00a0 \u2028 ﬁ",
    "1234567 12 ٣٤ Ⅷ",
    "they'LL they\u2019ll WE'RE",
    "\x00\x7f\ufeff",
]

# The published pre-tokenizers of the models behind the names, independent of the table under test.
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace("{1,3}", "")
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK_V3 = [
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
]
PUBLISHED: dict[str, list[Any]] = {
    "gpt-2": [pre_tokenizers.ByteLevel(add_prefix_space=False)],
    "smollm": [
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
    ],
    "llama-bpe": [
        pre_tokenizers.Split(Regex(LLAMA3), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ],
    "falcon": [
        pre_tokenizers.Punctuation("contiguous"),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        pre_tokenizers.Digits(individual_digits=False),
        pre_tokenizers.Split(Regex("[0-9][0-9][0-9]"), "isolated"),
    ],
    "gpt-4o": [
        pre_tokenizers.Split(Regex(O200K), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ],
    "deepseek-v3": [
        *(pre_tokenizers.Split(Regex(regex), "isolated") for regex in DEEPSEEK_V3),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ],
    "deepseek-coder": [
        *(pre_tokenizers.Split(Regex(x), "isolated") for x in (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+")),
        pre_tokenizers.Split(Regex("[一-龥ࠀ-一가-\ud7ff]+"), "isolated"),
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ],
    "glm4": [
        pre_tokenizers.Split(Regex(LLAMA3), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ],
    "qwen2": [
        pre_tokenizers.Split(Regex(QWEN2), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ],
}


def train(pre: str) -> CoreTokenizer:
    """A small byte-level BPE tokenizer with the published pre-tokenizer of `pre`."""
    core = CoreTokenizer(models.BPE(ignore_merges=pre in ("llama-bpe", "glm4")))
    core.pre_tokenizer = pre_tokenizers.Sequence(PUBLISHED[pre])
    core.normalizer = normalizers.NFC() if pre == "qwen2" else None
    core.decoder = decoders.ByteLevel()
    core.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=600,
            special_tokens=SPECIAL,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    core.add_tokens([AddedToken("<tool>", normalized=False)])
    return core


def gguf_metadata(core: CoreTokenizer, pre: str) -> dict[str, Any]:
    """The vocabulary of `core` as GGUF stores it."""
    model = json.loads(core.to_str())["model"]
    tokens = [core.id_to_token(i) for i in range(core.get_vocab_size())]
    types = [3 if token in SPECIAL else 4 if token == "<tool>" else 1 for token in tokens]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.add_bos_token": False,
    }


def load(make_gguf: MakeGGUF, metadata: dict[str, Any], **changes: Any) -> Tokenizer:
    """Build from metadata with changes to `tokenizer.ggml.` keys; a value of `...` removes the key."""
    changed = metadata | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    path = make_gguf({key: value for key, value in changed.items() if value is not ...})
    return Tokenizer.from_gguf(GGUFFile(path))


@pytest.fixture(scope="module")
def smollm() -> CoreTokenizer:
    return train("smollm")


def joined(tokenizer: Tokenizer, ids: list[int]) -> bytes:
    return b"".join(tokenizer.token_bytes(token_id) for token_id in ids)


@pytest.mark.parametrize("pre", list(PUBLISHED))
def test_gguf_byte_level_agrees_with_the_published_tokenizer(make_gguf: MakeGGUF, pre: str) -> None:
    core = train(pre)
    tokenizer = load(make_gguf, gguf_metadata(core, pre))
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert ids == core.encode(text).ids
        assert tokenizer.decode(ids) == core.decode(ids)
        if pre != "qwen2":  # which normalizes
            assert joined(tokenizer, ids).decode() == text


def test_the_pre_tokenizer_decides_the_split(make_gguf: MakeGGUF) -> None:
    """One vocabulary in which `12345` is a token; only the names differ."""
    core = CoreTokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    core.train_from_iterator(["12345"] * 5, trainer)
    metadata = gguf_metadata(core, "smollm") | {"tokenizer.ggml.bos_token_id": 0}

    def pieces(pre: str) -> list[bytes]:
        tokenizer = load(make_gguf, metadata, pre=pre)
        return [tokenizer.token_bytes(i) for i in tokenizer.encode("12345")]

    assert pieces("gpt-2") == [b"12345"]
    assert pieces("smollm") == [b"1", b"2", b"3", b"4", b"5"]
    assert pieces("qwen2") == pieces("tekken") == pieces("smollm")
    for groups_of_three in ("llama-bpe", "default"):
        ends = itertools.accumulate(len(piece) for piece in pieces(groups_of_three))
        assert 3 in ends


def test_special_and_user_defined_tokens(make_gguf: MakeGGUF, smollm: CoreTokenizer) -> None:
    tokenizer = load(make_gguf, gguf_metadata(smollm, "smollm"))
    tool = tokenizer.token_to_id("<tool>")
    assert tool is not None
    ids = tokenizer.encode("<|start|>a<tool><|end|>")
    assert (ids[0], ids[2], ids[3]) == (1, tool, 0)
    assert [tokenizer.is_special(i) for i in ids] == [True, False, False, True]
    assert tokenizer.decode(ids) == "a<tool>"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|start|>a<tool><|end|>"
    assert tokenizer.token_bytes(1) == b"<|start|>"
    assert tokenizer.special_tokens == {"bos_token": "<|start|>", "eos_token": "<|end|>"}
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (1, (0,))
    assert tokenizer.token_to_id("no such token") is None


def test_bos_and_eos_are_added_as_the_file_asks(make_gguf: MakeGGUF, smollm: CoreTokenizer) -> None:
    metadata = gguf_metadata(smollm, "smollm")
    plain = load(make_gguf, metadata).encode("fox")
    assert load(make_gguf, metadata, add_bos_token=True).encode("fox") == [1, *plain]
    both = load(make_gguf, metadata, add_bos_token=True, add_eos_token=True)
    assert both.encode("fox") == [1, *plain, 0]
    assert both.encode("") == [1, 0]
    assert both.encode("fox", add_special_tokens=False) == plain
    # Unless it says otherwise: Llama 3 starts with BOS, SmolLM does not.
    assert load(make_gguf, metadata, add_bos_token=...).encode("fox") == plain
    assert load(make_gguf, metadata, add_bos_token=..., pre="llama-bpe").encode("fox")[0] == 1


@pytest.mark.parametrize("text", ["$A", "$B:0", "a:b", "bos", "eos"])
def test_a_bos_token_that_looks_like_template_syntax(
    make_gguf: MakeGGUF, smollm: CoreTokenizer, text: str
) -> None:
    metadata = gguf_metadata(smollm, "smollm")
    tokens = metadata["tokenizer.ggml.tokens"]
    tokenizer = load(make_gguf, metadata, tokens=[tokens[0], text, *tokens[2:]], add_bos_token=True)
    assert tokenizer.encode("fox") == [1, *tokenizer.encode("fox", add_special_tokens=False)]


def test_partial_utf8_comes_out_as_bytes(make_gguf: MakeGGUF, smollm: CoreTokenizer) -> None:
    tokenizer = load(make_gguf, gguf_metadata(smollm, "smollm"))
    ids = tokenizer.encode("🦊")
    assert len(ids) > 1
    assert joined(tokenizer, ids) == "🦊".encode()
    assert tokenizer.decode(ids[:-1]) == "\ufffd"


def test_ids_outside_the_vocabulary(make_gguf: MakeGGUF, smollm: CoreTokenizer) -> None:
    tokenizer = load(make_gguf, gguf_metadata(smollm, "smollm"))
    assert tokenizer.vocab_size == smollm.get_vocab_size()
    assert tokenizer.token_bytes(tokenizer.vocab_size) == b""
    assert tokenizer.decode([tokenizer.vocab_size]) == ""
    for bad in (-1, 1 << 32):
        with pytest.raises(RequestError, match="negative or beyond 32 bits"):
            tokenizer.decode([bad])


def test_a_lone_surrogate_is_the_clients_error(make_gguf: MakeGGUF, smollm: CoreTokenizer) -> None:
    with pytest.raises(RequestError, match="lone surrogate at character 3"):
        load(make_gguf, gguf_metadata(smollm, "smollm")).encode("abc\ud800")


@settings(
    max_examples=examples(200),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(text=st.text(max_size=60))
def test_token_bytes_join_to_the_text(make_gguf: MakeGGUF, smollm: CoreTokenizer, text: str) -> None:
    tokenizer = load(make_gguf, gguf_metadata(smollm, "smollm"))
    ids = tokenizer.encode(text)
    assert joined(tokenizer, ids) == text.encode()
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


# SentencePiece: pieces with scores. Byte tokens first, as in Llama 2.
PIECES = ["▁", "a", "b", "c", "▁a", "ab", "bc", "abc", "▁▁", "aa", "▁ab", "é", "cab"]
SPM_TOKENS = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES]
SPM_SCORES = [0.0] * 259 + [-100.0 - i if len(piece) == 1 else -float(i) for i, piece in enumerate(PIECES)]
SPM_METADATA = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": SPM_TOKENS,
    "tokenizer.ggml.scores": SPM_SCORES,
    "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * len(PIECES)],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.unknown_token_id": 0,
}


def sentencepiece(text: str) -> list[int]:
    """The definition: join the neighbors whose union scores best, leftmost first, until none is a piece."""
    pieces = list("▁" + text.replace(" ", "▁")) if text else []
    ids = {token: i for i, token in enumerate(SPM_TOKENS)}
    while True:
        unions = [
            (-SPM_SCORES[ids[pieces[i] + pieces[i + 1]]], i)
            for i in range(len(pieces) - 1)
            if pieces[i] + pieces[i + 1] in ids
        ]
        if not unions:
            break
        i = min(unions)[1]
        pieces[i : i + 2] = [pieces[i] + pieces[i + 1]]
    return [
        token_id
        for piece in pieces
        for token_id in (
            [ids[piece]] if piece in ids else [ids[f"<0x{byte:02X}>"] for byte in piece.encode()]
        )
    ]


@pytest.fixture(scope="module")
def spm(write_gguf: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_gguf(
        GGUFFile(write_gguf(tmp_path_factory.mktemp("spm") / "spm.gguf", SPM_METADATA))
    )


@settings(max_examples=examples(300), deadline=None)
@given(text=st.text(alphabet="abc é🙂\n", max_size=24))
def test_sentencepiece_joins_by_score(spm: Tokenizer, text: str) -> None:
    ids = spm.encode(text, add_special_tokens=False)
    assert ids == sentencepiece(text)
    assert spm.decode(ids) == text
    assert joined(spm, ids) == ((" " + text) if text else "").encode()


def test_sentencepiece_adds_bos_and_falls_back_to_bytes(spm: Tokenizer) -> None:
    assert spm.encode("é") == [1, SPM_TOKENS.index("▁"), SPM_TOKENS.index("é")]
    ids = spm.encode("ü</s>", add_special_tokens=False)
    assert [spm.token_bytes(i) for i in ids] == [b" ", b"\xc3", b"\xbc", b"</s>"]
    assert [spm.is_special(i) for i in ids] == [False, False, False, True]
    assert spm.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": ...}, r"no tokenizer \(tokenizer.ggml.tokens is missing\)"),
        ({"model": "t5"}, "tokenizer.ggml.model is 't5', which is not supported; supported are: gpt2, llama"),
        ({"pre": "unheard-of"}, "tokenizer.ggml.pre is 'unheard-of', which is not supported; .*smollm"),
        ({"merges": ...}, "the field tokenizer.ggml.merges is missing"),
        ({"merges": ["ab"]}, "merges is damaged: 'ab' is not a pair"),
        ({"merges": ["a never-a-token"]}, "the vocabulary is damaged: .*never-a-token"),
        ({"token_type": ...}, "token_type must hold one type for each"),
        ({"token_type": [1, 1]}, "token_type must hold one type for each"),
        ({"tokens": ["a", "b", "a"], "token_type": [1, 1, 1]}, "token 'a' appears 2 times"),
        ({"add_bos_token": True, "bos_token_id": ...}, "the field tokenizer.ggml.bos_token_id is missing"),
        ({"eos_token_id": 1 << 20}, "eos_token_id is 1048576, expected token ids from 0 to"),
        (
            {"bos_token_id": 1 << 20, "add_bos_token": True},
            "bos_token_id is 1048576, expected token ids from 0 to",
        ),
        ({"model": "llama", "scores": [0.0, 1.0]}, "scores must hold one score for each"),
        (
            {"model": "llama", "scores": [float("nan")], "tokens": ["a"], "token_type": [1]},
            "scores must hold one score",
        ),
        (
            {"model": "llama", "scores": [0.0], "tokens": ["a" * 5000], "token_type": [1]},
            "a token has 5000 characters",
        ),
    ],
)
def test_a_damaged_vocabulary_is_refused(
    make_gguf: MakeGGUF, smollm: CoreTokenizer, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load(make_gguf, gguf_metadata(smollm, "smollm"), **changes)
    assert "tiny.gguf" in str(caught.value)


@pytest.mark.parametrize("key", ["bos", "padding", "unknown", "seperator", "cls", "mask"])
def test_a_token_that_nothing_needs_may_be_unknown(
    make_gguf: MakeGGUF, smollm: CoreTokenizer, caplog: pytest.LogCaptureFixture, key: str
) -> None:
    tokenizer = load(make_gguf, gguf_metadata(smollm, "smollm"), **{f"{key}_token_id": 1 << 20})
    assert f"tokenizer.ggml.{key}_token_id is 1048576, which is ignored" in caplog.text
    assert tokenizer.encode("a") == smollm.encode("a").ids


def test_all_named_tokens_of_gguf_are_there_for_templates(make_gguf: MakeGGUF, smollm: CoreTokenizer) -> None:
    ids = {
        "unknown_token_id": 3,
        "seperator_token_id": 4,
        "padding_token_id": 5,
        "cls_token_id": 6,
        "mask_token_id": 7,
    }
    tokenizer = load(make_gguf, gguf_metadata(smollm, "smollm"), **ids)
    assert {name: smollm.token_to_id(text) for name, text in tokenizer.special_tokens.items()} == {
        "bos_token": 1,
        "eos_token": 0,
        "unk_token": 3,
        "sep_token": 4,
        "pad_token": 5,
        "cls_token": 6,
        "mask_token": 7,
    }


def test_gguf_chat_templates(make_gguf: MakeGGUF, smollm: CoreTokenizer) -> None:
    metadata = gguf_metadata(smollm, "smollm")
    assert load(make_gguf, metadata).chat_template is None
    metadata |= {"tokenizer.chat_template": "{{ a }}", "tokenizer.chat_template.tool_use": "{{ b }}"}
    tokenizer = load(make_gguf, metadata)
    assert tokenizer.chat_template == "{{ a }}"
    assert tokenizer.chat_templates == {"default": "{{ a }}", "tool_use": "{{ b }}"}


def write_folder(folder: Path, core: CoreTokenizer, config: dict[str, Any] | None = None) -> Path:
    core.save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_a_tokenizer_that_makes_the_library_panic_is_refused(tmp_path: Path) -> None:
    core = train("smollm")
    core.save(str(tmp_path / "tokenizer.json"))
    document = json.loads((tmp_path / "tokenizer.json").read_text())
    document["normalizer"] = {"type": "Replace", "pattern": {"String": ""}, "content": "x"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    with pytest.raises(ConfigError, match=r"tokenizer\.json: not a valid tokenizer \(index out of bounds"):
        Tokenizer.from_folder(tmp_path)


def test_a_folder_is_read(tmp_path: Path) -> None:
    core = train("smollm")
    core.post_processor = processors.TemplateProcessing(
        single="<|start|> $A", special_tokens=[("<|start|>", 1)]
    )
    core.enable_truncation(4)
    core.enable_padding(length=50)
    config = {
        "bos_token": {"content": "<|start|>", "lstrip": False},
        "eos_token": "<|end|>",
        "pad_token": None,
        "chat_template": "{{ messages }}",
    }
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, core, config))
    core.no_truncation()
    core.no_padding()
    for text in TEXTS:
        assert tokenizer.encode(text) == core.encode(text).ids  # neither cut nor padded
    assert tokenizer.special_tokens == {"bos_token": "<|start|>", "eos_token": "<|end|>"}
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (1, (0,))
    assert tokenizer.chat_template == "{{ messages }}"


def test_a_folder_with_tokenizer_json_only(tmp_path: Path, smollm: CoreTokenizer) -> None:
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, smollm))
    assert (tokenizer.special_tokens, tokenizer.bos_token_id, tokenizer.eos_token_ids) == ({}, None, ())
    assert tokenizer.chat_template is None


def test_named_templates_and_the_jinja_file(tmp_path: Path, smollm: CoreTokenizer) -> None:
    named = [{"name": "default", "template": "A"}, {"name": "tool_use", "template": "B"}]
    folder = write_folder(tmp_path, smollm, {"chat_template": named})
    assert Tokenizer.from_folder(folder).chat_templates == {"default": "A", "tool_use": "B"}
    (folder / "chat_template.jinja").write_text("C {{ 'é' }}\n", encoding="utf-8")
    assert Tokenizer.from_folder(folder).chat_templates == {"default": "C {{ 'é' }}\n"}


def test_special_tokens_map_is_the_fallback(tmp_path: Path, smollm: CoreTokenizer) -> None:
    folder = write_folder(tmp_path, smollm)
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": "<|end|>"}}))
    assert Tokenizer.from_folder(folder).eos_token_ids == (0,)


@pytest.mark.parametrize("template", [7, ["A"], [{"name": "default"}]])
def test_a_malformed_chat_template_is_refused(tmp_path: Path, smollm: CoreTokenizer, template: Any) -> None:
    folder = write_folder(tmp_path, smollm, {"chat_template": template})
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json: chat_template is .*expected a"):
        Tokenizer.from_folder(folder)


def test_a_folder_without_tokenizer_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no tokenizer\.json; copy it from the model's page"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"\n")
    with pytest.raises(ConfigError, match=r"only tokenizer\.model; convert it once with transformers"):
        Tokenizer.from_folder(tmp_path)


def test_a_broken_tokenizer_json_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match=r"tokenizer\.json: not a valid tokenizer"):
        Tokenizer.from_folder(tmp_path)


def test_a_tokenizer_without_bytes_is_refused(tmp_path: Path) -> None:
    core = CoreTokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    core.decoder = decoders.WordPiece()
    with pytest.raises(ConfigError, match=r"tokenizer\.json: the tokenizer's decoder is .*\(WordPiece\)"):
        Tokenizer.from_folder(write_folder(tmp_path, core))


def test_metaspace_decoders_are_understood(tmp_path: Path) -> None:
    core = CoreTokenizer(models.BPE({"▁": 0, "a": 1, "▁a": 2, "<0x41>": 3}, [("▁", "a")]))
    core.pre_tokenizer = pre_tokenizers.Metaspace()
    core.decoder = decoders.Metaspace()
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, core))
    # Without byte fallback in the decoder, <0x41> is five ordinary characters and two brackets.
    assert [tokenizer.token_bytes(i) for i in range(4)] == [b" ", b"a", b" a", b"<0x41>"]


INVALID = [b"\xe2\x82", b"\xff", b"\xff\xfe", b"\xe2\x82\xff", b"\x80a", b"\xf0\x9f\x98"]


@pytest.mark.parametrize("data", INVALID)
@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece"])
def test_streamed_and_whole_decoding_differ_for_invalid_bytes_as_documented(
    spm: Tokenizer, smollm: CoreTokenizer, tmp_path: Path, data: bytes, kind: str
) -> None:
    tokenizer = spm if kind == "sentencepiece" else Tokenizer.from_folder(write_folder(tmp_path, smollm))
    id_of = {tokenizer.token_bytes(i): i for i in reversed(range(tokenizer.vocab_size))}
    ids = [id_of[bytes([byte])] for byte in data]
    decoder = IncrementalDecoder(tokenizer, skip_special_tokens=True)
    streamed = "".join(decoder.push([token_id]) for token_id in ids) + decoder.flush()

    whole = tokenizer.decode(ids)

    assert streamed == data.decode("utf-8", "replace")
    if kind == "byte-level":
        assert whole == streamed
    else:
        assert whole == "\ufffd" * len(data)


def test_characters_without_a_token_are_counted(tmp_path: Path) -> None:
    alphabet = [
        char for char in sorted(pre_tokenizers.ByteLevel.alphabet()) if char not in "āĆ"
    ]  # 0x01, 0x06
    core = CoreTokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_tokens([AddedToken("<\x06>", normalized=False)])
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, core))

    def left_out(text: str) -> dict[str, int]:
        return tokenizer.left_out(text, tokenizer.encode(text))

    assert left_out("plain é") == {}
    assert left_out("a\x01b\x01\x06") == {"\x01": 2, "\x06": 1}
    assert left_out("<\x06>") == {}  # a token of its own has it
    assert left_out("<\x06>\x06") == {"\x06": 1}


def test_vocabularies_with_byte_fallback_leave_nothing_out(spm: Tokenizer) -> None:
    assert spm.left_out("a\x01", spm.encode("a\x01")) == {}
