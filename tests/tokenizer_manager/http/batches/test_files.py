"""`/v1/files`: forms that arrive in pieces, lists, expiry, and files that only their owner sees."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.tokenizer_manager.state.files import StoredFiles
from tests.tokenizer_manager.conftest import Serve, Served, _served
from tests.tokenizer_manager.fake_engine import ServerThread, say_all

LINES = b'{"custom_id": "a"}\n'


@pytest.fixture
def kept(serve: Serve, tmp_path: Path) -> Served:
    """A server with a state."""
    return serve(say_all("x"), state_dir=str(tmp_path / "state"))


@pytest.fixture(scope="module")
def empty(stopped_servers: list[ServerThread], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server with a state, in which the tests of a module leave nothing."""
    folder = tmp_path_factory.mktemp("state") / "state"
    with _served(stopped_servers, say_all("x"), {"state_dir": str(folder)}) as served:
        yield served


def upload(served: Served, content: bytes = LINES, **fields: str) -> httpx.Response:
    data = {"purpose": "batch"} | {
        name.replace("__", "[") + "]" * ("__" in name): v for name, v in fields.items()
    }
    return served.client.post("/v1/files", files={"file": ("in/requests.jsonl", content)}, data=data)


def on_disk(served: Served) -> list[str]:
    return [path.name for path in served.services.required_state.files.path("x").parent.iterdir()]


def test_a_file_comes_back_as_it_was_sent(kept):
    content = bytes(range(256)) * 20_000 + b"\r\n--boundary\r\n"
    sent = upload(kept, content).json()

    assert sent == {
        "id": sent["id"],
        "object": "file",
        "bytes": len(content),
        "created_at": sent["created_at"],
        "expires_at": sent["created_at"] + 30 * 86_400,
        "filename": "requests.jsonl",
        "purpose": "batch",
        "status": "processed",
    }
    assert kept.client.get(f"/v1/files/{sent['id']}").json() == sent
    received = kept.client.get(f"/v1/files/{sent['id']}/content")
    assert received.content == content
    assert received.headers["content-type"] == "application/octet-stream"
    assert kept.client.delete(f"/v1/files/{sent['id']}").json() == {
        "id": sent["id"],
        "object": "file",
        "deleted": True,
    }
    assert kept.client.get(f"/v1/files/{sent['id']}").status_code == 404
    assert kept.client.delete(f"/v1/files/{sent['id']}").status_code == 404
    assert on_disk(kept) == []


def test_without_a_folder_there_are_no_files(answering):
    for path in ("/v1/files", "/v1/files/file-1", "/v1/files/file-1/content"):
        error = answering.client.get(path).json()["error"]
        assert "start it with --state-dir DIR" in error["message"]
        assert error["code"] == "no_state_dir"


def test_a_list_has_pages(kept):
    ids = [upload(kept).json()["id"] for _ in range(3)]

    first = kept.client.get("/v1/files", params={"limit": 2}).json()
    rest = kept.client.get("/v1/files", params={"limit": 2, "after": first["last_id"]}).json()
    forward = kept.client.get("/v1/files", params={"order": "asc", "purpose": "batch"}).json()
    none = kept.client.get("/v1/files", params={"purpose": "batch_output"}).json()

    assert [each["id"] for each in first["data"]] == [ids[2], ids[1]]
    assert (first["first_id"], first["last_id"], first["has_more"]) == (ids[2], ids[1], True)
    assert [each["id"] for each in rest["data"]] == [ids[0]]
    assert not rest["has_more"]
    assert [each["id"] for each in forward["data"]] == ids
    assert none == {"object": "list", "data": [], "has_more": False}


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ({"limit": "0"}, 'limit is "0", but it must be an integer in [1, 10000]'),
        ({"limit": "many"}, 'limit is "many", but'),
        ({"order": "up"}, 'order is "up", but it must be one of asc, desc'),
        ({"after": "file-9"}, 'after is "file-9", but there is no such file'),
    ],
)
def test_a_bad_list_is_refused(empty, query, message):
    reply = empty.client.get("/v1/files", params=query)

    assert reply.status_code == 400
    assert reply.json()["error"]["message"].startswith(message)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"purpose": "fine-tune"}, "purpose"),
        ({"expires_after__anchor": "now", "expires_after__seconds": "3600"}, "expires_after.anchor"),
        ({"expires_after__anchor": "created_at", "expires_after__seconds": "60"}, "expires_after.seconds"),
        ({"expires_after__anchor": "created_at"}, "expires_after.seconds"),
        ({"color": "red"}, "color"),
    ],
)
def test_a_bad_field_leaves_no_file(empty, fields, param):
    reply = upload(empty, **fields)

    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)
    assert on_disk(empty) == []


def form(*parts: str, end: str = "--b--\r\n") -> bytes:
    return (
        "".join(f"--b\r\nContent-Disposition: form-data; {part}\r\n" for part in parts).encode()
        + end.encode()
    )


FILE = 'name="file"; filename="f"\r\n\r\nx'


