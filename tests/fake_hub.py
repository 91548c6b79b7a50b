"""`FakeHub`: a hub on loopback for downloads: listings, contents with ranges, redirects, refusals, faults.

Large files are redirected to a storage host of another name, as the hub does. Faults are queues: each request takes the
next one.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final, NamedTuple, Self
from urllib.parse import unquote, urlsplit

import pytest
from huggingface_hub import close_session, constants

LARGE: Final = (".safetensors", ".gguf", ".bin")
TOKEN: Final = "hf_for_tests"


def commit_of(files: Mapping[str, bytes]) -> str:
    """The commit of a revision: other files have another one, as in git."""
    return hashlib.sha1(repr(sorted(files.items())).encode(), usedforsecurity=False).hexdigest()


@dataclass
class FakeRepo:
    """A repository: commit -> files; refs; who may read it.

    Attributes:
        gated: only `TOKEN` reads its contents; the listing is public.
        private: only `TOKEN` sees it.
    """

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    gated: bool = False
    private: bool = False

    def commit(self, files: Mapping[str, bytes], *refs: str) -> str:
        """Add a revision; branch main points to it, and `refs`."""
        commit = commit_of(files)
        self.commits[commit] = dict(files)
        self.refs |= dict.fromkeys(("main", *refs), commit)
        return commit


class Request(NamedTuple):
    """A request that arrived: `kind` is "listing", "file" or "storage"."""

    kind: str
    path: str
    range: str
    token: str


class FakeHub:
    """A context manager.

    Attributes:
        repos: name -> repository.
        cuts: file name -> bytes of the body after which the connection is closed, one per request.
        busy: answers of status and Retry-After instead, one per request of any kind.
        failing: file name -> status of the answers to requests of the file.
        wrong: file name -> number of times that its content is wrong.
        no_ranges: the storage ignores `Range`.
        hold: file name -> event that must be set before the body's second half is sent.
        requests: everything that arrived.
    """

    def __init__(self) -> None:
        self.repos: dict[str, FakeRepo] = defaultdict(FakeRepo)
        self.cuts: dict[str, list[int]] = defaultdict(list)
        self.busy: list[tuple[int, str]] = []
        self.failing: dict[str, int] = {}
        self.wrong: dict[str, int] = defaultdict(int)
        self.no_ranges = False
        self.hold: dict[str, threading.Event] = {}
        self.started: dict[str, threading.Event] = defaultdict(threading.Event)
        self.requests: list[Request] = []
        hub = self

        class Handler(_Handler):
            fake = hub

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self.port = self._server.server_port
        self.url = f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_exc_info: object) -> None:
        for event in self.hold.values():
            event.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def add_folder(self, name: str, folder: Path, *refs: str) -> str:
        """A revision with the files of a folder."""
        files = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
        return self.repos[name].commit(files, *refs)

    def environment(self, home: Path) -> dict[str, str]:
        """The variables with which a process uses this hub, and caches below `home`."""
        return {
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(home / "hf"),
            "HF_HUB_OFFLINE": "0",
            "HF_TOKEN": "",
            "ENGINE_CACHE_DIR": str(home / "cache"),
            "NO_PROXY": "*",
        }

    def serve_this_process(self, hf_home: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let this process use the hub: huggingface_hub reads its variables when it is imported."""
        monkeypatch.setattr(constants, "ENDPOINT", self.url)
        template = f"{self.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(hf_home / "hub"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(hf_home / "token"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("ENGINE_CACHE_DIR", str(cache))
        for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(time, "sleep", lambda _seconds: None)  # between attempts
        close_session()  # a client has the proxies of when it was made

    def num_requests(self, kind: str, name: str = "") -> int:
        """How many requests of a kind, for paths that end with `name`, have arrived."""
        return sum(request.kind == kind and request.path.endswith(name) for request in self.requests)


