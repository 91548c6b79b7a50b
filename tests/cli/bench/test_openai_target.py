"""The client against a server whose behavior is known: counts, times, and every way to fail."""

import asyncio
import gc
import json
import re
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from aiohttp import test_utils, web

from engine import EngineError
from engine.cli.bench.load import BenchRequest, LoadRun, run_load
from engine.cli.bench.openai_target import (
    OpenAITarget,
    RequestOptions,
    StructuredOutput,
    check_ready,
    flush_cache,
)
from engine.cli.bench.summary import summarize
from engine.runtime.errors import ConfigError

OPTIONS = RequestOptions(
    model="m", endpoint="completions", temperature=0.0, ignore_eos=True, stream=True, seed=0
)


class ScriptedServer:
    """Streams what `pieces` says; remembers the bodies it got and how many requests were open at once."""

    def __init__(
        self,
        pieces=("a", "b", "c"),
        *,
        usage=True,
        per_chunk_usage=False,
        status=200,
        ending="data: [DONE]\n\n",
    ):
        self.pieces, self.usage, self.per_chunk_usage = pieces, usage, per_chunk_usage
        self.status, self.ending = status, ending
        self.bodies, self.open, self.peak = [], 0, 0

    async def completions(self, request):
        self.bodies.append(await request.json())
        if self.status != 200:
            return web.json_response({"error": {"message": "out of cheese"}}, status=self.status)
        self.open += 1
        self.peak = max(self.peak, self.open)
        await asyncio.sleep(0)  # lets others in, so that the peak shows
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for i, piece in enumerate(self.pieces):
            event = {"choices": [{"index": 0, "text": piece}]}
            if self.per_chunk_usage:
                event["usage"] = self.usage_after(2 * (i + 1))
            await response.write(f"data: {json.dumps(event)}\n\n".encode())
        if self.usage:
            num_tokens = len(self.pieces) * (2 if self.per_chunk_usage else 1)
            event = {"choices": [], "usage": self.usage_after(num_tokens)}
            await response.write(f"data: {json.dumps(event)}\n\n".encode())
        await response.write(self.ending.encode())
        self.open -= 1
        return response

    @staticmethod
    def usage_after(num_tokens):
        details = {"cached_tokens": 4}
        return {"prompt_tokens": 9, "completion_tokens": num_tokens, "prompt_tokens_details": details}

    async def models(self, _):
        return web.json_response({"data": [{"id": "m"}]})

    @asynccontextmanager
    async def serving(self):
        app = web.Application()
        app.add_routes([web.post("/v1/completions", self.completions), web.get("/v1/models", self.models)])
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()


def requests(count):
    return [BenchRequest(prompt=[1, 2, 3], prompt_len=3, output_len=3) for _ in range(count)]


def measure(server_of, count=1, max_concurrency=None, options=OPTIONS):
    """Run `count` requests against a new server; returns it and the records."""

    async def go():
        server = server_of()
        async with server.serving() as url, OpenAITarget(url, "key", options, 30.0) as target:
            load = await run_load(target, requests(count), [0.0] * count, max_concurrency, lambda _: None)
        return server, load.records

    return asyncio.run(go())


def test_tokens_and_usage_are_recorded():
    server, (record,) = measure(ScriptedServer)

    assert record.ok
    assert [count for _, count in record.arrivals] == [1, 1, 1]
    assert (record.prompt_tokens, record.output_tokens, record.cached_tokens) == (9, 3, 4)
    assert server.bodies[0]["prompt"] == [1, 2, 3]
    assert server.bodies[0]["ignore_eos"] is True


def test_usage_in_every_chunk_counts_tokens_without_text():
    _, (record,) = measure(lambda: ScriptedServer(pieces=("a", "", "c"), per_chunk_usage=True))

    assert [count for _, count in record.arrivals] == [2, 2, 2]
    assert record.output_tokens == 6


def test_a_server_without_usage_is_counted_by_chunks():
    _, (record,) = measure(lambda: ScriptedServer(usage=False))

    assert record.output_tokens == 3


@pytest.mark.parametrize(
    ("server", "reason"),
    [
        (lambda: ScriptedServer(status=429), "HTTP 429: out of cheese"),
        (lambda: ScriptedServer(ending=""), r"without \[DONE\]"),
        (lambda: ScriptedServer(ending='data: {"error": {"message": "died"}}\n\n'), "error event: died"),
        (lambda: ScriptedServer(ending="data: {nonsense\n\n"), "does not follow the OpenAI API"),
    ],
)
def test_every_failure_is_recorded_with_its_reason(server, reason):
    _, (record,) = measure(server)

    assert not record.ok
    assert re.search(reason, record.error)


def test_concurrency_is_bounded():
    server, records = measure(ScriptedServer, count=12, max_concurrency=3)

    assert server.peak == 3
    assert len(records) == 12


def test_a_missing_server_is_said_with_the_way_out():
    with pytest.raises(EngineError, match="engine serve"):
        asyncio.run(check_ready("http://127.0.0.1:9", None, timeout_s=0.0))


