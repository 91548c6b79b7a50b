"""Real servers against their own `/openapi.json`: whatever schemathesis makes of the document, allowed or not, the
status is one that the document has, the body what it says, and nobody gets in without a key.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.config import SchemathesisConfig
from schemathesis.specs.openapi import checks

from engine.tokenizer_manager.http.routes import ROUTES
from tests.embedders import make_embedder, make_reranker

from .serving import DEADLINE_S, EngineServe

pytestmark = [pytest.mark.real_process, pytest.mark.slow, pytest.mark.timeout(900)]

ADMIN_KEY = "sk-admin"
AUTHORIZED = {"Authorization": f"Bearer {ADMIN_KEY}"}
SMALL = ("--max-model-len", "64", "--max-n", "3", "--max-prompts", "4")
"""So that no request takes long, whatever it asks for."""
OWN_TIME_LIMITS = {503: "queue_timeout", 504: "request_timeout"}
"""What a client gets that asks for a time limit of a microsecond."""
BY_CHANCE = settings(
    max_examples=60, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)


@pytest.fixture(scope="module")
def document(model, tmp_path_factory) -> Iterator[Callable[[str], Any]]:
    """The document of a server whose model can answer at a path, with the keys of both kinds; started when needed."""
    folders = tmp_path_factory.mktemp("without-text")
    makers: dict[str, Callable[[], Path]] = {
        "generate": lambda: model,
        "embed": lambda: make_embedder(folders / "embedder"),
        "score": lambda: make_reranker(folders / "reranker"),
    }
    keys = ("--api-key", "sk-client", "--admin-api-key", ADMIN_KEY)
    with ExitStack() as servers:

        @cache
        def document_of(task: str) -> Any:
            options = ["--dtype", "float32", *keys, *SMALL]
            if task == "generate":  # the endpoints of tiers and of files need a folder to succeed
                options += ["--kv-disk", str(folders / "kv"), "--state-dir", str(folders / "state")]
            engine = servers.enter_context(EngineServe(str(makers[task]()), *options))
            servers.callback(assert_clean_end, engine)
            engine.wait_until_ready()
            config = SchemathesisConfig(seed=0)
            return schemathesis.openapi.from_url(
                f"{engine.url}/openapi.json", headers=AUTHORIZED, config=config
            )

        yield lambda path: document_of(task_of(path))


def task_of(path: str) -> str:
    """What a model must be able to do for answers with 200 at this path."""
    last = path.rsplit("/", 1)[-1]
    return {"rerank": "score", "score": "score", "classify": "score", "pooling": "embed"}.get(
        last, "embed" if last.startswith("embed") else "generate"
    )


def assert_clean_end(engine: EngineServe) -> None:
    """Stop it; nothing went wrong inside."""
    assert engine.stop() == 0, engine.log
    assert "Traceback" not in engine.log


@schemathesis.check
def no_server_error(_context: Any, response: Any, _case: Any) -> None:
    """A failure that is not the client's own wish."""
    if response.status_code >= 500 and response.status_code != 501:  # the document has it where it is right
        code = response.json()["error"]["code"]
        assert OWN_TIME_LIMITS.get(response.status_code) == code, response.text


CHECKS = [
    no_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
    checks.negative_data_rejection,
    checks.unsupported_method,
    checks.allow_header_conformance,
    checks.ignored_auth,
]


def cases(api: Any, operation: Any, mode: GenerationMode) -> Iterator[Any]:
    """Boundaries, missing fields, wrong types, other methods: each once."""
    generation = api.config.generation_for(operation=operation)
    yield from api.iter_coverage_cases(operation, generation_modes=[mode], generation_config=generation)


def modest(case: Any) -> Any:
    """The same with few tokens, and without a model that is not there, which the schema cannot know."""
    if isinstance(case.body, dict):
        case.body.pop("model", None)
        if case.operation.path == "/generate":
            given = case.body.get("sampling_params") or {}  # one object, or one for each prompt
            short = {"max_new_tokens": 4}
            case.body["sampling_params"] = (
                [each | short for each in given] if isinstance(given, list) else given | short
            )
        elif case.operation.path == "/v1/responses":
            case.body["max_output_tokens"] = 4
        elif case.operation.path == "/v1/messages":
            case.body["max_tokens"] = 4
        elif case.operation.path.startswith("/api/") and task_of(case.operation.path) == "generate":
            case.body["options"] = {"num_predict": 4}
        elif case.operation.path.endswith("/completions"):
            case.body["max_tokens"] = 4
            case.body.pop("max_completion_tokens", None)
    return case


@pytest.mark.parametrize("mode", list(GenerationMode))
@pytest.mark.parametrize("route", ROUTES, ids=lambda route: f"{route.method} {route.path}")
def test_every_answer_is_as_the_document_says(document, route, mode):
    api = document(route.path)
    operation = api[route.path][route.method]
    statuses: Counter[int] = Counter()
    if route.path.endswith("_profile"):  # one that runs may be over by itself at any time
        api["/stop_profile"]["POST"].Case().call(headers=AUTHORIZED)
    if route.path == "/stop_profile":
        api["/start_profile"]["POST"].Case().call(headers=AUTHORIZED)

    def check(case: Any) -> None:
        response = case.call_and_validate(checks=CHECKS, headers=AUTHORIZED, timeout=DEADLINE_S)
        statuses[response.status_code] += 1

    for case in cases(api, operation, mode):
        check(case)
    if route.request is not None:  # what has no fields has been seen whole
        by_chance = operation.as_strategy(generation_mode=mode)
        by_chance = by_chance.map(modest) if mode is GenerationMode.POSITIVE else by_chance
        BY_CHANCE(given(case=by_chance)(check))()
    if mode is GenerationMode.POSITIVE and "{" not in route.path:
        # Else this would prove little. Adapters and batches cannot succeed without a file: test_adapters.py and
        # test_batches.py have those answers.
        usual = 403 if route.path.endswith("load_lora_adapter") else 501 if 501 in route.fails else 200
        usual = 404 if (route.method, route.path) == ("POST", "/v1/batches") else usual
        usual = 404 if route.path.endswith("/control") else usual  # for answers that are generated
        usual = (
            400 if route.path == "/infill" else usual
        )  # for models with tokens for it: test_llama_server.py
        assert statuses[usual], statuses
