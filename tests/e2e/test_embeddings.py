"""Servers of models without text: the official client, langchain, plain HTTP, the commands, kills, and the replay."""

from __future__ import annotations

import base64
import io
import json
import os
import re
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import httpx
import numpy as np
import openai
import pytest

from engine import LLM
from engine.cli import main as cli
from tests.embedders import MAX_LEN, SIZE, make_decoder_embedder, make_embedder, make_reranker

from .conftest import StartServe, openai_client
from .serving import DEADLINE_S, EngineServe, engine_command, engine_environment, run_engine

# In one process: `tests/offline/test_pooled.py` and `tests/tokenizer_manager/http`.
pytestmark = [pytest.mark.real_process, pytest.mark.slow]

TEXTS: Final = ["the quick brown fox", "a cat and a kitten", "stock market", "one " * 40]
MAX_INPUTS: Final = 2048
TOLERANCE: Final = 2e-5  # other texts in the same step change the last bits


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_embedder(tmp_path_factory.mktemp("models") / "tiny-bert", prompts={"query": "one cat: "})


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[EngineServe]:
    with EngineServe(str(folder), "--dtype", "float32") as engine:
        yield engine.wait_until_ready()
        assert engine.stop() == 0, engine.log
        assert engine.leftovers() == []
        assert "Traceback" not in engine.log


@pytest.fixture(scope="module")
def api(server: EngineServe) -> Iterator[openai.OpenAI]:
    with openai_client(server) as client:
        yield client


@pytest.fixture(scope="module")
def vectors(folder: Path) -> np.ndarray[Any, Any]:
    """Of `TEXTS`, by the engine in this process."""
    with LLM(str(folder), dtype="float32", num_threads=1, show_progress=False) as llm:
        return llm.embed(TEXTS)


def post(server: EngineServe, path: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json=body, timeout=DEADLINE_S)


def many(count: int) -> list[str]:
    return [f"{n} cat {'two ' * (n % 29)}" for n in range(count)]


def decoded(body: dict[str, Any]) -> np.ndarray[Any, Any]:
    """The vectors of an answer in base64."""
    assert [row["index"] for row in body["data"]] == list(range(len(body["data"])))
    return np.stack([np.frombuffer(base64.b64decode(row["embedding"]), "<f4") for row in body["data"]])


# ---------------------------------------------------------------- clients


def test_the_official_client_receives_the_same_bits_in_both_formats(api, server, vectors):
    by_default = api.embeddings.create(
        model=server.model, input=TEXTS
    )  # the client asks for base64 by itself
    as_floats = api.embeddings.create(model=server.model, input=TEXTS, encoding_format="float")
    one, other = (
        np.array([row.embedding for row in answer.data], dtype=np.float32)
        for answer in (by_default, as_floats)
    )
    np.testing.assert_array_equal(one.view(np.uint32), other.view(np.uint32))
    np.testing.assert_allclose(one, vectors, atol=TOLERANCE)
    assert by_default.usage.prompt_tokens == by_default.usage.total_tokens > 0
    single = api.embeddings.create(model=server.model, input=TEXTS[0], dimensions=SIZE)
    np.testing.assert_allclose(single.data[0].embedding, vectors[0], atol=TOLERANCE)


def test_langchain(server, vectors):
    langchain_openai = pytest.importorskip("langchain_openai")
    embeddings = langchain_openai.OpenAIEmbeddings(
        model=server.model, base_url=f"{server.url}/v1", api_key="unused", check_embedding_ctx_length=False
    )
    np.testing.assert_allclose(embeddings.embed_documents(TEXTS), vectors, atol=TOLERANCE)
    np.testing.assert_allclose(embeddings.embed_query(TEXTS[0]), vectors[0], atol=TOLERANCE)


def test_langchain_with_its_default_sends_tokens_of_another_model(server, vectors, monkeypatch):
    """OpenAI's ids mean other words here: an id that does not exist is refused, one that does gives another vector."""
    langchain_openai = pytest.importorskip("langchain_openai")
    tiktoken = pytest.importorskip("tiktoken")
    of_bytes = tiktoken.Encoding(
        "bytes", pat_str=r"[\s\S]", mergeable_ranks={bytes([n]): n for n in range(256)}, special_tokens={}
    )
    monkeypatch.setattr(tiktoken, "get_encoding", lambda _name: of_bytes)  # the real one is downloaded
    embeddings = langchain_openai.OpenAIEmbeddings(
        model=server.model, base_url=f"{server.url}/v1", api_key="unused", max_retries=0
    )
    other = np.array(embeddings.embed_query("abc"))
    right = np.array(
        openai_client(server).embeddings.create(model=server.model, input="abc").data[0].embedding
    )
    assert np.abs(other - right).max() > 0.01
    with pytest.raises(openai.BadRequestError, match=r"\d+.*vocabulary|token"):
        embeddings.embed_query("ü")


