from __future__ import annotations

from pathlib import Path

import pytest

from engine.model_runner.distributed.join_group import weights_fingerprint
from engine.runtime.errors import ConfigError

SIZE = 100_000


def write(folder: Path, weights: bytes) -> Path:
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(weights)
    return folder


def test_equal_files_have_one_fingerprint_wherever_they_lie(tmp_path):
    first, second = (write(tmp_path / name, bytes(SIZE)) for name in ("first", "second"))
    (second / "consolidated.safetensors").write_bytes(b"the same in another format, which nobody loads")

    assert weights_fingerprint(first, "safetensors") == weights_fingerprint(second, "safetensors")


@pytest.mark.parametrize(
    "weights", [bytes(SIZE - 1), b"\1" + bytes(SIZE - 1), bytes(SIZE - 1) + b"\1", b"\1" * SIZE]
)
def test_other_files_have_another_one(tmp_path, weights):
    first, second = write(tmp_path / "first", bytes(SIZE)), write(tmp_path / "second", weights)

    assert weights_fingerprint(first, "safetensors") != weights_fingerprint(second, "safetensors")


def test_a_single_file_and_weights_that_are_made_up_have_one_too(tmp_path):
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(b"")

    assert weights_fingerprint(gguf, "gguf") == weights_fingerprint(gguf, "gguf")
    assert weights_fingerprint(gguf, "gguf") != weights_fingerprint(tmp_path, "dummy")


def test_a_difference_in_any_part_of_a_split_model_shows(tmp_path):
    parts = [tmp_path / f"m-0000{part}-of-00003.gguf" for part in (1, 2, 3)]
    for part in parts:
        part.write_bytes(bytes(SIZE))
    equal = weights_fingerprint(parts[0], "gguf")
    for part in parts:
        part.write_bytes(bytes(SIZE - 1) + b"\1")
        assert weights_fingerprint(parts[0], "gguf") != equal
        part.write_bytes(bytes(SIZE))
    assert weights_fingerprint(parts[0], "gguf") == equal


def test_missing_files_are_named_as_in_loading(tmp_path):
    with pytest.raises(ConfigError, match=r"there is neither model\.safetensors nor"):
        weights_fingerprint(tmp_path, "safetensors")
