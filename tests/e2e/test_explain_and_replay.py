"""What a server decided, asked afterwards: `why`, `replay` and `trace` of runs full of faults, and of one cut short."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx
import openai
import pytest

from engine.cli import main as cli
from engine.scheduler.journal.log_file import read_runs
from engine.scheduler.journal.replay import replay

from .serving import DEADLINE_S, SLOW, EngineServe, Metrics, run_engine
from .test_endings import Stream

pytestmark = pytest.mark.real_process

Command = Callable[..., subprocess.CompletedProcess[str]]
NUM_STREAMS: Final = 10
NUM_TOKENS: Final = 40
# Room for some 100 pages, so that some of them swap and some do not.
SWAP: Final = ("--preemption-mode", "swap", "--swap-space", "0.0002")
MODES: Final = {
    "recompute": ("--preemption-mode", "recompute"),
    "swap": SWAP,
    "swap, steps overlapped": (*SWAP, "--overlap"),
}
COMMANDS_OF_A_LOG: Final = {
    "why": ("why", "cmpl-1", "--log"),
    "replay": ("replay",),
    "replay --set": ("replay", "--set", "schedule_policy=lpm"),
    "trace": ("trace",),
    "simulate --fit": ("simulate", "--num-requests", "3", "--fit"),
}


@dataclass(frozen=True)
class Recorded:
    """A server that has come and gone.

    Attributes:
        log: its decision log.
        texts, ids: of its answers, by number of the stream.
        whys: id -> body of `GET /v1/requests/{id}/why`.
        why_live: standard output of `engine why --url` for the first id.
        unknown: the answers about a request that never was: of HTTP, and of the command.
        metrics: after the last answer.
    """

    log: Path
    texts: list[str]
    ids: list[str]
    whys: dict[str, dict[str, Any]]
    why_live: str
    unknown: tuple[httpx.Response, tuple[int, str, str]]
    metrics: Metrics


@pytest.fixture(
    scope="module",
    # The last one has what the others have, too: requests that are swapped and some that are not.
    params=[
        pytest.param(mode, marks=() if mode == "swap, steps overlapped" else pytest.mark.slow)
        for mode in MODES
    ],
)
def mode(request: pytest.FixtureRequest) -> str:
    """How requests are retracted, and how steps follow each other."""
    return str(request.param)


@pytest.fixture(scope="module")
def recorded(mode: str, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """Ten streams at once on a server that takes their places at random."""
    folder = tmp_path_factory.mktemp("recorded")
    log = folder / "decisions.edl"
    arguments = (
        *("--dtype", "float32", "--page-size", "4", "--max-running-requests", "6"),
        # So little that the cache does not keep what was swapped out until its return.
        *("--max-total-tokens", "320"),
        *("--chunked-prefill-size", "32", "--chaos", "retract=0.3:50", "--decision-log", str(log)),
    )
    with EngineServe(str(model), *arguments, *MODES[mode]) as engine:
        engine.wait_until_ready()
        answers = asyncio.run(streams(engine))
        metrics = engine.idle_metrics()
        with httpx.Client(base_url=engine.url, timeout=DEADLINE_S) as http:
            whys = {rid: http.get(f"/v1/requests/{rid}/why").json() for rid, _text in answers}
            unknown = http.get("/v1/requests/cmpl-never/why")
        live = run_engine(folder, "why", answers[0][0], "--url", engine.url)
        never = run_engine(folder, "why", "cmpl-never", "--url", engine.url)
        assert (live.returncode, live.stderr) == (0, "")
        assert engine.stop() == 0, engine.log
        assert engine.leftovers() == []
        assert "Traceback" not in engine.log
    ids, texts = zip(*answers, strict=True)
    never_output = never.returncode, never.stdout, never.stderr
    return Recorded(log, list(texts), list(ids), whys, live.stdout, (unknown, never_output), metrics)


def fields(number: int) -> dict[str, Any]:
    """Every other prompt has a beginning in common with others, and needs several chunks."""
    beginning = "the quick brown fox jumps over the lazy dog. " * 4 if number % 2 else ""
    return {
        "model": "small-llama",
        "prompt": f"{beginning}stream {number}",
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
        "extra_body": {"min_tokens": NUM_TOKENS},
    }


async def streams(engine: EngineServe) -> list[tuple[str, str]]:
    """Id and text of all streams, which run at once."""

    async def read(client: openai.AsyncOpenAI, number: int) -> tuple[str, str]:
        stream = await client.completions.create(**fields(number), stream=True)
        chunks = [chunk async for chunk in stream]
        [finish_reason] = [c.finish_reason for chunk in chunks for c in chunk.choices if c.finish_reason]
        assert finish_reason == "length"
        return chunks[0].id, "".join(choice.text for chunk in chunks for choice in chunk.choices)

    client = openai.AsyncOpenAI(
        base_url=f"{engine.url}/v1", api_key="unused", max_retries=0, timeout=DEADLINE_S
    )
    async with client:
        with engine.stopped():  # until all are there: they shall take memory from each other on any machine
            reading = [asyncio.ensure_future(read(client, number)) for number in range(NUM_STREAMS)]
            await asyncio.to_thread(engine.wait_for_requests, NUM_STREAMS)
        return list(await asyncio.gather(*reading))


# ---------------------------------------------------------------- a run full of faults


@pytest.fixture
def run_here(capfd: pytest.CaptureFixture[str]) -> Command:
    """Runs a command in this process; what a process of its own adds is seen at `replay`."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        code = cli.run(arguments)
        return subprocess.CompletedProcess(arguments, code, *capfd.readouterr())

    return run