def test_the_model_says_what_it_does(api, server):
    (entry,) = api.models.list().data
    assert (entry.id, entry.task, entry.embedding_size) == (server.model, "embed", SIZE)
    with pytest.raises(openai.BadRequestError, match="makes vectors of texts and generates no text"):
        api.chat.completions.create(model=server.model, messages=[{"role": "user", "content": "hi"}])
    assert httpx.get(f"{server.url}/health_generate", timeout=DEADLINE_S).status_code == 200


def test_documents_are_ranked_and_pairs_scored(server, folder):
    query = "a cat"
    ranked = post(server, "/v1/rerank", query=query, documents=TEXTS, top_n=2, return_documents=True).json()
    scores = post(server, "/v1/score", text_1=query, text_2=TEXTS).json()
    expected = [row["score"] for row in scores["data"]]
    order = sorted(range(len(TEXTS)), key=lambda n: -expected[n])[:2]
    assert [(row["index"], row["document"]["text"]) for row in ranked["results"]] == [
        (n, TEXTS[n]) for n in order
    ]
    for path in ("/rerank", "/v2/rerank"):
        assert len(post(server, path, query=query, documents=TEXTS).json()["results"]) == len(TEXTS)
    with LLM(str(folder), dtype="float32", num_threads=1, show_progress=False) as llm:
        np.testing.assert_allclose(llm.score(query, TEXTS), expected, atol=TOLERANCE)


def test_a_reranker(start_serve: StartServe, tmp_path):
    folder = make_reranker(tmp_path / "tiny-reranker")
    server = start_serve(str(folder), "--dtype", "float32").wait_until_ready()
    results = post(server, "/v1/rerank", query="cat", documents=TEXTS).json()["results"]
    with LLM(str(folder), dtype="float32", num_threads=1, show_progress=False) as llm:
        ranked = llm.rerank("cat", TEXTS)
    assert [row["index"] for row in results] == [document.index for document in ranked]
    np.testing.assert_allclose(
        [row["relevance_score"] for row in results], [document.score for document in ranked], atol=TOLERANCE
    )
    assert post(server, "/v1/embeddings", input="a").status_code == 400
    command = run_engine(tmp_path, "rerank", "cat", "--url", server.url, "--quiet", stdin="\n".join(TEXTS))
    assert [line.split("\t")[1] for line in command.stdout.splitlines()] == [
        str(row["index"] + 1) for row in results
    ]
    assert server.stop() == 0, server.log


# ---------------------------------------------------------------- many inputs, and bad ones


def test_a_call_of_2048_inputs(server, folder):
    texts = many(MAX_INPUTS)
    answer = post(server, "/v1/embeddings", input=texts, encoding_format="base64").json()
    with LLM(str(folder), dtype="float32", num_threads=1, show_progress=False) as llm:
        np.testing.assert_allclose(decoded(answer), llm.embed(texts), atol=TOLERANCE)
        assert answer["usage"]["prompt_tokens"] == sum(len(llm.tokenizer.encode(text)) for text in texts)


def test_one_bad_input_of_2048_fails_with_its_number(server):
    texts = many(MAX_INPUTS)
    texts[1234] = "one " * (MAX_LEN + 1)
    refused = post(server, "/v1/embeddings", input=texts)
    assert refused.status_code == 400
    assert re.search(
        rf"input\[1234\] has \d+ tokens and the model takes {MAX_LEN}", refused.json()["error"]["message"]
    )
    too_many = post(server, "/v1/embeddings", input=many(MAX_INPUTS + 1))
    assert too_many.status_code == 400 and str(MAX_INPUTS) in too_many.json()["error"]["message"]
    server.idle_metrics()


def test_10_000_inputs_of_five_clients_at_once(start_serve: StartServe, folder):
    server = start_serve(
        str(folder), "--dtype", "float32", "--max-queued-requests", "10000"
    ).wait_until_ready()
    parts = [[f"client {n} {text}" for text in many(2000)] for n in range(5)]
    answers: list[Any] = [None] * 5

    def ask(n: int) -> None:
        answers[n] = httpx.post(
            f"{server.url}/v1/embeddings", json={"input": parts[n], "encoding_format": "base64"}, timeout=None
        ).json()

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with LLM(str(folder), dtype="float32", num_threads=1, show_progress=False) as llm:
        for part, answer in zip(parts, answers, strict=True):
            np.testing.assert_allclose(decoded(answer), llm.embed(part), atol=TOLERANCE)
    server.idle_metrics()


