"""Any body, on every endpoint of our own OpenAPI document: one answer, below 500, and if it is no success, an OpenAI
error object that says what is wrong; and the next request is served.

Without sockets: the application is called as uvicorn calls it, so that some thousand bodies take seconds.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.models.tokenizer.fim import FimTokens
from engine.tokenizer_manager.http.app import App
from engine.tokenizer_manager.http.native.wire import NativeSampling
from engine.tokenizer_manager.http.reference.field_notes import OF_CLASSIFIERS, OF_EMBEDDERS
from engine.tokenizer_manager.http.reference.openapi import ApiDocs
from engine.tokenizer_manager.http.routes import ROUTES
from engine.tokenizer_manager.http.schema.errors import ErrorBody, shape_of
from tests.adapter_files import write_adapter
from tests.selection import examples

from ..fake_engine import MODEL, SPEC, TOKENIZER, WAIT_S, FakeEngine, make_services, say_all
from .pooling.test_classify import CLASSIFIER
from .pooling.test_embeddings import ANSWER, EMBEDDER

DOCUMENT = ApiDocs(ROUTES, "0").document()
SCHEMAS: dict[str, Any] = DOCUMENT["components"]["schemas"]
# What needs a stored file has tests of its own: tests/tokenizer_manager/http/batches/.
POSTS = {
    route.path: route.request.__name__
    for route in ROUTES
    if route.request is not None and route.method == "POST" and 507 not in route.fails
}

OF_LIVE = {"/v1/chat/completions/control"}
"""They need a request that is generated: test_reasoning_control.py."""
UNAVAILABLE = {route.path for route in ROUTES if 501 in route.fails}

VALID: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3},
    "/v1/completions": {"prompt": "hi"},
    "/v1/chat/completions/render": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3},
    "/v1/completions/render": {"prompt": "hi"},
    "/generate": {"text": "hi", "sampling_params": {"max_new_tokens": 3}},
    "/infill": {"input_prefix": "hi", "input_suffix": "ho"},
    "/completion": {"prompt": "hi"},
    "/v1/chat/completions/control": {"id": "chatcmpl-0", "action": "reasoning_end"},
    "/apply-template": {"messages": [{"role": "user", "content": "hi"}]},
    "/embedding": {"content": "hi"},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [71, 72]},
    "/v1/cache/pins": {"prompt": "hi", "ttl": 1},
    "/open_session": {"timeout": 5},
    "/close_session": {"session_id": "s"},
    "/v1/kv_hints": {
        "protocol_version": 1,
        "session_id": "s",
        "actions": [{"action_id": "a", "action_type": "retain", "payload": {"ttl_s": 5}}],
    },
    "/v1/grammar/check": {"guided_json": {"type": "object"}},
    "/abort_request": {"rid": "cmpl-0"},
    "/pause_generation": {"mode": "in_place"},
    "/v1/responses": {"input": "hi", "max_output_tokens": 3},
    "/v1/responses/input_tokens": {"input": "hi"},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "hi"}]},
    "/api/chat": {"messages": [{"role": "user", "content": "hi"}], "options": {"num_predict": 3}},
    "/api/generate": {"prompt": "hi", "options": {"num_predict": 3}},
    "/api/show": {"model": MODEL},
    "/start_profile": {"duration": 1},
    "/v1/embeddings": {"input": "hi"},
    "/v1/rerank": {"query": "hi", "documents": ["ho"]},
    "/rerank": {"query": "hi", "documents": ["ho"]},
    "/v2/rerank": {"query": "hi", "documents": ["ho"]},
    "/v1/score": {"text_1": "hi", "text_2": "ho"},
    "/score": {"text_1": "hi", "text_2": "ho"},
    "/classify": {"input": "hi"},
    "/pooling": {"input": "hi"},
    "/v1/decisions": {"input": "hi", "questions": [{"type": "predicate", "instructions": "ho"}]},
    "/v1/systemone": {"state": "hi", "questions": {"a": {"type": "noul", "instructions": "ho"}}},
    "/v1/load_lora_adapter": {"lora_name": "sql", "lora_path": "sql", "load_inplace": True},
    "/load_lora_adapter": {"lora_name": "sql", "lora_path": "sql", "load_inplace": True},
    "/v1/unload_lora_adapter": {"lora_name": "sql", "force": True},
    "/unload_lora_adapter": {"lora_name": "sql", "force": True},
    "/api/embed": {"input": "hi"},
    "/api/pull": {},
    "/api/embeddings": {"prompt": "hi"},
}


@pytest.fixture(autouse=True, scope="module")
def fim() -> Iterator[None]:
    """A model that fills in the middle, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TOKENIZER, "fim", FimTokens(7, 8, 9))
        yield


