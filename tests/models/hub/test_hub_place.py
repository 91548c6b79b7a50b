"""From a name to local files: no request for what is there, and what offline starts find."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants, hf_hub_download, snapshot_download

from engine.launch.resolve.model_resolution import find_model
from engine.models.hub.hub_cache import HubCache, forget_listing
from engine.models.hub.hub_name import HubName
from engine.models.hub.hub_place import cached_place, hub_place, local_repos, near_names
from engine.models.hub.pull import HubUnreachableError
from engine.models.hub.wanted_files import NoModelError
from engine.models.removal import remove
from engine.models.source import found_tower, not_fetched, resolve_source
from engine.runtime.config.engine_config import ModelConfig
from engine.runtime.errors import ConfigError
from tests.fake_hub import FakeHub

FILES = {
    "config.json": b"{}",
    "tokenizer.json": b"{}",
    "tokenizer_config.json": b"{ }",
    "model.safetensors": b"weights",
    "README.md": b"text",
}
NAME = HubName("org/tiny")


@pytest.fixture
def tiny(hub: FakeHub) -> FakeHub:
    hub.repos["org/tiny"].commit(FILES, "v1")
    return hub


def test_a_start_with_what_is_there_makes_no_request(tiny: FakeHub) -> None:
    place = hub_place(NAME)
    tiny.repos["org/tiny"].commit({**FILES, "config.json": b'{"newer": 1}'})
    tiny.requests.clear()

    assert hub_place(NAME) == place
    assert not_fetched("org/tiny") == ""
    assert resolve_source("org/tiny", fetch=False).path == str(place)
    assert tiny.requests == []


def test_settings_alone_are_enough_without_weights(tiny: FakeHub) -> None:
    place = hub_place(NAME, need_weights=False)
    assert not (place / "model.safetensors").exists()
    assert cached_place(NAME) is None
    assert not_fetched("org/tiny") == "org/tiny, from the hub"
    assert (hub_place(NAME) / "model.safetensors").exists()


def test_a_revision_is_found_by_branch_and_by_commit(tiny: FakeHub) -> None:
    old = tiny.repos["org/tiny"].refs["v1"]
    tiny.repos["org/tiny"].commit({**FILES, "config.json": b'{"newer": 1}'})
    assert hub_place(NAME).name != old
    assert hub_place(HubName("org/tiny", "v1")).name == old
    tiny.requests.clear()
    assert hub_place(HubName("org/tiny", old)).name == old
    assert resolve_source("org/tiny@v1").name == "org/tiny"
    assert tiny.requests == []


@pytest.mark.parametrize("offline", [True, False])
def test_what_other_tools_have_downloaded_works_offline(
    tiny: FakeHub, hub_folder: Path, monkeypatch: pytest.MonkeyPatch, offline: bool
) -> None:
    """File by file, as transformers does: nothing tells which files the repository has besides."""
    for name in FILES:
        hf_hub_download("org/tiny", name, cache_dir=hub_folder)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert sorted(path.name for path in hub_place(NAME).iterdir()) == sorted(FILES)


def test_files_of_other_tools_are_completed_once(tiny: FakeHub, hub_folder: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        hf_hub_download("org/tiny", name, cache_dir=hub_folder)
    tiny.requests.clear()
    assert (hub_place(NAME) / "tokenizer.json").exists()
    assert (tiny.num_requests("storage"), tiny.num_requests("listing")) == (0, 1)
    tiny.requests.clear()
    hub_place(NAME)
    assert tiny.requests == []


def test_huggingface_hub_finds_what_the_engine_has_downloaded(tiny: FakeHub, hub_folder: Path) -> None:
    place = hub_place(NAME)
    assert snapshot_download("org/tiny", cache_dir=hub_folder, local_files_only=True) == str(place)


def test_a_tokenizer_alone_is_no_model(
    tiny: FakeHub, hub_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hf_hub_download("org/tiny", "tokenizer.json", cache_dir=hub_folder)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(HubUnreachableError, match="the model is not complete in"):
        hub_place(NAME)


def test_gguf_models_are_known_by_their_names(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repos["org/tiny"].commit({"m-Q4_0.gguf": b"GGUF4", "m-Q8_0.gguf": b"GGUF8"})
    name = HubName("org/tiny", quantization="Q4_0")
    place = hub_place(name)
    assert place.name == "m-Q4_0.gguf"
    forget_listing("org/tiny", place.parent.name)
    hub.requests.clear()
    assert hub_place(name) == place
    assert hub.requests == []

    source = resolve_source("org/tiny:Q4_0") if place.read_bytes()[:4] == b"GGUF" else None
    assert source is not None
    assert (source.kind, source.name, source.path) == ("gguf", "org/tiny:Q4_0", str(place))
    with pytest.raises(NoModelError, match=r"it has Q4_0, Q8_0: choose one, such as org/tiny:Q4_0"):
        resolve_source("org/tiny")
    with pytest.raises(NoModelError, match=r"it has Q4_0, Q8_0"):
        resolve_source("org/tiny:Q2_K")


def test_a_file_that_was_removed_is_downloaded_again(tiny: FakeHub) -> None:
    place = hub_place(NAME)
    (place / "tokenizer.json").resolve().unlink()
    assert cached_place(NAME) is None
    assert (hub_place(NAME) / "tokenizer.json").read_bytes() == FILES["tokenizer.json"]


def test_a_use_is_noted_in_the_time_of_access(tiny: FakeHub) -> None:
    import os

    weights = hub_place(NAME) / "model.safetensors"
    os.utime(weights, (1.0, 2.0))
    before_s = time.time()
    hub_place(NAME)
    assert weights.stat().st_atime >= before_s - 1
    assert weights.stat().st_mtime == 2.0


def test_a_damaged_listing_is_asked_for_again(tiny: FakeHub, tmp_path: Path) -> None:
    hub_place(NAME)
    for path in (tmp_path / "cache" / "listings").rglob("*.json"):
        path.write_text("{")
    tiny.requests.clear()
    hub_place(NAME)
    assert [request.kind for request in tiny.requests] == ["listing"]


def test_names_that_are_absent_offline(tiny: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub_place(NAME)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match=r"HF_HUB_OFFLINE is set\) .* on this machine are org/tiny; check"):
        resolve_source("org/other")
    with pytest.raises(
        ConfigError, match="org/other: is not on this machine; `engine pull org/other` downloads it"
    ):
        resolve_source("org/other", fetch=False)


def test_near_names() -> None:
    known = ["Qwen/Qwen3-0.6B", "org/tiny", "smollm2"]
    assert near_names("qwen/qwen3-0.6", known) == ["Qwen/Qwen3-0.6B"]
    assert near_names("tiny", known) == ["org/tiny"]
    assert near_names("zzz", known) == []


def test_an_interrupted_pull_leaves_the_old_revision(tiny: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    from engine.models.hub.pull import pull

    old = hub_place(NAME)
    tiny.repos["org/tiny"].commit({**FILES, "model.safetensors": b"newer weights"})
    tiny.cuts["model.safetensors"] = [3] + [0] * 6
    with pytest.raises(HubUnreachableError):
        pull(NAME)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert hub_place(NAME) == old
    assert HubCache("org/tiny").commit_of("main") == old.name


VLM = {
    "Q4_0/m.gguf": b"GGUF4",
    "m-Q8_0.gguf": b"GGUF8",
    "mmproj-m-F16.gguf": b"GGUFt",
    "mmproj-m-F32.gguf": b"GGUF32",
}


@pytest.mark.parametrize("model", ["Q8_0", "Q4_0/m"])
def test_a_tower_comes_with_its_gguf_model_and_is_found(hub: FakeHub, model: str) -> None:
    hub.repos["org/vlm"].commit(VLM)
    source = resolve_source(f"org/vlm:{model}")
    assert hub.num_requests("storage") == 2
    tower = Path(found_tower(source))
    assert tower.name == "mmproj-m-F16.gguf" and tower.read_bytes() == b"GGUFt"
    hub.requests.clear()
    assert resolve_source(f"org/vlm:{model}") == source and hub.requests == []


def test_a_model_that_came_without_its_tower_serves_text_offline_and_gets_it_else(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repos["org/vlm"].commit(VLM)
    name = HubName("org/vlm", quantization="Q8_0")
    tower = hub_place(name).with_name("mmproj-m-F16.gguf")
    tower.unlink()
    assert (
        not_fetched("org/vlm:Q8_0") == "" and found_tower(resolve_source("org/vlm:Q8_0", fetch=False)) == ""
    )
    hub_place(name)
    assert tower.exists()


def test_a_model_whose_tower_cannot_be_downloaded_serves_text(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repos["org/vlm"].commit(VLM)
    name = HubName("org/vlm", quantization="Q8_0")
    place = hub_place(name, need_tower=False)
    assert not place.with_name("mmproj-m-F16.gguf").exists()
    hub.requests.clear()
    assert hub_place(name, need_tower=False) == place and hub.requests == []
    del hub.repos["org/vlm"]

    assert hub_place(name) == place


@pytest.mark.parametrize("settings", [{"language_model_only": True}, {"task": "embed"}])
def test_a_model_for_text_comes_without_its_tower(hub: FakeHub, settings: dict[str, Any]) -> None:
    hub.repos["org/vlm"].commit(VLM)
    source = find_model(ModelConfig(model="org/vlm:Q8_0", **settings))
    assert hub.num_requests("storage") == 1 and found_tower(source) == ""


def test_the_last_model_takes_its_tower_along(hub: FakeHub) -> None:
    hub.repos["org/vlm"].commit(VLM)
    names = [f"org/vlm:{model}" for model in ("Q8_0", "Q4_0/m")]
    places = [Path(found_tower(resolve_source(name))) for name in names]
    remove(names[0], {})
    assert places[0] == places[1] and places[0].exists()
    remove(names[1], {})
    assert not places[0].exists() and local_repos() == []
