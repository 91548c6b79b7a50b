"""Downloads against a hub that fails in the ways of hubs, networks and users."""

from __future__ import annotations

import os
import shutil
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import constants, get_session, try_to_load_from_cache

from engine.models.hub.hub_cache import HubCache
from engine.models.hub.hub_name import HubName
from engine.models.hub.hub_place import pull_named
from engine.models.hub.pull import DownloadState, HubUnreachableError, Pulled, pull
from engine.runtime.errors import ConfigError
from tests.fake_hub import TOKEN, FakeHub, blob_of

NAME = HubName("org/tiny")
WEIGHTS = bytes(range(256)) * 4000
FILES = {
    "config.json": b"{}",
    "tokenizer.json": b'{"a": 1}',
    "model.safetensors": WEIGHTS,
    "README.md": b"text",
    "pytorch_model.bin": b"pickle",
}


@pytest.fixture
def tiny(hub: FakeHub) -> FakeHub:
    hub.repos["org/tiny"].commit(FILES)
    return hub


def blobs(hub_folder: Path) -> set[str]:
    return {path.name for path in (hub_folder / "models--org--tiny" / "blobs").iterdir()}


def test_brings_what_serving_needs_and_others_find_it(tiny: FakeHub, hub_folder: Path) -> None:
    states: list[DownloadState] = []

    pulled = pull(NAME, progress=states.append)

    assert sorted(os.listdir(pulled.place)) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert (pulled.place / "model.safetensors").read_bytes() == WEIGHTS
    assert blobs(hub_folder) == {blob_of(name, FILES[name]) for name in os.listdir(pulled.place)}
    found = try_to_load_from_cache("org/tiny", "model.safetensors", cache_dir=hub_folder)
    assert found == str(pulled.place / "model.safetensors")  # huggingface_hub reads the same layout
    total = sum(len(FILES[name]) for name in os.listdir(pulled.place))
    assert (pulled.total_bytes, pulled.new_bytes) == (total, total)
    assert (states[0].event, states[0].done_bytes, states[-1].event, states[-1].done_bytes) == (
        "begin",
        0,
        "end",
        total,
    )
    assert {state.file for state in states if state.event == "file"} == set(os.listdir(pulled.place))