class Reply(NamedTuple):
    """What the application sent."""

    status: int
    headers: dict[bytes, bytes]
    body: bytes


class Client:
    """Calls an application that answers every generation with "x", or for paths of embedders, one with vectors.

    Before each unload of an adapter it is loaded.
    """

    def __init__(self, adapters: Path) -> None:
        write_adapter(adapters / "sql", SPEC)
        lora = {"allow_runtime_lora": True, "lora_root": str(adapters)}
        self._loop = asyncio.new_event_loop()
        self._app = App(make_services(FakeEngine(say_all("x")), lora=lora))
        self._embedder = App(make_services(FakeEngine(ANSWER), pooling=EMBEDDER))
        self._classifier = App(make_services(FakeEngine(ANSWER), pooling=CLASSIFIER))

    def close(self) -> None:
        """Nothing may be left behind."""
        self._loop.close()

    def call(
        self, method: str, path: str, body: bytes = b"", headers: dict[str, bytes] | None = None
    ) -> Reply:
        """One request, in two pieces."""
        if "unload" in path:
            load = json.dumps(VALID["/load_lora_adapter"]).encode()
            self.call("POST", "/load_lora_adapter", load)
        return self._loop.run_until_complete(
            asyncio.wait_for(self._call(method, path, body, headers or {}), WAIT_S)
        )

    async def _call(self, method: str, path: str, body: bytes, headers: dict[str, bytes]) -> Reply:
        middle = len(body) // 2
        incoming = [
            {"type": "http.request", "body": body[:middle], "more_body": True},
            {"type": "http.request", "body": body[middle:], "more_body": False},
        ]
        sent: list[Any] = []
        stays = asyncio.Event()

        async def receive() -> Any:
            if incoming:
                return incoming.pop(0)
            await stays.wait()  # a client that waits for its answer
            return None

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {
            "type": "http",
            "method": method,
            "path": path,
            "headers": [(name.lower().encode(), value) for name, value in headers.items()],
        }
        others = dict.fromkeys(OF_EMBEDDERS, self._embedder) | dict.fromkeys(OF_CLASSIFIERS, self._classifier)
        await others.get(path, self._app)(scope, receive, send)
        [start] = [message for message in sent if message["type"] == "http.response.start"]
        parts = [message for message in sent if message["type"] == "http.response.body"]
        assert [part["more_body"] for part in parts].count(False) == 1, "exactly one end"
        return Reply(start["status"], dict(start["headers"]), b"".join(part["body"] for part in parts))


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    client = Client(tmp_path_factory.mktemp("adapters"))
    yield client
    client.close()


def check_error(path: str, document: dict[str, Any]) -> None:
    """An error object of the API that the path belongs to."""
    kind = shape_of(path).kind
    msgspec.convert(document, kind, strict=True)
    assert document.keys() <= set(kind.__struct_fields__)
    error = document["error"]
    message = error if isinstance(error, str) else error["message"]
    assert 0 < len(message) <= 2001
    if kind is ErrorBody:
        assert error["code"]
        assert error["type"]
        assert error["param"] is None or error["param"]


def _has_expired(body: bytes, reply: Reply) -> bool:
    """A queue timeout so short that it always ends before the first step."""
    return reply.status == 503 and b"queue_timeout" in body and b"queue_timeout" in reply.body


def check(client: Client, path: str, body: bytes) -> Reply:
    """One answer, as promised; then a good request is served."""
    reply = client.call("POST", path, body)
    other_model = path == "/api/pull" and reply.status == 501  # of a model that is not served, as documented
    assert reply.status < 500 or other_model or _has_expired(body, reply), reply
    if reply.status != 200:
        check_error(path, json.loads(reply.body))
    elif reply.headers[b"content-type"].startswith(b"text/event-stream"):
        assert reply.body.startswith((b"data: ", b"event: "))
    elif reply.headers[b"content-type"] == b"application/x-ndjson":
        assert all(isinstance(json.loads(line), dict) for line in reply.body.splitlines())
    else:
        json.loads(reply.body)
    good = client.call("POST", "/v1/completions", b'{"prompt": "hi", "max_tokens": 3}')
    assert good.status == 200
    return reply


