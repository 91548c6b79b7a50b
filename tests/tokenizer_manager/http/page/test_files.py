"""The page at `/`: who receives it, what its headers forbid, and what a page may do on its own server."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from engine.runtime.config.server_config import ServerConfig
from engine.tokenizer_manager.http import page
from engine.tokenizer_manager.http.page.files import accepts_html
from tests.tokenizer_manager.conftest import Serve
from tests.tokenizer_manager.fake_engine import say_all

HTML = {"Accept": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"}
FOLDER = Path(page.__file__).parent / "web"
FILES = sorted(str(path.relative_to(FOLDER)) for path in FOLDER.rglob("*.*"))
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
PROMPT = {"prompt": "hi", "max_tokens": 5}


@pytest.mark.parametrize(
    ("accept", "html"),
    [
        (b"", False),
        (b"*/*", False),
        (b"application/json", False),
        (b"application/json, */*", False),
        (b"text/*", False),
        (b"text/html;q=0", False),
        (b"text/html; q=0.000", False),
        (b"text/html", True),
        (b"TEXT/HTML;charset=utf-8", True),
        (b"application/json;q=0.9, text/html;q=0.1", True),
        (HTML["Accept"].encode(), True),
    ],
)
def test_only_who_names_html_receives_it(accept, html):
    assert accepts_html({b"accept": accept} if accept else {}) is html


def test_a_browser_receives_the_page_and_a_program_what_it_expects(serve: Serve):
    client = serve().client
    page = client.get("/", headers=HTML)
    assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert page.headers["vary"] == "accept"
    assert "<title>engine</title>" in page.text
    for accept in ("*/*", "application/json"):
        assert client.get("/", headers={"Accept": accept}).text == "Ollama is running"


@pytest.mark.parametrize("name", FILES)
def test_every_file_is_served_with_its_type_and_without_a_key(serve: Serve, name):
    client = serve(api_key=("k",)).client
    reply = client.get(f"/page/{name}")
    assert reply.status_code == 200
    assert reply.headers["content-type"].split(";")[0] == TYPES[Path(name).suffix]
    assert reply.headers["x-content-type-options"] == "nosniff"
    assert reply.content == (FOLDER / name).read_bytes()
    assert client.head(f"/page/{name}").status_code == 200


@pytest.mark.parametrize("path", ["/", "/docs"])
def test_the_policy_allows_no_inline_script_and_nothing_from_elsewhere(serve: Serve, path):
    policy = serve().client.get(path, headers=HTML).headers["content-security-policy"]
    rules = {name: values for name, *values in (rule.split() for rule in policy.split("; "))}
    assert rules["default-src"] == ["'none'"]
    assert rules["base-uri"] == rules["form-action"] == rules["frame-ancestors"] == ["'none'"]
    sources = {value for name, values in rules.items() for value in values if name.endswith("-src")}
    assert all(value in ("'none'", "'self'") or value.startswith("'sha256-") for value in sources)


@pytest.mark.parametrize(
    "path", ["/page/", "/page/x.js", "/page/../files.py", "/page/%2e%2e/files.py", "/pages"]
)
def test_nothing_else_is_open(serve: Serve, path):
    client = serve(api_key=("k",)).client
    for method in ("GET", "POST"):
        assert client.request(method, path, headers=HTML).status_code == 401


def test_with_keys_a_browser_reads_the_pages_and_no_data(serve: Serve):
    served = serve(api_key=("k",))
    open_paths = ("/", "/docs", "/openapi.json", "/health")
    for path in (*open_paths, "/server_info", "/v1/models", "/metrics", "/v1/requests"):
        status = served.client.get(path, headers=HTML).status_code
        assert status == (200 if path in open_paths else 401), path
    assert served.client.get("/docs", headers=HTML | {"Authorization": "Bearer x"}).status_code == 401
    assert served.client.post("/docs", headers=HTML).status_code == 401


def test_without_the_page_nothing_of_it_is_there(serve: Serve):
    served = serve(say_all("x"), page=False)
    assert served.client.get("/", headers=HTML).text == "Ollama is running"
    assert served.client.get("/page/start.js").status_code == 404
    assert served.client.get("/docs", headers=HTML).status_code == 200
    own = served.client.post("/v1/completions", json=PROMPT, headers={"Origin": served.url})
    assert own.json()["error"]["code"] == "origin_not_allowed"
    keyed = serve(page=False, api_key=("k",)).client
    for path in ("/", "/docs", "/openapi.json", "/page/start.js"):
        assert keyed.get(path, headers=HTML).status_code == 401


@pytest.mark.parametrize("loopback", [True, False])
@pytest.mark.parametrize(
    ("host", "allowed", "status"),
    [
        ("127.0.0.1:1", (), 200),
        ("localhost:1", (), 200),
        ("[::1]:1", (), 200),
        ("10.0.0.5", (), 200),
        ("gpu.internal:1", ("gpu.internal",), 200),
        ("evil.example:1", (), 403),
        ("evil.example:1", ("*",), 403),
    ],
)
def test_the_server_s_own_page_may_use_it_unless_its_name_could_be_rebound(
    serve: Serve, host, allowed, status, loopback
):
    client = serve(say_all("x"), allowed_host=allowed, loopback=loopback).client
    reply = client.post("/v1/completions", json=PROMPT, headers={"Host": host, "Origin": f"http://{host}"})
    assert reply.status_code == status, reply.text


@pytest.mark.parametrize(
    "origin",
    ["http://127.0.0.1:2", "http://127.0.0.1", "null", "file://127.0.0.1:1", "http://127.0.0.1:1.evil"],
)
def test_another_port_or_scheme_is_another_page(serve: Serve, origin):
    client = serve(say_all("x")).client
    reply = client.post("/v1/completions", json=PROMPT, headers={"Host": "127.0.0.1:1", "Origin": origin})
    assert reply.status_code == 403


def test_the_page_asks_for_nothing_from_elsewhere_and_makes_no_markup_of_text():
    sources = {name: (FOLDER / name).read_text(encoding="utf-8") for name in FILES}
    for name, source in sources.items():
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function", source
        ), name
        assert not re.search(r"(?:src|href)=\"(?:https?:)?//|@import|url\(", source), name
    assert not re.search(r"<script(?![^>]*src=)|\son\w+=|\sstyle=", sources["index.html"])


def test_the_page_is_on_unless_it_is_turned_off():
    assert ServerConfig().page