def test_a_server_that_cannot_flush_is_named():
    async def go():
        async with ScriptedServer().serving() as url:
            assert await check_ready(url, None, 5.0) == "m"
            await flush_cache(url, None)

    with pytest.raises(EngineError, match="leave out --flush-cache"):
        asyncio.run(go())


@pytest.mark.parametrize(
    ("status", "code", "api_key", "fix"),
    [
        (401, "invalid_api_key", None, "the server wants an API key; pass --api-key or set ENGINE_API_KEY"),
        (
            401,
            "invalid_api_key",
            "sk",
            "the server does not know this API key; check --api-key or ENGINE_API_KEY",
        ),
        (403, "admin_key_required", "sk", "pass it with --api-key or set ENGINE_ADMIN_API_KEY"),
        (403, "origin_not_allowed", "sk", "send the header"),
    ],
)
def test_a_refused_key_is_said_in_options(status, code, api_key, fix):
    async def refuse(request):
        error = {"message": "refused; send the header `Authorization: Bearer <key>`", "code": code}
        return web.json_response({"error": error}, status=status)

    async def go():
        app = web.Application()
        app.router.add_get("/v1/models", refuse)
        app.router.add_post("/flush_cache", refuse)
        async with test_utils.TestServer(app) as server:
            url = str(server.make_url("")).rstrip("/")
            with pytest.raises(EngineError) as ready:
                await check_ready(url, api_key, 5.0)
            with pytest.raises(EngineError) as flush:
                await flush_cache(url, api_key)
        return ready.value, flush.value

    ready, flush = asyncio.run(go())
    assert fix in str(ready)
    assert ("Bearer" in str(ready)) == (code == "origin_not_allowed")
    assert str(flush).endswith("; leave out --flush-cache") and "Bearer" not in str(flush)


SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}


@pytest.mark.parametrize(
    ("pieces", "valid"),
    [(('{"n":', " 1}"), True), (('{"n":', ' "1"}'), False), (('{"n":',), False), (("x",), False)],
)
def test_answers_are_checked_against_the_schema(tmp_path, pieces, valid):
    path = tmp_path / "schema.json"
    path.write_text(json.dumps(SCHEMA))
    options = replace(OPTIONS, structured=StructuredOutput.read(path))

    server, (record,) = measure(lambda: ScriptedServer(pieces), options=options)

    assert record.valid is valid
    assert summarize(LoadRun([record], 0.0, 1.0, None, 0.0), {}).valid_share == float(valid)
    assert server.bodies[0]["response_format"]["json_schema"]["schema"] == SCHEMA


def test_without_a_schema_nothing_is_checked():
    _, (record,) = measure(ScriptedServer)

    assert record.valid is None
    assert summarize(LoadRun([record], 0.0, 1.0, None, 0.0), {}).valid_share is None


@pytest.mark.parametrize(
    ("text", "reason"), [("{", "is not JSON"), ("[]", "is an object"), ('{"type": 5}', "is no JSON Schema")]
)
def test_a_file_without_a_schema_is_refused(tmp_path, text, reason):
    path = tmp_path / "schema.json"
    path.write_text(text)

    with pytest.raises(ConfigError, match=reason):
        StructuredOutput.read(path)


def test_a_target_that_is_never_entered_opens_nothing(recwarn):
    """A session that is made and not closed prints "Unclosed client session" after the real error."""
    gc.collect()  # what other tests left to the collector may warn, too
    recwarn.clear()
    target = OpenAITarget("http://127.0.0.1:1", None, OPTIONS, 1.0)
    del target
    gc.collect()

    assert not recwarn.list


TEXTS = BenchRequest(prompt="", prompt_len=0, output_len=0, texts=("one", "two", "three"))


@pytest.mark.parametrize(
    ("num_vectors", "error"),
    [(3, None), (2, "2 vectors came for 3 texts"), (None, "the answer does not follow")],
)
def test_texts_are_answered_by_vectors(num_vectors, error):
    bodies = []

    async def answer(request):
        bodies.append(await request.json())
        if num_vectors is None:
            return web.json_response({"results": []})
        rows = [{"embedding": "AAAA"}] * num_vectors
        return web.json_response({"data": rows, "usage": {"prompt_tokens": 7}})

    async def run():
        app = web.Application()
        app.router.add_post("/v1/embeddings", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        async with OpenAITarget(url, None, replace(OPTIONS, endpoint="embeddings"), 10.0) as target:
            load = await run_load(target, [TEXTS], [0.0], None, lambda _: None)
        await runner.cleanup()
        return load

    load = asyncio.run(run())
    assert bodies == [{"model": "m", "input": ["one", "two", "three"], "encoding_format": "base64"}]
    (record,) = load.records
    if error is None:
        summary = summarize(load, {})
        assert (summary.num_vectors, summary.prompt_tokens, summary.failed) == (3, 7, 0)
        assert summary.vector_rate == pytest.approx(3 / summary.duration_s)
        assert not [warning for warning in summary.warnings if "token" in warning]
    else:
        assert error in record.error and not record.ok