# ---------------------------------------------------------------- values

INTEGERS = [
    0,
    1,
    -1,
    2,
    20,
    21,
    128,
    129,
    257,
    258,
    2**31 - 1,
    2**31,
    2**53,
    2**63 - 1,
    2**63,
    -(2**63),
    2**64,
    10**30,
]
FLOATS = [0.5, -0.5, 1e-300, 1e308, -1e308, float("nan"), float("inf"), float("-inf"), 2.0, 1e20, -0.0]
STRINGS = [
    "",
    "x",
    "\x00",
    "\ud800",
    "\udfff\ud800",
    "😀",
    "a\nb",
    "1",
    "true",
    "null",
    "\u2028",
    "x" * 5000,
    "user",
]
LONG = [
    [0] * 5000,
    ["x"] * 3000,
    [[0]] * 3000,
    {str(i): 1 for i in range(3000)},
    {f"k{i}": "v" for i in range(300)},
]

scalars = st.sampled_from([None, True, False, *INTEGERS, *FLOATS, *STRINGS])
values = st.recursive(
    scalars | st.text(max_size=5) | st.integers() | st.floats(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["role", "content", "type", "text", "name", "a", ""]), inner, max_size=3
        )
    ),
    max_leaves=8,
) | st.sampled_from(LONG)
parts = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "image_url", "x", 5, None]), "text": st.just("x") | values},
    optional={"image_url": values, "x": values},
)
messages = st.lists(
    st.fixed_dictionaries(
        {},
        optional={
            "role": st.sampled_from(
                ["user", "system", "assistant", "developer", "tool", "wizard", "", None, 5]
            ),
            "content": st.just("x") | st.lists(parts, max_size=3) | values,
            "name": values,
            "tool_calls": values,
            "reasoning_content": values,
        },
    )
    | values,
    max_size=4,
)
SAMPLING = [field.encode_name for field in msgspec.structs.fields(NativeSampling)]
sampling_params = st.dictionaries(st.sampled_from([*SAMPLING, "json_schema", "wibble"]), values, max_size=3)


