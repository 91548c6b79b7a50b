from __future__ import annotations

import http.client
import logging

import httpx
import pytest

from engine.runtime.config.server_config import ServerConfig
from engine.runtime.errors import ConfigError
from engine.runtime.messages import Finish, FinishKind
from engine.tokenizer_manager.http.guards.auth import read_keys
from engine.tokenizer_manager.http.port import is_loopback
from engine.tokenizer_manager.http.routes import ROUTES
from tests.tokenizer_manager.conftest import Serve, Served
from tests.tokenizer_manager.fake_engine import WAIT_S, row, say_all

KEY = "sk-ключ-1"  # a key may have any characters; it is compared as UTF-8 bytes


def status(url: str, method: str, path: str, authorization: bytes | None = None) -> int:
    """Over http.client, which sends paths and headers as they are."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"))
    try:
        connection.putrequest(method, path)
        connection.putheader("Content-Length", "0")
        if authorization is not None:
            connection.putheader("Authorization", authorization)
        connection.endheaders()
        return connection.getresponse().status
    finally:
        connection.close()


def test_every_route_but_health_and_ping_needs_the_key(serve: Serve):
    served = serve(say_all("x"), api_key=(KEY,))
    for route in ROUTES:
        path = route.path.replace("{model}", "x")
        assert status(served.url, route.method, path) == (200 if path in ("/health", "/ping") else 401), path
        assert status(served.url, route.method, path, f"Bearer {KEY}".encode()) != 401


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/nothing",
        "/docs",
        "/openapi.json",
        "//v1/models",
        "/v1//models",
        "/V1/models",
        "/v1/models/",
        "/v1/./models",
        "/v1/%6dodels",
        "/%2fv1/models",
        "/health/",
        "//health",
        "/HEALTH",
        "/health/../v1/models",
        "/health%2f..%2fv1/models",
        "/health;/v1/models",
        "*",
        "http://x/v1/models",
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST", "HEAD", "OPTIONS", "FOO"])
def test_no_way_of_writing_a_path_goes_round_the_key(keyed, path, method):
    assert status(keyed, method, path) in (400, 401)


@pytest.fixture(scope="module")
def keyed(stopped_servers):
    from tests.tokenizer_manager.conftest import _served

    with _served(stopped_servers, say_all("x"), {"api_key": (KEY,)}) as served:
        yield served.url


@pytest.mark.parametrize(
    "authorization",
    [
        b"",
        b"Bearer",
        b"Bearer ",
        b"Bearer wrong",
        b"Bearer sk-\xff\xfe",
        "Bearer sk-ключ-".encode(),
        "Bearer sk-ключ-12".encode(),
        "Basic sk-ключ-1".encode(),
        "sk-ключ-1".encode(),
        "Bearer sk-ключ-1".encode("utf-16-le"),
        b"Bearer " + b"x" * 10_000,
    ],
)
def test_a_wrong_key_is_a_401_whatever_its_bytes(keyed, authorization):
    if b"\n" in authorization or b"\0" in authorization:
        authorization = authorization.replace(b"\0", b"\x7f")
    assert status(keyed, "GET", "/v1/models", authorization) in (400, 401)


def test_the_right_key_opens(keyed):
    assert status(keyed, "GET", "/v1/models", f"Bearer {KEY}".encode()) == 200
    assert status(keyed, "GET", "/v1/models", f"bearer  {KEY} ".encode()) == 200


def test_a_refusal_says_what_to_send(serve: Serve):
    reply = serve(api_key=("k",)).client.get("/v1/models")

    assert reply.headers["www-authenticate"] == "Bearer"
    assert reply.json()["error"]["code"] == "invalid_api_key"
    assert "Authorization: Bearer" in reply.json()["error"]["message"]


def test_the_key_appears_nowhere(serve: Serve):
    served = serve(say_all("x"), api_key=("sk-secret",))
    served.client.headers["Authorization"] = "Bearer sk-secret"
    for path in ("/server_info", "/metrics", "/openapi.json", "/docs"):
        reply = served.client.get(path)
        assert reply.status_code == 200
        assert "sk-secret" not in reply.text


# ---------------------------------------------------------------- several keys, and the admin's

PROMPT = {"prompt": "hi", "max_tokens": 5}


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def error_code(reply: httpx.Response) -> str:
    return str(reply.json()["error"]["code"])


def test_every_key_of_flags_and_file_opens(serve: Serve, tmp_path):
    path = tmp_path / "keys"
    path.write_text("# of the team\nk3\n\n  k4  \n", encoding="utf-8")
    client = serve(say_all("x"), api_key=("k1", "k2"), api_key_file=str(path)).client
    for key in ("k1", "k2", "k3", "k4"):
        assert client.post("/v1/completions", json=PROMPT, headers=bearer(key)).status_code == 200
    for key in ("# of the team", "k5", "k1k2", "k"):
        assert client.post("/v1/completions", json=PROMPT, headers=bearer(key)).status_code == 401


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"api_key": ("",)}, "api_key: a key is empty"),
        ({"api_key": ("a\nb",)}, "control characters"),
        ({"api_key": (" a",)}, "spaces at its ends"),
        ({"api_key": ("a",), "admin_api_key": "a"}, "admin_api_key is also one of the clients' keys"),
        ({"admin_api_key": ""}, "admin_api_key: a key is empty"),
        ({"api_key_file": "/does/not/exist"}, "/does/not/exist: the API keys cannot be read: No such file"),
    ],
)
def test_keys_that_nobody_could_use_are_refused_at_start(settings, message):
    with pytest.raises(ConfigError, match=message):
        read_keys(ServerConfig(**settings))


@pytest.mark.parametrize(
    ("content", "message"), [(b"# none\n\n", "no API key in it"), (b"\xff", "not UTF-8")]
)
def test_a_file_without_keys_does_not_open_the_server(tmp_path, content, message):
    path = tmp_path / "keys"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        read_keys(ServerConfig(api_key_file=str(path)))


def test_a_file_that_an_editor_began_with_a_byte_order_mark_has_the_same_keys(tmp_path):
    path = tmp_path / "keys"
    path.write_bytes(b"\xef\xbb\xbfk1\r\nk2\r\n")
    assert read_keys(ServerConfig(api_key_file=str(path))).clients == ("k1", "k2")


CONTROL = [
    ("/flush_cache", None),
    ("/flush_cache?tier=device", None),
    ("/abort_request", {"abort_all": True}),
    ("/start_profile", None),
]


@pytest.mark.parametrize(("path", "body"), CONTROL)
def test_control_needs_the_admin_key_where_there_is_one(serve: Serve, path, body):
    client = serve(say_all("x"), api_key=("client",), admin_api_key="admin").client

    assert client.post(path, json=body).status_code == 401
    refused = client.post(path, json=body, headers=bearer("client"))
    assert (refused.status_code, error_code(refused)) == (403, "admin_key_required")
    assert client.post(path, json=body, headers=bearer("admin")).status_code == 200
    assert client.post("/v1/completions", json=PROMPT, headers=bearer("admin")).status_code == 200


@pytest.mark.parametrize(("path", "body"), CONTROL)
def test_with_an_admin_key_alone_everyone_may_ask_and_only_the_admin_control(serve: Serve, path, body):
    client = serve(say_all("x"), admin_api_key="admin").client

    assert client.post("/v1/completions", json=PROMPT).status_code == 200
    assert client.post(path, json=body).status_code == 403
    assert client.post(path, json=body, headers=bearer("wrong")).status_code == 403
    assert client.post(path, json=body, headers=bearer("admin")).status_code == 200


@pytest.mark.parametrize("api_key", [(), ("client",)])
@pytest.mark.parametrize(("path", "body"), CONTROL)
def test_without_an_admin_key_control_is_for_this_machine_only(serve: Serve, path, body, api_key):
    headers = bearer("client")
    here = serve(say_all("x"), api_key=api_key, loopback=True).client
    assert here.post(path, json=body, headers=headers).status_code == 200
    reachable = serve(say_all("x"), api_key=api_key, loopback=False).client
    refused = reachable.post(path, json=body, headers=headers)
    assert (refused.status_code, error_code(refused)) == (403, "admin_key_required")
    assert "--admin-api-key" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("address", "only_here"),
    [
        *(("127.0.0.1", True), ("127.8.9.1", True), ("::1", True)),
        *(("0.0.0.0", False), ("::", False), ("192.0.2.1", False), ("fe80::1%eth0", False)),
    ],
)
def test_which_addresses_are_this_machine_only(address, only_here):
    assert is_loopback(address) is only_here


def test_a_client_ends_its_own_requests_and_nobody_elses(serve: Serve):
    served = serve(api_key=("a", "b"), admin_api_key="admin")
    waiting = served.post_later("/v1/completions", json=PROMPT, headers=bearer("a"))
    request = served.engine.next_request()

    def abort(key: str) -> int:
        reply = served.client.post("/abort_request", json={"rid": request.rid}, headers=bearer(key))
        return int(reply.json()["aborted"])

    assert abort("b") == 0
    assert served.engine.aborts.empty()
    assert abort("a") == 1
    assert served.engine.next_abort().rid == request.rid
    assert abort("admin") == 1
    served.engine.say(row(request, "", total=0, finish=Finish(FinishKind.ABORT)))
    assert waiting.result(WAIT_S).status_code == 200


# ---------------------------------------------------------------- tenants


def extra_keys(served: Served, key: str, **fields: object) -> tuple[str, str]:
    """Namespace and tenant of a request with this key."""
    assert served.client.post("/v1/completions", json=PROMPT | fields, headers=bearer(key)).status_code == 200
    request = served.engine.next_request()
    return request.extra_key, request.tenant


def test_isolated_tenants_share_no_prefix_whatever_salt_they_choose(serve: Serve):
    served = serve(say_all("x"), api_key=("a", "b"), isolate_tenants=True)
    own, _ = extra_keys(served, "a")
    other, _ = extra_keys(served, "b")
    assert own != other
    assert own == extra_keys(served, "a")[0]
    salts = {own, other, "", own.rstrip(":"), "x"}
    namespaces = {key: {extra_keys(served, key, cache_salt=salt)[0] for salt in salts} for key in "ab"}
    assert not namespaces["a"] & namespaces["b"]
    assert len(namespaces["a"]) == len(salts)
    assert all(part not in {"a", "b"} for part in own.split(":"))  # never the key itself


def test_isolated_tenants_cannot_be_accounted_as_somebody_else(serve: Serve):
    served = serve(say_all("x"), api_key=("a", "b"), isolate_tenants=True)
    _, plain = extra_keys(served, "a")
    assert extra_keys(served, "b", user=plain)[1] != plain
    assert extra_keys(served, "a", user="u")[1] != extra_keys(served, "b", user="u")[1]


def test_isolated_pins_stand_in_the_callers_namespace(serve: Serve):
    served = serve(say_all("x"), api_key=("a", "b"), isolate_tenants=True)
    own, _ = extra_keys(served, "a", cache_salt="s")
    pin = {"prompt": "hi", "ttl": 5, "cache_salt": "s"}
    assert served.client.post("/v1/cache/pins", json=pin, headers=bearer("a")).status_code == 200
    assert served.engine.pins.get(timeout=WAIT_S).extra_key == own


def test_why_tells_no_isolated_tenant_where_else_a_prefix_is_cached(serve: Serve):
    served = serve(say_all("x"), api_key=("a",), admin_api_key="admin", isolate_tenants=True)
    assert served.client.get("/v1/requests/x/why", headers=bearer("a")).status_code == 403
    assert served.client.get("/v1/requests/x/why", headers=bearer("admin")).status_code == 404


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/flush_cache", None),
        ("POST", "/clear_hicache_storage_backend", None),
        ("POST", "/abort_request", {"abort_all": True}),
        ("POST", "/start_profile", None),
        ("POST", "/stop_profile", None),
        ("GET", "/log_level", None),
        ("PUT", "/log_level", {"level": "debug"}),
        ("GET", "/v1/requests", None),
        ("GET", "/v1/requests/x/why", None),
    ],
)
def test_no_isolated_tenant_is_an_admin_because_of_where_the_server_listens(serve: Serve, method, path, body):
    """Tenants come through a proxy on this machine, too."""
    client = serve(say_all("x"), api_key=("a", "b"), isolate_tenants=True, loopback=True).client
    refused = client.request(method, path, json=body, headers=bearer("a"))
    assert (refused.status_code, error_code(refused)) == (403, "admin_key_required")


def test_without_isolation_prefixes_are_shared(serve: Serve):
    served = serve(say_all("x"), api_key=("a", "b"))
    assert extra_keys(served, "a")[0] == extra_keys(served, "b")[0] == ""


def test_isolation_needs_keys_to_tell_tenants_apart():
    with pytest.raises(ConfigError, match=r"isolate_tenants is True, .* set api_key"):
        ServerConfig(isolate_tenants=True)


def test_a_salt_is_short(serve: Serve):
    reply = serve(say_all("x")).client.post("/v1/completions", json=PROMPT | {"cache_salt": "x" * 257})
    assert reply.json()["error"]["param"] == "cache_salt"


# ---------------------------------------------------------------- what gets into the log


def test_neither_prompts_nor_keys_nor_control_characters_get_into_the_log(serve: Serve, caplog):
    caplog.set_level(logging.DEBUG)
    served = serve(say_all("secret answer"), api_key=("secret-key",))
    headers = bearer("secret-key")
    served.client.post("/v1/completions", json=PROMPT | {"prompt": "secret prompt"}, headers=headers)
    served.client.post("/v1/completions", json=PROMPT | {"stop": ["secret stop", ""]}, headers=headers)
    served.client.post("/v1/completions", json={"prompt": {"secret": 1}}, headers=headers)
    served.client.post("/v1/completions", json=PROMPT, headers=bearer("secret-wrong"))
    status(served.url, "GET", "/%1b[2J%0alevel=error")
    for record in caplog.records:
        if record.name.startswith("engine"):
            assert "secret" not in record.getMessage()
            assert record.getMessage().isprintable()