# ---------------------------------------------------------------- faults, and what is told afterwards


@pytest.mark.parametrize("kind", ["encoder", "decoder"])
def test_a_call_survives_a_scheduler_that_is_killed_in_its_middle(start_serve: StartServe, tmp_path, kind):
    folder = (make_embedder if kind == "encoder" else make_decoder_embedder)(tmp_path / "tiny")
    texts = many(MAX_INPUTS)
    server = start_serve(
        str(folder), "--dtype", "float32", "--max-running-requests", "16", "--chaos", "slow=0.02"
    ).wait_until_ready()
    answers: list[httpx.Response] = []

    def ask() -> None:
        body = {"input": texts, "encoding_format": "base64"}
        answers.append(httpx.post(f"{server.url}/v1/embeddings", json=body, timeout=None))

    asking = threading.Thread(target=ask)
    asking.start()
    with httpx.Client(base_url=server.url, timeout=DEADLINE_S) as client:
        while not 0 < client.get("/server_info").json()["num_live_requests"] < MAX_INPUTS:
            assert not answers, answers
    os.kill(server.pids["scheduler"], signal.SIGKILL)
    server.wait_for_log("recovered restart=1")
    asking.join()

    (answer,) = answers
    assert answer.status_code == 200, answer.text
    with LLM(str(folder), dtype="float32", num_threads=1, show_progress=False) as llm:
        np.testing.assert_allclose(decoded(answer.json()), llm.embed(texts), atol=TOLERANCE)
    server.idle_metrics()
    assert server.stop() == 0, server.log
    assert server.leftovers() == []


@pytest.mark.parametrize("kind", ["encoder", "decoder"])
def test_decisions_about_vectors_are_explained_and_replayed(start_serve: StartServe, tmp_path, kind):
    folder = (make_embedder if kind == "encoder" else make_decoder_embedder)(tmp_path / "tiny")
    log = tmp_path / "decisions.edl"
    server = start_serve(
        *(str(folder), "--dtype", "float32", "--max-running-requests", "8", "--decision-log", str(log))
    ).wait_until_ready()
    post(server, "/v1/embeddings", input=many(60)).raise_for_status()
    answer = post(server, "/v1/embeddings", input=many(60))  # from the cache, where there is one
    assert answer.status_code == 200
    rid = answer.json()["id"]
    live = run_engine(tmp_path, "why", rid, "--url", server.url)
    assert live.returncode == 0 and live.stdout.startswith(f"{rid}-0 ")
    assert "log-probabilities" not in live.stdout
    assert server.stop() == 0, server.log

    done = run_engine(tmp_path, "replay", str(log))
    assert (done.returncode, done.stderr) == (0, "")
    match = re.search(r"([\d,]+) passes, ([\d,]+) equal \(100 %\)", done.stdout)
    assert match and match[1] == match[2] and int(match[1]) >= 16, done.stdout
    assert run_engine(tmp_path, "why", rid, "--log", str(log)).stdout.startswith(f"{rid}-0 ")


# ---------------------------------------------------------------- the commands


def test_lines_go_through_a_pipe(server, vectors, tmp_path):
    done = subprocess.run(
        engine_command("embed", "--url", server.url),
        input="\n".join(TEXTS).encode(),
        capture_output=True,
        env=engine_environment(tmp_path),
        timeout=DEADLINE_S,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    np.testing.assert_allclose(np.load(io.BytesIO(done.stdout)), vectors, atol=TOLERANCE)


def test_a_server_is_found(server):
    """The directory for temporary files is the server's, whose record lies there."""
    done = run_engine(server.tmp, "embed", "--format", "csv", stdin="a cat\n")
    assert done.returncode == 0
    assert f"asking {server.model} at " in done.stderr
    assert len(done.stdout.split(",")) == SIZE


def test_chat_is_refused_and_top_shows_tokens_of_texts(server, capsys):
    """In this process: what a process of its own adds is seen above."""
    assert cli.run(["chat", "hi", "--url", server.url]) == 2
    assert "cannot chat; use `engine embed`" in capsys.readouterr().err
    assert cli.run(["top", server.url, "--once", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["task"] == "embed"
    assert cli.run(["top", server.url, "--once"]) == 0
    assert "OUT" not in capsys.readouterr().out