def blob_of(path: str, content: bytes) -> str:
    """The name of a content in the cache."""
    if path.endswith(LARGE):
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    fake: FakeHub

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path).strip("/")
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        listing = re.fullmatch(r"api/models/([^/]+/[^/]+)/revision/(.+)", path)
        content = re.fullmatch(r"([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        stored = re.fullmatch(r"storage/([^/]+/[^/]+)/([^/]+)/(.+)", path)
        kind = "listing" if listing else "storage" if stored else "file"
        self.fake.requests.append(Request(kind, path, self.headers.get("Range", ""), token))
        if self.fake.busy:
            status, retry_after = self.fake.busy.pop(0)
            self._reply(status, {"Retry-After": retry_after} if retry_after else {})
        elif (content or stored) and (failing := self.fake.failing.get(path.rpartition("/")[2])):
            self._reply(failing, {})
        elif stored:
            self._send(self.fake.repos[stored[1]].commits[stored[2]][stored[3]], stored[3])
        elif listing or content:
            match = listing or content
            assert match is not None
            repo = self.fake.repos.get(match[1])
            if repo is None or (repo.private and token != TOKEN):
                self._reply(401 if not token else 404, {"X-Error-Code": "RepoNotFound"})
                return
            commit = repo.refs.get(match[2], match[2])
            if commit not in repo.commits:
                self._reply(404, {"X-Error-Code": "RevisionNotFound"})
            elif listing:
                self._list(match[1], commit, repo.commits[commit])
            elif repo.gated and token != TOKEN:
                self._reply(403 if token else 401, {"X-Error-Code": "GatedRepo"})
            else:
                self._send_or_redirect(match[1], commit, match[3], repo.commits[commit])
        else:
            self._reply(404, {})

    def _list(self, name: str, commit: str, files: Mapping[str, bytes]) -> None:
        siblings: list[dict[str, Any]] = []
        for path, content in files.items():
            sibling: dict[str, Any] = {"rfilename": path, "size": len(content), "blobId": "0" * 40}
            if path.endswith(LARGE):
                sibling["lfs"] = {"sha256": blob_of(path, content), "size": len(content), "pointerSize": 130}
            else:
                sibling["blobId"] = blob_of(path, content)
            siblings.append(sibling)
        self._reply(200, {}, json.dumps({"id": name, "sha": commit, "siblings": siblings}).encode())

    def _send_or_redirect(self, name: str, commit: str, path: str, files: Mapping[str, bytes]) -> None:
        if path not in files:
            self._reply(404, {"X-Error-Code": "EntryNotFound"})
            return
        blob = f'"{blob_of(path, files[path])}"'
        headers = {"X-Repo-Commit": commit}
        if path.endswith(LARGE):
            storage = f"http://localhost:{self.fake.port}/storage/{name}/{commit}/{path}"
            size = {"X-Linked-Size": str(len(files[path])), "X-Linked-ETag": blob, "Location": storage}
            self._reply(302, headers | size)
        else:
            self._send(files[path], path, headers | {"ETag": blob})

    def _send(self, content: bytes, path: str, headers: Mapping[str, str] | None = None) -> None:
        headers = dict(headers or {})
        if self.fake.wrong[path] and self.command == "GET":
            self.fake.wrong[path] -= 1
            content = content[:-1] + bytes([content[-1] ^ 1])
        status, start = 200, 0
        match = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        if match and not self.fake.no_ranges:
            status, start = 206, int(match[1])
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        body = content[start:]
        if self.fake.cuts[path] and self.command == "GET":
            end = self.fake.cuts[path].pop(0)
            self._reply(status, headers | {"Content-Length": str(len(body))}, body[:end], cut=True)
            return
        self._reply(status, headers, body, hold=self.fake.hold.get(path), started=self.fake.started[path])

    def _reply(
        self,
        status: int,
        headers: Mapping[str, str],
        body: bytes = b"",
        *,
        cut: bool = False,
        hold: threading.Event | None = None,
        started: threading.Event | None = None,
    ) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            half = len(body) // 2 if hold else 0
            try:
                self.wfile.write(body[:half])
                self.wfile.flush()
                if started is not None:
                    started.set()
                if hold is not None:
                    hold.wait()
                self.wfile.write(body[half:])
            except (BrokenPipeError, ConnectionResetError):  # the client has ended
                cut = True
        if cut:
            self.close_connection = True

    def log_message(self, *_args: object) -> None:
        """Print nothing."""
