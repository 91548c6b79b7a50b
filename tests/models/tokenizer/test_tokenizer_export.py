"""A folder with a model's tokenizer for other programs."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.models.source import ModelSource
from engine.models.tokenizer.tokenizer import Tokenizer
from engine.models.tokenizer.tokenizer_export import TokenizerExport


@pytest.fixture
def tokenizer(tiny_model: Path) -> Tokenizer:
    return Tokenizer.from_folder(tiny_model)


def test_of_a_folder_it_is_that_folder(tokenizer: Tokenizer, tiny_model: Path) -> None:
    assert TokenizerExport(ModelSource("hf", str(tiny_model), "tiny"), tokenizer).folder() == tiny_model


def test_of_a_file_it_is_written_once_and_means_the_same(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENGINE_CACHE_DIR", str(tmp_path))
    source = ModelSource("gguf", "/tiny.gguf", "tiny")

    folders = {TokenizerExport(source, tokenizer).folder() for _ in range(2)}

    assert len(folders) == len(list((tmp_path / "tokenizers").iterdir())) == 1
    written = Tokenizer.from_folder(folders.pop())
    assert written.encode("hi <|im_end|>") == tokenizer.encode("hi <|im_end|>")
    assert written.chat_template == tokenizer.chat_template
    assert written.eos_token_ids == tokenizer.eos_token_ids


def test_where_nothing_can_be_written_that_is_an_error_and_leaves_nothing(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENGINE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("os.rename", refuse)

    with pytest.raises(OSError, match="full"):
        TokenizerExport(ModelSource("gguf", "/tiny.gguf", "tiny"), tokenizer).folder()

    assert list((tmp_path / "tokenizers").iterdir()) == []


def refuse(*_: object) -> None:
    raise OSError("the disk is full")