@pytest.mark.slow
def test_faults_change_no_text(recorded, mode, client):
    """The shared server, without faults and with other settings of the cache, says what each text must be."""
    expected = [client.completions.create(**fields(number)).choices[0].text for number in range(NUM_STREAMS)]
    assert recorded.texts == expected
    assert recorded.metrics["retracted_reqs_total"] >= 5
    swapped = recorded.metrics["swapped_out_tokens_total"], recorded.metrics["swapped_in_tokens_total"]
    if mode != "recompute":
        assert swapped[0] >= swapped[1] > 0  # what the cache has kept is not copied back
    else:
        assert swapped == (0, 0)
    assert recorded.metrics["host_used_tokens"] == 0


def test_the_log_is_replayed_to_its_last_decision(recorded, tmp_path):
    done = run_engine(tmp_path, "replay", str(recorded.log))
    assert (done.returncode, done.stderr) == (0, "")
    match = re.search(r"([\d,]+) passes, ([\d,]+) equal \(100 %\)", done.stdout)
    assert match, done.stdout
    assert match[1] == match[2]
    assert int(match[1].replace(",", "")) > NUM_TOKENS
    assert f"{NUM_STREAMS} requests" in done.stdout


def test_what_if_tells_another_story(recorded, run_here):
    done = run_here("replay", str(recorded.log), "--set", "schedule_policy=lof")
    assert (done.returncode, done.stderr) == (0, "")
    for word in ("TTFT", "TPOT"):
        assert word in done.stdout


def test_the_page_has_every_request(recorded, run_here, tmp_path):
    target = tmp_path / "trace.html"
    done = run_here("trace", str(recorded.log), "-o", str(target))
    assert (done.returncode, done.stderr) == (0, "")
    assert f"{NUM_STREAMS} requests" in done.stdout
    page = target.read_text()
    assert [rid for rid in recorded.ids if rid not in page] == []
    assert not re.search(r"<(script|link|img)[^>]+(src|href)=.?https?:", page)  # complete in itself


def test_the_trace_file_for_perfetto_has_every_request(recorded, run_here):
    done = run_here("trace", str(recorded.log), "--format", "perfetto", "-o", "-")
    assert (done.returncode, done.stderr) == (0, "")
    events = json.loads(done.stdout)["traceEvents"]
    assert [rid for rid in recorded.ids if rid not in done.stdout] == []
    assert all(event["dur"] >= 0 for event in events if event["ph"] == "X")


def test_server_command_and_file_give_the_same_reasons(recorded, run_here):
    lost_places = 0
    for rid, why in recorded.whys.items():
        assert why["id"] == rid
        assert why["sentence"].startswith(f"{rid}-0 ")
        assert f"with {NUM_TOKENS} tokens (length)" in why["sentence"]
        lost_places += why["sentence"].count("a fault that --chaos asked for")
    assert lost_places >= 1

    first = recorded.whys[recorded.ids[0]]
    table = "".join("\t".join(row) + "\n" for row in (first["columns"], *first["rows"]))
    assert recorded.why_live == f"{first['sentence']}\n{table}"
    done = run_here("why", recorded.ids[0], "--log", str(recorded.log))
    told = re.sub(
        r"\((cmpl-[0-9a-f-]+)\)", "(another request)", done.stdout
    )  # a client learns no ids of others
    assert (done.returncode, told, done.stderr) == (0, recorded.why_live, "")


def test_a_request_that_never_was(recorded, run_here):
    response, _output = recorded.unknown
    assert response.status_code == 404
    assert "cmpl-never" in response.json()["error"]["message"]
    done = run_here("why", "cmpl-never", "--log", str(recorded.log))
    assert_one_line(done, "cmpl-never", codes=(4,))


def test_a_request_that_never_was_by_the_command(recorded):
    code, stdout, stderr = recorded.unknown[1]
    assert (code, stdout, stderr.count("\n")) == (4, "", 1)
    assert stderr.startswith("engine: ")
    assert "cmpl-never" in stderr


# ---------------------------------------------------------------- a run cut short


