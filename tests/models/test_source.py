"""From the user's string to local files: folders, GGUF files, built-in names; hub names are in `hub/`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from engine.models.source import ModelSource, is_same_model, not_fetched, resolve_source
from engine.runtime.errors import ConfigError


def make_folder(folder: Path, *files: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in files:
        (folder / name).write_text("{}")
    return folder


def test_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_folder(tmp_path / "org" / "tiny-llama", "config.json", "model.safetensors")
    expected = ModelSource("hf", str(folder), "tiny-llama")
    assert resolve_source(str(folder)) == expected
    monkeypatch.chdir(tmp_path)
    assert resolve_source("org/tiny-llama") == expected  # what is here wins over the hub
    monkeypatch.chdir(folder)
    assert resolve_source(".") == expected


def test_the_source_travels_in_a_message(tmp_path: Path) -> None:
    source = resolve_source(str(make_folder(tmp_path, "config.json", "model.safetensors")))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(source), type=ModelSource) == source


def test_a_folder_of_the_hubs_cache_bears_the_models_name(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--org--tiny-llama" / "snapshots" / "0123abc"
    make_folder(snapshot, "config.json", "model.safetensors")
    assert resolve_source(str(snapshot)).name == "org/tiny-llama"


def test_a_gguf_file(make_gguf: Callable[..., Path], tmp_path: Path) -> None:
    path = make_gguf({})
    assert resolve_source(str(path)) == ModelSource("gguf", str(path), "tiny")
    assert resolve_source(str(tmp_path)) == ModelSource(
        "gguf", str(path), "tiny"
    )  # the only one in its folder
    (tmp_path / "other.gguf").write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match=r"several GGUF files, .*other\.gguf, tiny\.gguf"):
        resolve_source(str(tmp_path))


def test_dummy_weights_need_no_files(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, "config.json")
    assert resolve_source(str(folder), need_weights=False).kind == "hf"
    with pytest.raises(ConfigError, match=r"there are no \.safetensors files"):
        resolve_source(str(folder))


def test_shards_must_be_complete(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, "config.json", "model-1.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}))
    with pytest.raises(ConfigError, match=r"1 of 2 weight files are missing, first model-2\.safetensors"):
        resolve_source(str(folder))
    make_folder(folder, "model-2.safetensors")
    assert resolve_source(str(folder)).kind == "hf"
    index.write_text(json.dumps({"weight_map": {"a": "../secret.safetensors"}}))
    with pytest.raises(ConfigError, match="outside of the model's folder"):
        resolve_source(str(folder))
    index.write_text("{}")
    with pytest.raises(ConfigError, match="the field weight_map is missing"):
        resolve_source(str(folder))


@pytest.mark.parametrize("weights", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickles_are_refused_with_the_reason(tmp_path: Path, weights: str) -> None:
    folder = make_folder(tmp_path, "config.json", weights)
    with pytest.raises(ConfigError, match=r"pickled weights .* loading them runs code"):
        resolve_source(str(folder))


@pytest.mark.parametrize(
    "model", ["./absent", "/absent/model", "absent.gguf", "org/absent.gguf", "absent", "a/b/c", ""]
)
def test_what_is_no_hub_name_is_not_looked_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    monkeypatch.chdir(tmp_path)
    if model == "":
        (tmp_path / "config.json").touch()
    with pytest.raises(
        ConfigError, match=r"there is no such folder or \.gguf file|there are no \.safetensors"
    ):
        resolve_source(model)


def test_other_files_and_empty_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        resolve_source(str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"\0" * 16)
    with pytest.raises(ConfigError, match=r"model\.safetensors: not a GGUF file"):
        resolve_source(str(tmp_path / "model.safetensors"))


@pytest.mark.parametrize("model", [None, "default", "smollm2", "SmolLM2-135M", "smollm2-135m-instruct"])
def test_names_of_the_default_model(
    model: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENGINE_CACHE_DIR", str(tmp_path))
    assert not_fetched(model).startswith("the default model, ")
    with pytest.raises(ConfigError, match="`engine pull smollm2` downloads it"):
        resolve_source(model, fetch=False)


def test_another_built_in_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENGINE_CACHE_DIR", str(tmp_path))
    assert not_fetched("MiniLM") == "all-MiniLM-L6-v2, 80 MiB"
    with pytest.raises(ConfigError, match="`engine pull minilm` downloads it"):
        resolve_source("minilm", fetch=False)
    assert is_same_model("minilm", "all-MiniLM-L6-v2")
    assert not is_same_model("minilm", "SmolLM2-135M-Instruct")
    assert is_same_model("minilm", "minilm")  # another model, served under that name


def test_a_folder_wins_over_a_built_in_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_folder(tmp_path / "smollm2", "config.json", "model.safetensors")
    monkeypatch.chdir(tmp_path)
    assert resolve_source("smollm2").path == str(folder)
    assert not_fetched("smollm2") == ""


def test_a_mistyped_name_is_told_with_near_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"smolm2: there is no .* \(did you mean smollm2"):
        resolve_source("smolm2")
