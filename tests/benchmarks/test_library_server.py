"""The server around a peer's library: exact counts, streams side by side, refused positions; and cells of failures."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from http.client import HTTPConnection
from typing import Any

import pytest

from benchmarks.exactness import row_of
from benchmarks.peers.library_server import WORDS, Batcher, Handler, Server, Stream, UntellableError
from benchmarks.peers.results import Failure, figures_table, short_reason
from benchmarks.peers.setup import LIBRARIES, Peers
from benchmarks.peers.workloads import WORKLOADS
from benchmarks.shapes import Run, rows_of
from engine.cli.bench.openai_target import check_ready

from .test_figures import add, likely, new_results


class Counting:
    """A library that continues a prompt with its last token plus one, plus two, in a limited number of slots."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._streams: list[Stream] = []
        self.most = 0

    def add(self, stream: Stream) -> bool:
        if len(self._streams) == self._slots:
            return False
        self._streams.append(stream)
        return True

    def step(self) -> None:
        self.most = max(self.most, len(self._streams))
        self._streams = [s for s in self._streams if not s.put(s.ids[-1] + s.num_done + 1)]

    def likely(self, ids: list[int], how_many: int) -> dict[int, float]:
        if ids == [13]:
            raise UntellableError("no text")
        return dict.fromkeys(range(how_many), -1.0)


@pytest.fixture
def library() -> Counting:
    return Counting(slots=3)


@pytest.fixture
def port(library: Counting, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    model: Any = Batcher(library)
    monkeypatch.setattr(Handler, "model", model, raising=False)
    with Server(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()


def ask(port: int, path: str, **body: Any) -> tuple[int, bytes]:
    with closing(HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
        connection.request("POST", path, json.dumps(body))
        with connection.getresponse() as response:
            return response.status, response.read()


def test_the_client_of_the_benchmarks_takes_it_for_ready(port: int) -> None:
    assert asyncio.run(check_ready(f"http://127.0.0.1:{port}", None, 10.0)) == "model"


def test_an_answer_has_exactly_its_tokens(port: int) -> None:
    status, answer = ask(port, "/v1/completions", prompt=[4, 7], max_tokens=3)

    body = json.loads(answer)
    assert (status, body["choices"][0]["text"]) == (200, " 8 9 10")
    assert body["usage"] == {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}


def test_a_stream_counts_token_by_token(port: int) -> None:
    _, answer = ask(port, "/v1/completions", prompt=[7], max_tokens=3, stream=True)

    *events, end = [line.removeprefix(b"data: ") for line in answer.split(b"\n\n") if line]
    counts = [json.loads(event)["usage"]["completion_tokens"] for event in events]
    assert (counts, end) == ([1, 2, 3], b"[DONE]")


def test_more_streams_than_slots_wait_for_one(port: int, library: Counting) -> None:
    with ThreadPoolExecutor(10) as pool:
        answers = list(
            pool.map(lambda n: ask(port, "/v1/completions", prompt=[100 * n], max_tokens=20), range(10))
        )

    texts = [json.loads(answer)["choices"][0]["text"].split() for _, answer in answers]
    assert texts == [[str(100 * n + k) for k in range(1, 21)] for n in range(10)]
    assert library.most <= 3


def test_a_position_that_a_library_cannot_be_given_is_refused(port: int) -> None:
    told, refused = (ask(port, "/completion", prompt=[ids], n_probs=2) for ids in (5, 13))

    top = json.loads(told[1])["completion_probabilities"][0]["top_logprobs"]
    assert top == [{"id": 0, "logprob": -1.0}, {"id": 1, "logprob": -1.0}]
    assert (refused[0], json.loads(refused[1])) == (422, {"error": {"message": "no text"}})


def test_words_differ() -> None:
    assert len(set(WORDS)) == len(WORDS) == 67


def test_a_library_is_missing_in_any_other_version(tmp_path: Any) -> None:
    library = Peers.of(tmp_path).libraries["openvino"]
    installed = tmp_path / "openvino/v/lib/python3.11/site-packages/openvino_genai-2026.4.0.0.dist-info"
    installed.mkdir(parents=True)
    assert library.missing() == [LIBRARIES["openvino"]]

    installed.rename(installed.with_name("openvino_genai-2026.4.1.0.dist-info"))

    assert library.missing() == []


@pytest.mark.parametrize(
    ("reason", "short"),
    [
        ("not done after 900 s", "not done after 900 s"),
        (
            "x ended with code 1:\nTraceback\n  File\n\nValueError: a | b\n",
            "x ended with code 1: ValueError: a / b",
        ),
        ("y" * 200, "y" * 117 + "..."),
        ("", "unknown"),
    ],
)
def test_a_reason_fits_a_cell(reason: str, short: str) -> None:
    assert short_reason(reason) == short


def test_a_side_without_figures_has_its_error_in_the_cells() -> None:
    results = new_results("engine-4bit", "mistralrs-4bit")
    add(results, "engine-4bit", "W1", "decode", 90.0)
    results.failures.append(
        Failure("mistralrs-4bit", "all rounds", "it ended with code 1:\nlog\nOSError: no")
    )

    assert figures_table(results, WORKLOADS[:1])[2] == (
        "| W1: one stream, 128 in / 256 out | decode, tok/s | 90.0 | failed: it ended with code 1: OSError: no |"
    )


def test_a_side_of_a_shape_that_fails_later_keeps_its_runs() -> None:
    found = {"engine": [Run(1.0, 5.0, 10.0, 4.0)] * 2, "ik": [Run(2.0, 5.0, 5.0, 2.0)], "openvino": []}

    rows = rows_of("tiny", "Q4_0", found, {"ik": "timed out", "openvino": "no"}, None)

    assert [row.split(" | ")[2:4] for row in rows] == [
        ["engine", "1.00"],
        ["ik", "failed: timed out"],
        ["ik", "2.00"],
        ["openvino", "failed: no"],
    ]
    assert "0.50 (target 2.0) | 2.00 (target 0.95) | 2.00 (target 1.3)" in rows[2]


def test_refused_positions_are_no_part_of_a_row() -> None:
    one, other = likely(a=0.6, b=0.3), likely(a=0.3, b=0.6)

    row = row_of("mistralrs", [one, None, other], [one, other, one])

    assert (row.agree, row.positions) == (1, 2)
    with pytest.raises(ValueError, match="at 1 of 3"):
        row_of("mistralrs", [one, None, None], [one, one, one])
