"""Descriptions and defaults of request fields, and the examples: all are there, and all are right."""

from __future__ import annotations

import json
import re
import shlex

import msgspec
import pytest

from engine.models.tokenizer.fim import FimTokens
from engine.tokenizer_manager.http.native.wire import NativeSampling
from engine.tokenizer_manager.http.reference.field_notes import (
    BODIES,
    DEFAULTS,
    NOTES,
    OF_ADAPTERS,
    OF_CLASSIFIERS,
    OF_CODERS,
    OF_EMBEDDERS,
)
from engine.tokenizer_manager.http.reference.openapi import ApiDocs
from engine.tokenizer_manager.http.reference.reference_page import curl, render_reference
from engine.tokenizer_manager.http.routes import ROUTES
from tests.adapter_files import loaded, write_adapter
from tests.tokenizer_manager.conftest import Serve
from tests.tokenizer_manager.fake_engine import SPEC, say_all
from tests.tokenizer_manager.http.pooling.test_classify import CLASSIFIER
from tests.tokenizer_manager.http.pooling.test_embeddings import ANSWER, EMBEDDER
from tests.tokenizer_manager.http.test_any_input import OF_LIVE

from ...fake_engine import TOKENIZER

TYPES: dict[str, type | tuple[type, ...]] = {
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "string": str,
    "null": (),
    "array": list,
}
URL = "http://127.0.0.1:1"
REQUESTS = {route.request for route in ROUTES if route.request is not None} | {NativeSampling}
FIELDS = {(kind.__name__, field.encode_name) for kind in REQUESTS for field in msgspec.structs.fields(kind)}


@pytest.fixture(scope="module")
def document():
    return ApiDocs(ROUTES, "1", model="org/tiny").document()


@pytest.mark.parametrize(("struct", "field"), sorted(FIELDS))
def test_every_field_of_a_request_is_described(document, struct, field):
    schema = document["components"]["schemas"][struct]["properties"][field]
    assert any(option.get("description") for option in (schema, *schema.get("anyOf", ())))


@pytest.mark.parametrize("key", [*NOTES, *DEFAULTS])
def test_every_note_and_default_belongs_to_a_field(key):
    struct, _, field = key.rpartition(".")
    assert (struct, field) in FIELDS if struct else field in {name for _, name in FIELDS}


def test_a_default_fits_the_type_and_the_range_of_its_field(document):
    checked = 0
    for struct, field in FIELDS:
        schema = document["components"]["schemas"][struct]["properties"][field]
        if (default := schema.get("default")) is None:
            continue
        if field == "encoding_format":  # an enumeration without a type
            assert default in str(schema)
            continue
        options = [each for option in schema.get("anyOf", [schema]) for each in option.get("anyOf", [option])]
        assert any(
            isinstance(default, TYPES[option.get("type", "null")])
            and option.get("minimum", default) <= default <= option.get("maximum", default)
            for option in options
        ), (struct, field)
        checked += 1
    assert checked > 60


def test_the_model_s_own_default_replaces_the_engine_s():
    docs = ApiDocs(ROUTES, "1", model_defaults={"temperature": 0.6})
    fields = docs.document()["components"]["schemas"]["ChatRequest"]["properties"]
    assert (fields["temperature"]["default"], fields["top_p"]["default"]) == (0.6, 1.0)


OF_STATE = {(route.method, route.path) for route in ROUTES if 507 in route.fails}
"""They need what was stored before: tests/tokenizer_manager/http/batches/."""


@pytest.mark.parametrize(
    "key",
    [key for key in BODIES if "profile" not in key[1] and key not in OF_STATE and key[1] not in OF_LIVE],
    ids=" ".join,
)
def test_every_example_is_accepted(serve: Serve, document, key, tmp_path, monkeypatch):
    """The text of the page's own command, taken apart as a shell does."""
    method, path = key
    if path in OF_CODERS:
        monkeypatch.setattr(TOKENIZER, "fim", FimTokens(7, 8, 9))
    if path in OF_ADAPTERS:
        folder = write_adapter(tmp_path / "sql", SPEC)
        adapters = [loaded(folder, SPEC, 1, "sql")] if "unload" in path else []
        lora = {"allow_runtime_lora": True, "lora_root": str(tmp_path)}
        served = serve(adapters=adapters, lora=lora)
    else:
        pooling = EMBEDDER if path in OF_EMBEDDERS else CLASSIFIER if path in OF_CLASSIFIERS else None
        served = serve(say_all("x")) if pooling is None else serve(ANSWER, pooling=pooling)
    words = shlex.split(curl(document, served.url, method, path).replace("\\\n", " "))
    assert words[0] == "curl"
    (url,) = (word for word in words if word.startswith("http"))
    sent = words[words.index("-d") + 1]

    reply = served.client.request(method, url, content=sent)

    assert reply.status_code == 200, reply.text
    assert not (reply.text.startswith("{") and json.loads(reply.text.splitlines()[0]).get("warnings"))


@pytest.mark.parametrize(
    "route",
    [
        r
        for r in ROUTES
        if r.method == "GET" and "/why" not in r.path and "_id}" not in r.path and 507 not in r.fails
    ],
    ids=lambda r: r.path,
)
def test_every_example_without_a_body_is_answered(serve: Serve, document, route):
    served = serve(say_all("x"))
    words = shlex.split(curl(document, served.url, route.method, route.path))
    assert served.client.get(words[1]).status_code == 200


def test_each_default_of_a_sampling_field_is_what_is_sampled_with(serve: Serve, document):
    served = serve(say_all("x"))
    served.client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}]})
    sampling = served.engine.next_request().sampling
    fields = document["components"]["schemas"]["ChatRequest"]["properties"]
    names = (
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "repetition_penalty",
        "frequency_penalty",
        "ignore_eos",
    )
    assert {name: fields[name]["default"] for name in names} == {
        name: getattr(sampling, name) for name in names
    }


def test_the_defaults_of_lengths_are_what_is_generated(serve: Serve, document):
    served = serve(say_all("x"))
    schemas = document["components"]["schemas"]
    served.client.post("/v1/completions", json={"prompt": "x"})
    default = schemas["CompletionRequest"]["properties"]["max_tokens"]["default"]
    assert served.engine.next_request().sampling.max_new_tokens == default
    served.client.post("/generate", json={"text": "x"})
    default = schemas["NativeSampling"]["properties"]["max_new_tokens"]["default"]
    assert served.engine.next_request().sampling.max_new_tokens == default


def test_the_page_has_contents_that_lead_to_every_endpoint(document):
    page, policy = render_reference(document, URL)
    targets = re.findall(r'<li><a href="#([^"]+)">', page)
    assert len(targets) == len(set(targets)) == len(ROUTES)
    assert sorted(targets) == sorted(re.findall(r'<h3 id="([^"]+)">', page))
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy


def test_text_from_a_server_is_no_markup_in_the_page():
    document = ApiDocs(ROUTES, "<b>1</b>", model="<img src=x onerror=alert(1)>").document()
    page, _ = render_reference(document, URL)
    assert "<b>1" not in page
    assert "<img" not in page


def test_a_server_with_keys_says_so_in_every_example(document):
    keyed = ApiDocs(ROUTES, "1", needs_key=True).document()
    assert "$ENGINE_API_KEY" in curl(keyed, URL, "GET", "/v1/models")
    assert "$ENGINE_API_KEY" not in curl(keyed, URL, "GET", "/health")
    assert "$ENGINE_API_KEY" not in curl(document, URL, "GET", "/v1/models")