def test_the_token_goes_to_the_hub_and_not_to_the_storage(
    tiny: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    pull(NAME)
    assert {request.token for request in tiny.requests if request.kind != "storage"} == {TOKEN}
    assert {request.token for request in tiny.requests if request.kind == "storage"} == {""}


def test_a_second_pull_only_asks_whether_there_is_a_newer_commit(tiny: FakeHub) -> None:
    first = pull(NAME)
    tiny.requests.clear()
    assert pull(NAME) == first._replace(new_bytes=0)
    assert [request.kind for request in tiny.requests] == ["listing"]


def test_a_newer_commit_brings_only_what_has_changed(tiny: FakeHub, hub_folder: Path) -> None:
    old = pull(NAME)
    tiny.repos["org/tiny"].commit({**FILES, "config.json": b'{"b": 2}'})
    tiny.requests.clear()

    new = pull(NAME)

    assert new.new_bytes == len(b'{"b": 2}')
    assert new.commit != old.commit
    assert HubCache("org/tiny").commit_of("main") == new.commit
    assert (new.place / "model.safetensors").read_bytes() == WEIGHTS
    assert tiny.num_requests("storage") == 0


def test_a_cut_connection_is_opened_again(tiny: FakeHub) -> None:
    tiny.cuts["model.safetensors"] = [1000, 0, 5000]
    assert (pull(NAME).place / "model.safetensors").read_bytes() == WEIGHTS
    assert tiny.num_requests("storage") == 4


def test_a_later_pull_brings_the_files_that_are_missing(
    tiny: FakeHub, hub_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # With one thread the small files are whole before the weights fail.
    monkeypatch.setattr("engine.models.hub.pull._PARALLEL", 1)
    tiny.cuts["model.safetensors"] = [300_000] + [0] * 6
    with pytest.raises(HubUnreachableError):
        pull(NAME)
    assert HubCache("org/tiny").commit_of("main") is None  # the revision appears when it is complete
    assert blobs(hub_folder) == {blob_of(name, FILES[name]) for name in ("config.json", "tokenizer.json")}
    tiny.requests.clear()

    pulled = pull(NAME)

    assert pulled.new_bytes == len(WEIGHTS)
    assert (pulled.place / "model.safetensors").read_bytes() == WEIGHTS
    assert {request.path.rpartition("/")[2] for request in tiny.requests if request.kind == "storage"} == {
        "model.safetensors"
    }


@pytest.mark.parametrize("file", ["model.safetensors", "config.json"])
def test_a_wrong_checksum_is_tried_again_once(tiny: FakeHub, hub_folder: Path, file: str) -> None:
    tiny.wrong[file] = 1
    assert (pull(NAME).place / file).read_bytes() == FILES[file]

    shutil.rmtree(hub_folder)
    published = blob_of(file, FILES[file])
    tiny.wrong[file] = 2
    with pytest.raises(
        ConfigError,
        match=rf"{file} has the wrong checksum twice \(\w+, published {blob_of(file, FILES[file])}",
    ):
        pull(NAME)
    assert not any(name.startswith(published) for name in blobs(hub_folder))


def test_a_busy_hub_is_named(tiny: FakeHub) -> None:
    tiny.busy = [(429, "7")] * 2  # huggingface_hub may ask for something else first
    with pytest.raises(ConfigError, match=r"org/tiny: \S+ answers 429 .*; try again later, or with HF_TOKEN"):
        pull(NAME)


@pytest.mark.parametrize("status", [403, 429, 500])
def test_a_file_that_the_hub_does_not_give_is_its_answer(tiny: FakeHub, status: int) -> None:
    tiny.failing["model.safetensors"] = status
    with pytest.raises(ConfigError, match=rf"org/tiny: \S+ answers {status} ") as raised:
        pull(NAME)
    assert isinstance(raised.value, HubUnreachableError) == (status != 403)


def test_gated_private_and_absent_models_say_what_to_do(
    tiny: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    pull(NAME)
    tiny.repos["org/gated"].commit(FILES)
    tiny.repos["org/gated"].gated = True
    tiny.repos["org/secret"].commit(FILES)
    tiny.repos["org/secret"].private = True
    with pytest.raises(
        ConfigError, match=rf"accept the terms at {tiny.url}/org/gated as you, then set HF_TOKEN"
    ):
        pull_named(HubName("org/gated"))
    with pytest.raises(ConfigError, match=r"org/secret: neither .*or it is private: set HF_TOKEN"):
        pull_named(HubName("org/secret"))
    with pytest.raises(ConfigError, match=r"org/tinny: neither .* did you mean org/tiny\?"):
        pull_named(HubName("org/tinny"))
    with pytest.raises(ConfigError, match="org/tiny: there is no revision 'v9'"):
        pull_named(HubName("org/tiny", "v9"))

    monkeypatch.setenv("HF_TOKEN", "hf_of_another_user")
    with pytest.raises(ConfigError, match=r"accept the terms at \S+ as the user of HF_TOKEN$"):
        pull_named(HubName("org/gated"))
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert pull_named(HubName("org/gated")).new_bytes > 0
    assert pull_named(HubName("org/secret")).new_bytes > 0


def test_an_unreachable_hub_is_told_at_once_with_what_is_here(
    tiny: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    pull(NAME)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(
        HubUnreachableError, match=r"the hub cannot be reached .* on this machine are org/tiny;"
    ):
        pull_named(HubName("org/other"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(HubUnreachableError, match=r"cannot be reached \(HF_HUB_OFFLINE is set\)"):
        pull_named(HubName("org/other"))


def test_a_proxy_of_the_environment_is_used(tiny: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    with pytest.raises(HubUnreachableError):
        pull(NAME)
    assert tiny.requests == []


def test_what_is_no_hub_is_told(hub: FakeHub) -> None:
    hub.repos["org/tiny"].commit({"../outside": b"x"})
    with pytest.raises(
        ConfigError, match=r"no list of files with sizes and hashes .* HF_ENDPOINT must be a hub"
    ):
        pull(NAME)


def test_a_full_disk_is_told_before_anything_is_downloaded(
    tiny: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = SimpleNamespace(total=2**30, used=2**30 - 4096, free=4096)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage)
    with pytest.raises(ConfigError, match=r"0\.00 GiB are to be downloaded, .* `engine rm` make room"):
        pull(NAME)
    assert tiny.num_requests("file") == 0


def test_a_folder_that_cannot_be_written(tiny: FakeHub, hub_folder: Path) -> None:
    hub_folder.parent.mkdir(parents=True)
    hub_folder.touch()
    with pytest.raises(ConfigError, match="cannot be stored in .* set HF_HOME to a writable folder"):
        pull(NAME)


def test_processes_that_pull_the_same_model_download_it_once(tiny: FakeHub) -> None:
    """Two threads stand for two processes: each has its own locks."""
    hold = tiny.hold["model.safetensors"] = threading.Event()
    results: list[Pulled] = []
    threads = [threading.Thread(target=lambda: results.append(pull(NAME))) for _ in range(2)]
    threads[0].start()
    while not tiny.num_requests("storage"):
        threads[0].join(0.01)
    threads[1].start()
    while tiny.num_requests("listing") < 2:
        threads[1].join(0.01)
    hold.set()
    for thread in threads:
        thread.join()
    assert [(result.place / "model.safetensors").read_bytes() == WEIGHTS for result in results] == [
        True,
        True,
    ]
    assert tiny.num_requests("storage") == 1


def test_split_gguf_models_come_whole(hub: FakeHub) -> None:
    parts = {f"Q4_0/m-Q4_0-0000{part}-of-00002.gguf": b"GGUF" + bytes([part]) for part in (1, 2)}
    hub.repos["org/tiny"].commit({**parts, "m-Q8_0.gguf": b"GGUF8"})

    pulled = pull(HubName("org/tiny", quantization="Q4_0"))

    assert pulled.place.name == "m-Q4_0-00001-of-00002.gguf"
    assert sorted(path.name for path in pulled.place.parent.iterdir()) == [
        name.rpartition("/")[2] for name in parts
    ]
    assert not (pulled.place.parent.parent / "m-Q8_0.gguf").exists()


def test_shards_that_the_index_names(hub: FakeHub) -> None:
    index = b'{"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}'
    files = {
        "config.json": b"{}",
        "model.safetensors.index.json": index,
        "a.safetensors": b"a",
        "b.safetensors": b"b",
    }
    hub.repos["org/tiny"].commit({**files, "c.safetensors": b"c"})
    assert sorted(os.listdir(pull(NAME).place)) == sorted(files)


def test_no_answer_is_an_unreachable_hub(tiny: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    library = type(get_session()).__module__.partition(".")[0]  # httpx, or its successor

    def fail(*_args: object, **_kwargs: object) -> None:
        raise sys.modules[library].ReadTimeout("")

    monkeypatch.setattr(type(get_session()), "send", fail)
    with pytest.raises(HubUnreachableError, match="no answer in time"):
        pull(NAME)