def like(schema: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Values of the type that a schema asks for, with numbers and texts that are trouble."""
    if "anyOf" in schema:
        return st.one_of(*(like(option) for option in schema["anyOf"]))
    if "$ref" in schema:
        inner = SCHEMAS[schema["$ref"].rpartition("/")[2]]
        return st.dictionaries(st.sampled_from(list(inner["properties"])), scalars, max_size=3)
    match schema.get("type"):
        case "integer":
            return st.sampled_from(INTEGERS)
        case "number":
            return st.sampled_from([*INTEGERS, *FLOATS])
        case "string":
            return st.sampled_from(STRINGS) | st.text(max_size=8)
        case "boolean":
            return st.booleans()
        case "array":
            return st.lists(like(schema.get("items", {})), max_size=4)
        case "object":
            inner = schema.get("additionalProperties", {})
            return st.dictionaries(
                st.sampled_from(["0", "5", "257", "258", "-1", "²", "a", ""]), like(inner), max_size=3
            )
        case _:
            return values


BY_NAME = {"messages": messages, "sampling_params": sampling_params}


@st.composite
def bodies(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """A path and a body that was good before some of its fields were replaced, dropped or joined by others."""
    path = draw(st.sampled_from(sorted(POSTS)))
    names = [*SCHEMAS[POSTS[path]]["properties"], "tools", "response_format", "wibble", "", "\x00"]
    body = dict(VALID[path])
    for name in draw(st.lists(st.sampled_from(names), max_size=3, unique=True)):
        if draw(st.integers(0, 9)) == 0:
            body.pop(name, None)
        else:
            schema = SCHEMAS[POSTS[path]]["properties"].get(name, {})
            body[name] = draw(
                values | BY_NAME.get(name, like(schema) if isinstance(schema, dict) else values)
            )
    return path, body


FAST = settings(
    max_examples=examples(400),
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize=True,
    database=None,
)


def test_every_endpoint_that_takes_a_body_is_here(client: Client):
    assert VALID.keys() == POSTS.keys()
    for path, body in VALID.items():
        usual = 404 if path in OF_LIVE else 200
        assert client.call("POST", path, json.dumps(body).encode()).status == usual, path


@FAST
@given(case=bodies())
def test_any_fields(client: Client, case):
    path, body = case
    check(client, path, json.dumps(body).encode())


@pytest.mark.slow
@settings(FAST, max_examples=10_000)
@given(case=bodies())
def test_many_more_fields(client: Client, case):
    path, body = case
    check(client, path, json.dumps(body).encode())


@settings(FAST, max_examples=examples(150))
@given(path=st.sampled_from(sorted(POSTS)), value=values)
def test_any_json(client: Client, path, value):
    check(client, path, json.dumps(value).encode())


@settings(FAST, max_examples=examples(150))
@given(
    path=st.sampled_from(sorted(POSTS)),
    at=st.floats(0, 1),
    garbage=st.binary(max_size=4)
    | st.sampled_from([b'"', b"}", b"{", b",", b"\\", b"\xff", b"\xed\xa0\x80", b"\x00"]),
    drop=st.integers(0, 20),
)
def test_a_damaged_body(client: Client, path, at, garbage, drop):
    body = json.dumps(VALID[path]).encode()
    begin = int(at * len(body))
    check(client, path, body[:begin] + garbage + body[begin + drop :])


@settings(FAST, max_examples=examples(150))
@given(
    method=st.sampled_from(["GET", "POST", "HEAD", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "FOO"]),
    before=st.sampled_from(["", "/", *(route.path.partition("{")[0] for route in ROUTES)]),
    rest=st.text(max_size=6)
    | st.sampled_from(["/why", "\x00/why", "x" * 5000, "../..", "%00", "{id}/why", "\ud800"]),
    headers=st.dictionaries(
        st.sampled_from(
            ["authorization", "x-request-id", "content-length", "origin", "content-type", "expect"]
        ),
        st.binary(max_size=8) | st.sampled_from([b"Bearer \xff", b"-1", b"9" * 30, b"null", b"\x00\n"]),
        max_size=3,
    ),
)
def test_any_path_method_and_headers(client: Client, method, before, rest, headers):
    reply = client.call(method, before + rest, b"", headers)
    assert reply.status < 500 or (reply.status == 501 and before + rest in UNAVAILABLE)
    if reply.status >= 400:
        check_error(before + rest, json.loads(reply.body))
    assert reply.headers[b"x-request-id"].isascii()


@pytest.mark.slow
def test_extremes(client: Client):
    """What is too large to be drawn often."""
    completion, chat = VALID["/v1/completions"], VALID["/v1/chat/completions"]
    cases: list[tuple[str, dict[str, Any], str | None]] = [
        ("/v1/completions", completion | {"wibble": [[]] * 10**6}, None),
        ("/v1/completions", completion | {"stop": ["x"] * 5 * 10**4}, "stop"),
        ("/v1/completions", completion | {"logit_bias": {str(i): 1 for i in range(10**6)}}, None),
        ("/v1/completions", completion | {"prompt": [0] * 10**6}, "prompt"),
        ("/v1/completions", completion | {"prompt": ["x"] * 5 * 10**4}, "prompt"),
        ("/v1/completions", completion | {"prompt": ["x"] * 2000, "n": 128}, "n"),
        ("/v1/completions", completion | {"best_of": 10**6}, "best_of"),
        ("/v1/completions", completion | {"max_tokens": 10**18}, "max_tokens"),
        ("/v1/completions", completion | {"logit_bias": {str(i): 1 for i in range(10**4)}}, "logit_bias"),
        ("/v1/chat/completions", chat | {"messages": chat["messages"] * 10**4}, "messages"),
        ("/v1/chat/completions", chat | {"messages": [{"role": "user", "content": "x" * 10**7}]}, "messages"),
        ("/generate", {"text": "hi", "sampling_params": {"stop": ["x"] * 5 * 10**4}}, "sampling_params.stop"),
        ("/detokenize", {"tokens": [0] * 10**6}, "tokens"),
    ]
    for path, body, param in cases:
        reply = check(client, path, json.dumps(body).encode())
        assert reply.status == 400
        assert json.loads(reply.body)["error"]["param"] == param
