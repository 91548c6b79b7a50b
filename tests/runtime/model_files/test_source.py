"""From the user's string to local files: folders, GGUF files, hub names; nothing is fetched from outside."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import msgspec
import pytest

from engine.runtime.errors import ConfigError
from engine.runtime.model_files.hub import wanted_files
from engine.runtime.model_files.source import ModelSource, resolve_source


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


@pytest.mark.parametrize(
    ("files", "wanted"),
    [
        (
            ["README.md", "config.json", "model.safetensors", "original/model.safetensors", "tokenizer.json"],
            ["config.json", "tokenizer.json", "model.safetensors"],
        ),
        (
            [
                "config.json",
                "consolidated.safetensors",
                "model-1.safetensors",
                "chat_template.jinja",
                "pytorch_model.bin",
            ],
            ["config.json", "chat_template.jinja", "model-1.safetensors"],
        ),
        (["config.json", "weights.safetensors"], ["config.json", "weights.safetensors"]),
    ],
)
def test_only_what_is_read_is_fetched(files: list[str], wanted: list[str]) -> None:
    assert wanted_files("org/name", files) == wanted


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (["config.json", "pytorch_model.bin"], "org/name: has only pickled weights"),
        (["a-Q4_K_M.gguf"], "has GGUF files only; .*hf download org/name a-Q4_K_M.gguf"),
        (["README.md"], r"has no config\.json"),
        ([], r"has no config\.json"),
    ],
)
def test_repositories_without_readable_weights(files: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        wanted_files("org/name", files)


COMMIT = "a" * 40
HUB_FILES = {
    "config.json": b"{}",
    "model.safetensors": b"weights",
    "tokenizer.json": b"{}",
    "README.md": b"text",
}


class FakeHub(BaseHTTPRequestHandler):
    """The hub's answers for one model, org/tiny, and for org/gated."""

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def answer(self) -> None:
        path = self.path.partition("?")[0].strip("/")
        name = path.rpartition("/")[2]
        if "org/gated" in path:
            self.reply(403, b"{}", {"X-Error-Code": "GatedRepo"})
        elif "org/tiny" not in path:
            self.reply(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        elif path.startswith("api/models/org/tiny/tree"):
            tree = [
                {"type": "file", "path": f, "size": len(d), "oid": "0" * 40} for f, d in HUB_FILES.items()
            ]
            self.reply(200, json.dumps(tree).encode(), {})
        elif path.startswith("api/models/org/tiny"):
            siblings = [{"rfilename": file} for file in HUB_FILES]
            self.reply(200, json.dumps({"id": "org/tiny", "sha": COMMIT, "siblings": siblings}).encode(), {})
        elif name in HUB_FILES:
            self.reply(200, HUB_FILES[name], {"X-Repo-Commit": COMMIT, "ETag": f'"{name}-etag"'})
        else:
            self.reply(404, b"", {"X-Error-Code": "EntryNotFound"})

    def reply(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def hub_url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), FakeHub)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def resolve_in_subprocess(model: str, hub_url: str, home: Path) -> str:
    """What `resolve_source` gives or says, in a new process: huggingface_hub reads settings at import."""
    code = (
        "import sys\n"
        "from engine.runtime.errors import ConfigError\n"
        "from engine.runtime.model_files.source import resolve_source\n"
        "try: source = resolve_source(sys.argv[1]); print(source.kind, source.name, source.path)\n"
        "except ConfigError as error: print('ConfigError', error)\n"
    )
    settings = {
        "HF_ENDPOINT": hub_url,
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_OFFLINE": "0",
    }
    result = subprocess.run(
        [sys.executable, "-c", code, model],
        env=os.environ | settings,
        cwd=home,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_a_hub_name_is_fetched_and_then_works_offline(hub_url: str, tmp_path: Path) -> None:
    kind, name, path = resolve_in_subprocess("org/tiny", hub_url, tmp_path).split(" ")
    assert (kind, name) == ("hf", "org/tiny")
    assert sorted(os.listdir(path)) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert Path(path, "model.safetensors").read_bytes() == b"weights"

    unreachable = "http://127.0.0.1:9"
    assert resolve_in_subprocess("org/tiny", unreachable, tmp_path) == f"{kind} {name} {path}"


def test_what_the_hub_refuses_is_explained(hub_url: str, tmp_path: Path) -> None:
    answer = resolve_in_subprocess("org/absent", hub_url, tmp_path)
    assert answer.startswith(
        "ConfigError org/absent: neither a local folder or .gguf file nor a model on the hub"
    )
    answer = resolve_in_subprocess("org/gated", hub_url, tmp_path)
    assert answer.startswith("ConfigError org/gated: access must be granted")


def test_an_unreachable_hub_is_said(tmp_path: Path) -> None:
    answer = resolve_in_subprocess("org/tiny", "http://127.0.0.1:9", tmp_path)
    assert answer.startswith("ConfigError org/tiny: the hub cannot be reached (")
    assert "pass a local folder or .gguf file" in answer
