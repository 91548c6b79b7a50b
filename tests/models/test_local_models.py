"""What is listed, and what `remove` frees."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub.utils import WeakFileLock  # type: ignore[attr-defined]  # not in its `__all__`

from engine.models.hub.built_in.fetch import write_stamp
from engine.models.hub.built_in.models import DEFAULT_MODEL, MINILM, BuiltInModel
from engine.models.hub.hub_name import HubName
from engine.models.hub.hub_place import hub_place
from engine.models.hub.pull import pull
from engine.models.local_models import LocalModel, ago, local_models, unfinished_bytes
from engine.models.removal import remove
from engine.runtime.errors import ConfigError
from tests.fake_hub import FakeHub, blob_of

CONFIG = json.dumps({"torch_dtype": "bfloat16"}).encode()
FILES = {"config.json": CONFIG, "tokenizer.json": b"{}", "model.safetensors": b"w" * 1000}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with FakeHub() as fake:
        fake.serve_this_process(tmp_path, tmp_path / "cache", monkeypatch)
        yield fake


def names() -> list[str]:
    return [model.name for model in local_models()]


def on_disk(tmp_path: Path) -> int:
    """Bytes of all contents."""
    blobs = (tmp_path / "hub").glob("models--*/blobs/*")
    return sum(path.stat().st_size for path in blobs)


def test_nothing_is_listed_on_a_new_machine(hub: FakeHub) -> None:
    assert local_models() == []
    assert unfinished_bytes() == 0


def test_the_list(hub: FakeHub, tmp_path: Path) -> None:
    commit = hub.repos["org/tiny"].commit(FILES)
    hub.repos["org/fp8"].commit({**FILES, "config.json": b'{"quantization_config": {"quant_method": "fp8"}}'})
    hub.repos["org/gguf"].commit({"m-Q4_0.gguf": b"GGUF4", "m-Q8_0.gguf": b"GGUF-8"})
    for name in ("org/tiny", "org/fp8"):
        hub_place(HubName(name))
    for quantization in ("Q4_0", "Q8_0"):
        hub_place(HubName("org/gguf", quantization=quantization))

    models = {model.name: model for model in local_models()}

    assert list(models) == ["org/fp8", "org/gguf:Q4_0", "org/gguf:Q8_0", "org/tiny"]
    tiny = models["org/tiny"]
    assert tiny == LocalModel(
        "org/tiny",
        "BF16",
        len(CONFIG) + 2 + 1000,
        commit,
        tiny.last_used_s,
        hub_place(HubName("org/tiny")),
        True,
    )
    assert models["org/fp8"].quantization == "fp8"
    assert (models["org/gguf:Q8_0"].quantization, models["org/gguf:Q8_0"].size_bytes) == ("Q8_0", 6)


def test_the_last_use(hub: FakeHub) -> None:
    hub.repos["org/tiny"].commit(FILES)
    place = hub_place(HubName("org/tiny"))
    os.utime(place / "model.safetensors", (1000.0, 500.0))
    os.utime(place / "config.json", (5000.0, 5000.0))  # other tools read it
    assert local_models()[0].last_used_s == 1000.0
    assert [ago(0), ago(995, 1000), ago(400, 1000), ago(1, 7300), ago(1, 200_000)] == [
        *("never", "just now", "10 minutes ago", "2 hours ago", "2 days ago")
    ]


def test_incomplete_models_are_listed_as_such(hub: FakeHub) -> None:
    hub.repos["org/tiny"].commit(FILES)
    hub_place(HubName("org/tiny"), need_weights=False)
    part = {f"m-Q4_0-0000{part}-of-00002.gguf": b"GGUF" + bytes([part]) for part in (1, 2)}
    hub.repos["org/split"].commit(part)
    (hub_place(HubName("org/split")).parent / "m-Q4_0-00002-of-00002.gguf").unlink()
    assert [(model.name, model.complete) for model in local_models()] == [
        ("org/split:Q4_0", False),
        ("org/tiny", False),
    ]


def test_remove_frees_only_what_no_other_revision_uses(hub: FakeHub, tmp_path: Path) -> None:
    hub.repos["org/tiny"].commit(FILES, "v1")
    pull(HubName("org/tiny", "v1"))
    hub.repos["org/tiny"].commit({**FILES, "config.json": b'{"n": 2}'})
    pull(HubName("org/tiny"))
    assert names() == ["org/tiny", "org/tiny@v1"]

    removed = remove("org/tiny@v1")

    assert (removed.num_files, removed.freed_bytes) == (3, len(CONFIG))
    assert names() == ["org/tiny"]
    assert (hub_place(HubName("org/tiny")) / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    assert not (tmp_path / "hub/models--org--tiny/refs/v1").exists()

    size = on_disk(tmp_path)
    assert remove("org/tiny").freed_bytes == size
    assert names() == []
    assert not (tmp_path / "hub/models--org--tiny").exists()
    assert list((tmp_path / "cache").rglob("*.json")) == []


def test_remove_of_the_default_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENGINE_CACHE_DIR", str(tmp_path))
    path = put_built_in(DEFAULT_MODEL)

    with pytest.raises(ConfigError, match="smollm2: the server with process id 7 uses it"):
        remove("smollm2", {str(path): 7})
    assert remove("smollm2", {str(tmp_path / "other.gguf"): 7}).freed_bytes == 4
    assert list((tmp_path / "models").iterdir()) == []


def test_a_built_in_folder_is_listed_and_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENGINE_CACHE_DIR", str(tmp_path))
    place = put_built_in(MINILM)
    (place / "config.json").write_text('{"torch_dtype": "float32"}')
    write_stamp(MINILM)
    (found,) = [model for model in local_models() if model.name == "minilm"]
    assert (found.quantization, found.path, found.complete) == ("F32", place, True)

    with pytest.raises(ConfigError, match="minilm: the server with process id 7 uses it"):
        remove("minilm", {str(place): 7})
    assert remove("all-minilm-l6-v2").num_files == 1 + len(MINILM.wheel.members)
    assert list((tmp_path / "models").iterdir()) == []
    with pytest.raises(ConfigError, match="minilm: is not on this machine"):
        remove("minilm")


def put_built_in(model: BuiltInModel) -> Path:
    """Files of four bytes, and the stamp of a model that was verified."""
    for member in model.wheel.members:
        model.place_of(member).parent.mkdir(parents=True, exist_ok=True)
        model.place_of(member).write_bytes(b"GGUF")
    write_stamp(model)
    return model.place


def test_remove_of_one_quantization_keeps_the_others(hub: FakeHub, tmp_path: Path) -> None:
    same = b"GGUF-same"
    hub.repos["org/gguf"].commit({"a-Q4_0.gguf": b"GGUF4", "a-Q8_0.gguf": same, "b-Q6_K.gguf": same})
    for quantization in ("Q4_0", "Q8_0", "Q6_K"):
        pull(HubName("org/gguf", quantization=quantization))

    assert remove("org/gguf:Q4_0").freed_bytes == 5
    assert remove("org/gguf:Q8_0").freed_bytes == 0  # the content of Q6_K
    assert names() == ["org/gguf:Q6_K"]
    assert remove("org/gguf:Q6_K").freed_bytes == len(same)
    assert names() == []
    assert not (tmp_path / "hub/models--org--gguf").exists()


def test_remove_of_everything_takes_interrupted_downloads_along(hub: FakeHub, tmp_path: Path) -> None:
    hub.repos["org/tiny"].commit(FILES)
    pull(HubName("org/tiny"))
    part = tmp_path / "hub/models--org--tiny/blobs" / (blob_of("x.gguf", b"new") + ".engine.incomplete")
    part.write_bytes(b"ne")
    assert unfinished_bytes() == 2
    remove("org/tiny")
    assert unfinished_bytes() == 0


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("org/absent", "org/absent: is not on this machine"),
        ("org/tinny", r"org/tinny: is not on this machine; did you mean org/tiny\?"),
        ("org/tiny@v2", "org/tiny@v2: is not on this machine"),
        ("org/tiny:Q4_0", "org/tiny:Q4_0: is not on this machine"),
        ("{folder}", "removes models that were pulled, by name"),
        ("./absent", "./absent: is not on this machine; `engine list` shows what is"),
        ("absent", "absent: is not on this machine; `engine list` shows what is"),
        ("tinny", r"tinny: is not on this machine; did you mean org/tiny\?"),
        ("smollm2", "smollm2: is not on this machine"),
    ],
)
def test_what_cannot_be_removed(hub: FakeHub, tmp_path: Path, model: str, message: str) -> None:
    hub.repos["org/tiny"].commit(FILES)
    pull(HubName("org/tiny"))
    with pytest.raises(ConfigError, match=message):
        remove(model.format(folder=tmp_path))
    assert names() == ["org/tiny"]


def test_a_model_that_is_being_downloaded_stays(hub: FakeHub, tmp_path: Path) -> None:
    hub.repos["org/tiny"].commit(FILES)
    pull(HubName("org/tiny"))
    (lock, *_) = (tmp_path / "hub/.locks/models--org--tiny").iterdir()
    with (
        WeakFileLock(lock),
        pytest.raises(ConfigError, match="org/tiny: is being downloaded; end that first"),
    ):
        remove("org/tiny")
    assert names() == ["org/tiny"]