@pytest.mark.parametrize(
    ("body", "content_type", "status", "message"),
    [
        (b"{}", "application/json", 415, "multipart/form-data with a boundary"),
        (b"", "multipart/form-data", 415, "multipart/form-data with a boundary"),
        (b"nonsense", "multipart/form-data; boundary=b", 400, "not a valid form"),
        (form(FILE, end=""), "multipart/form-data; boundary=b", 400, "its last boundary is missing"),
        (form('name="purpose"\r\n\r\nbatch'), "multipart/form-data; boundary=b", 400, "file is missing"),
        (form(FILE, FILE), "multipart/form-data; boundary=b", 400, "file is there twice"),
        (form(*['name="a"\r\n\r\nx'] * 2), "multipart/form-data; boundary=b", 400, "a is there twice"),
        (
            form('name="a"\r\n\r\n' + "x" * 2000),
            "multipart/form-data; boundary=b",
            400,
            "more than 1024 bytes",
        ),
        (
            form(*[f'name="{i}"\r\n\r\nx' for i in range(17)]),
            "multipart/form-data; boundary=b",
            400,
            "16 parts",
        ),
        (
            form('name="a"' + "".join(f"\r\nX-{i}: {'x' * 3000}" for i in range(4)) + "\r\n\r\nx"),
            "multipart/form-data; boundary=b",
            400,
            "the headers of a part have more than 8192 bytes",
        ),
        (form("x" * 5000), "multipart/form-data; boundary=b", 400, "not a valid form"),
        (b"--b\r\n" + b"A: b\r\n" * 20, "multipart/form-data; boundary=b", 400, "not a valid form"),
        (b"", f"multipart/form-data; boundary={'b' * 999}", 400, "not a valid form"),
    ],
)
def test_a_bad_form_is_refused(empty, body, content_type, status, message):
    reply = empty.client.post("/v1/files", content=body, headers={"Content-Type": content_type})

    assert reply.status_code == status
    assert message in reply.json()["error"]["message"]
    assert on_disk(empty) == []


def test_the_parameters_of_lists_are_described(empty):
    paths = empty.client.get("/openapi.json").json()["paths"]

    described = {
        path: [each["name"] for each in paths[path]["get"]["parameters"]]
        for path in ("/v1/files", "/v1/batches", "/v1/responses/{response_id}")
    }

    assert described == {
        "/v1/files": ["after", "limit", "order", "purpose"],
        "/v1/batches": ["after", "limit"],
        "/v1/responses/{response_id}": ["response_id", "stream", "starting_after"],
    }
    assert "The number of the last event before" in empty.client.get("/docs").text


def test_a_large_file_and_a_full_state_are_refused(serve: Serve, tmp_path):
    served = serve(say_all("x"), state_dir=str(tmp_path / "state"), max_file_mb=0.001)

    too_large = upload(served, b"x" * 2000)
    served.services.required_state.store.max_bytes = 100
    full = upload(served, b"x" * 60)

    assert (too_large.status_code, full.status_code) == (413, 507)
    assert "--max-file-mb" in too_large.json()["error"]["message"]
    assert "--state-max-gb" in full.json()["error"]["message"]
    assert on_disk(served) == []


def test_files_are_their_owners(serve: Serve, tmp_path):
    served = serve(say_all("x"), state_dir=str(tmp_path / "state"), api_key=("sk-a", "sk-b"))
    served.client.headers["Authorization"] = "Bearer sk-a"
    file_id = upload(served).json()["id"]

    def replies(key: str) -> dict[str, Any]:
        served.client.headers["Authorization"] = f"Bearer {key}"
        paths = (f"/v1/files/{file_id}", f"/v1/files/{file_id}/content", f"/v1/files?after={file_id}")
        return {path: served.client.get(path).status_code for path in paths}

    assert set(replies("sk-b").values()) == {404, 400}
    assert served.client.get("/v1/files").json()["data"] == []
    assert served.client.delete(f"/v1/files/{file_id}").status_code == 404
    assert set(replies("sk-a").values()) == {200}


def test_an_expired_file_is_gone_at_once_and_deleted_later(serve: Serve, tmp_path):
    served = serve(say_all("x"), state_dir=str(tmp_path / "state"))
    files = served.services.required_state.files
    assert files is not None
    sent = upload(served, expires_after__anchor="created_at", expires_after__seconds="3600").json()
    file_id = sent["id"]
    files._wall_clock = lambda: sent["created_at"] + 3600

    assert served.client.get(f"/v1/files/{file_id}").status_code == 404
    asyncio.run(files.delete_expired(lambda *_: True))
    assert on_disk(served) == [file_id]
    asyncio.run(files.delete_expired(lambda *_: False))
    assert on_disk(served) == []


def test_a_restart_keeps_files_and_removes_what_an_upload_left(kept):
    file_id = upload(kept).json()["id"]
    files = kept.services.required_state.files
    assert files is not None
    files.path(".partial-file-9").write_bytes(b"half")
    files.path("file-8").write_bytes(b"no row")
    files.path("thesis.tex").write_bytes(b"not ours")

    StoredFiles(files.store)

    assert set(on_disk(kept)) == {file_id, "thesis.tex"}
