"""The table of pre-tokenizers: every expression is one of the library, and names that belong together are equal."""

from __future__ import annotations

import pytest
from tokenizers import Regex, pre_tokenizers

from engine.models.gguf.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer

TEXTS = [
    "The quick brown fox can't jump over 12345 lazy dogs, WE'LL see: it's 2024!",
    "def main():\n    return {'naïve': 1.5, 'größe': 77777}\r\n\r\n\tpass   ",
    "HelloWorld 中文字符 ひらがな 한국어 🙂🙂 e\u0301 ½ ... --- /// हिन्दी ไทย",
]
PUBLISHED_WITH = {
    "llama": [
        "llama-bpe",
        "smollm",
        "tekken",
        "deepseek-llm",
        "deepseek-coder",
        "falcon3",
        "smaug-bpe",
        "viking",
    ],
    "qwen": ["qwen2", "deepseek-r1-qwen", "qwen35", "a.x-4.0", "megrez"],
    "phi": ["gpt-4o", "phi-2", "dbrx"],
    "others": ["glm4", "llama4", "deepseek-v3", "command-r", "exaone4", "gpt-2", "starcoder", "minicpm5"],
}


def pieces(pre: PreTokenizer, text: str) -> list[str]:
    splits = [pre_tokenizers.Split(Regex(regex), "isolated") for regex in pre.regexes]
    return [piece for piece, _ in pre_tokenizers.Sequence(splits).pre_tokenize_str(text)]


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_every_name_splits_and_loses_nothing(name: str) -> None:
    for text in TEXTS:
        assert "".join(pieces(PRE_TOKENIZERS[name], text)) == text
    assert len(pieces(PRE_TOKENIZERS[name], TEXTS[0])) > 5 or name == "laguna"


@pytest.mark.parametrize("name", [name for names in PUBLISHED_WITH.values() for name in names])
def test_names_of_published_files_are_known(name: str) -> None:
    assert name in PRE_TOKENIZERS


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("qwen2", "a 12345", ["a", " ", "1", "2", "3", "4", "5"]),
        ("llama-bpe", "a 12345", ["a", " ", "123", "45"]),
        ("gpt-2", "a 12345", ["a", " 12345"]),
        ("smollm", "a 123", ["a", " ", "1", "2", "3"]),
        ("falcon", "a 12345", ["a", " ", "123", "45"]),
        ("gpt-4o", "HelloWorld don't", ["Hello", "World", " don't"]),
        ("tekken", "HelloWorld don't", ["Hello", "World", " don", "'t"]),
        ("ufakzeka", "Ali'den", ["Ali", "'den"]),
        ("deepseek-v3", "a.b ひら12345", ["a", ".b", " ", "ひら", "123", "45"]),
        ("deepseek-coder", "x=1\n\ny", ["x", "=", "1", "\n", "\n", "y"]),
        ("tiny_aya", "1234567", ["1", "234", "567"]),
        ("seed-coder", "x!\n", ["x", "!", "\n"]),
        ("qwen35", "e\u0301a", ["e\u0301a"]),
    ],
)
def test_what_makes_a_name_different(name: str, text: str, expected: list[str]) -> None:
    assert pieces(PRE_TOKENIZERS[name], text) == expected