@pytest.fixture(scope="module")
def cut_short(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The log of a scheduler that was killed in the middle of an answer."""
    log = tmp_path_factory.mktemp("killed") / "decisions.edl"
    arguments = ("--dtype", "float32", *SLOW, "--max-restarts", "0", "--decision-log", str(log))
    with EngineServe(str(model), *arguments) as engine:
        engine.wait_until_ready()
        with Stream(engine) as stream:
            os.kill(engine.pids["scheduler"], signal.SIGKILL)
            stream.rest()
        assert engine.wait() == 1
    return log


@pytest.mark.slow
def test_a_killed_scheduler_leaves_a_log_to_its_last_decision(cut_short, tmp_path):
    done = run_engine(tmp_path, "replay", str(cut_short))
    assert (done.returncode, done.stderr) == (0, "")
    assert "equal (100 %)" in done.stdout
    assert "1 request," in done.stdout
    trace = run_engine(tmp_path, "trace", str(cut_short), "-o", str(tmp_path / "page.html"))
    assert trace.returncode == 0, trace.stderr


@pytest.mark.slow
def test_half_a_record_is_told_and_costs_no_more_than_itself(cut_short, tmp_path):
    torn = tmp_path / "torn.edl"
    torn.write_bytes(cut_short.read_bytes()[:-3])
    done = run_engine(tmp_path, "replay", str(torn))
    assert done.returncode == 4, done.stderr  # what could be read is equal, but something is lost
    assert "100 %" in done.stdout
    assert "the file ends inside a record" in done.stdout


# ---------------------------------------------------------------- what new users type


@pytest.mark.parametrize("command", COMMANDS_OF_A_LOG)
def test_a_file_that_is_no_log_is_one_line(command, tmp_path, run_here):
    (tmp_path / "folder").mkdir()
    (tmp_path / "empty").touch()
    (tmp_path / "text").write_text("Dear engine,\nwhy?\n")
    for name, word in (
        ("missing", "No such file"),
        ("folder", "directory"),
        ("empty", "is not a decision log"),
        ("text", "is not a decision log"),
    ):
        path = tmp_path / name
        done = run_here(*COMMANDS_OF_A_LOG[command], str(path))
        assert_one_line(done, str(path), word)


@pytest.mark.fast_cases(4)
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("why",), ("RID",)),
        (("why", "cmpl-1", "--lgo", "x"), ("--lgo", "--log")),
        (("why", "cmpl-1", "--log", "x", "--url", "y"), ("--log", "--url")),
        (("why", "cmpl-1", "--url", "http://127.0.0.1:9"), ("127.0.0.1:9", "--log")),
        (("replay",), ("FILE",)),
        (("replay", "x", "--set", "schedule_policy"), ("schedule_policy=lpm",)),
        (("replay", "x", "--set", "shedule_policy=lpm"), ("schedule_policy",)),
        (("replay", "x", "--set", "schedule_policy=lmp"), ("lmp", "lpm")),
        (("replay", "x", "--set", "port=80"), ("port",)),
        (("trace",), ("FILE",)),
        (("trace", "x", "--format", "pdf"), ("pdf", "perfetto")),
        (("simulate", "no-such-model"), ("no-such-model", "llama-3.1-8b")),
        (("simulate", "--compare", "fcfs,lmp"), ("lmp", "lpm")),
        (("simulate", "--device", "tpu"), ("tpu", "h200")),
        (("simulate", "--workload", "missing.jsonl"), ("missing.jsonl",)),
        (("simulate", "--rate", "0"), ("rate",)),
    ],
    ids=" ".join,
)
def test_a_wrong_argument_is_one_line(arguments, words, tmp_path, monkeypatch, run_here):
    monkeypatch.chdir(tmp_path)
    done = run_here(*arguments)
    assert_one_line(done, *words, codes=(3,) if "http://127.0.0.1:9" in arguments else (2,))


def assert_one_line(done: Any, *words: str, codes: tuple[int, ...] = (2,)) -> None:
    """The command refused, said why in a line with these words, and printed nothing else."""
    assert done.returncode in codes, done
    assert done.stdout == ""
    assert done.stderr.startswith("engine: "), done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    for word in words:
        assert word in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("layout", [(), ("--dp", "2"), ("--pp", "2"), ("--overlap",)], ids=" ".join)
def test_a_stream_says_how_much_of_its_prompt_is_read(start_serve, model: Path, tmp_path: Path, layout):
    """Over HTTP, from real processes; the log replays to equal decisions."""
    log = tmp_path / "decisions.log"
    options = ("--dtype", "float32", "--chunked-prefill-size", "64", "--decision-log", str(log))
    engine = start_serve(str(model), *options, *layout).wait_until_ready()
    body = {
        "messages": [{"role": "user", "content": "one two three four five six seven " * 30}],
        "max_tokens": 2,
        "stream": True,
        "return_progress": True,
    }
    reply = httpx.post(f"{engine.url}/v1/chat/completions", json=body, timeout=DEADLINE_S).text
    events = [json.loads(line[6:]) for line in reply.splitlines() if line.startswith("data: {")]
    told = [event["prompt_progress"] for event in events if "prompt_progress" in event]
    processed = [each["processed"] for each in told]
    total = told[0]["total"]
    assert total > 200
    assert processed == [*range(64, total, 64), total]
    assert all(each["total"] == total and each["cache"] == 0 for each in told)
    assert [each["time_ms"] for each in told] == sorted(each["time_ms"] for each in told)
    assert engine.stop() == 0
    for path in tmp_path.glob("decisions*"):
        for run in read_runs(path):
            assert replay(run).is_equal
