"""Files in place of others are recognized wherever a file is read."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.models.gguf.gguf_file import GGUFFile
from engine.models.model_files import damage, read_json, stand_in
from engine.models.source import resolve_source
from engine.models.tokenizer.tokenizer import Tokenizer
from engine.models.weight_files.safetensors_header import read_header, weight_files
from engine.runtime.errors import ConfigError

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a21\nsize 1234\n"
PAGE = b"\n <!DOCTYPE HTML>\n<title>Sign in</title>"


@pytest.mark.parametrize(
    ("content", "found"),
    [(POINTER, "Git LFS pointer"), (PAGE, "web page"), (b"<html>", "web page"), (b"", None), (b"{}", None)],
)
def test_what_a_file_is(tmp_path: Path, content: bytes, found: str | None) -> None:
    path = tmp_path / "file"
    assert stand_in(path) is None
    path.write_bytes(content)
    assert (found is None and stand_in(path) is None) or str(found) in str(stand_in(path))
    assert damage(path, "damaged; fix it").startswith(f"{path}: {'damaged' if found is None else 'it is a'}")


def gguf(folder: Path) -> None:
    resolve_source(str(folder / "model.gguf"))


def gguf_opened(folder: Path) -> None:
    GGUFFile(folder / "model.gguf")


def index(folder: Path) -> None:
    weight_files(folder)


def weights(folder: Path) -> None:
    read_header(folder / "model.safetensors")


def config(folder: Path) -> None:
    read_json(folder / "config.json")


def tokenizer(folder: Path) -> None:
    Tokenizer.from_folder(folder)


READERS = {
    gguf: "model.gguf",
    gguf_opened: "model.gguf",
    index: "model.safetensors.index.json",
    weights: "model.safetensors",
    config: "config.json",
    tokenizer: "tokenizer.json",
}


@pytest.mark.parametrize("content", [POINTER, PAGE], ids=["pointer", "page"])
@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.__name__)
def test_every_reader_says_so(tmp_path: Path, reader: object, content: bytes) -> None:
    assert callable(reader)
    (tmp_path / READERS[reader]).write_bytes(content)
    with pytest.raises(ConfigError, match=r"it is a (Git LFS pointer|web page), not .*; "):
        reader(tmp_path)
