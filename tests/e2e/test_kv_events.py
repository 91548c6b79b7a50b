"""KV events of real processes: what a subscriber knows, what it can be told again, and a crash."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
import zmq

from engine.models.hf.hf_config import read_hf_spec
from tests.adapter_files import write_adapter

from .conftest import StartServe
from .kv_event_reader import KVEventReader, sockets_of
from .serving import DEADLINE_S, EngineServe

pytestmark = pytest.mark.real_process

PROMPT: Final = (
    "the quick brown fox jumps over the lazy dog, and a request waits, runs, and is answered once, " * 3
)
PORTS: Final = ("--kv-events", "tcp://127.0.0.1:0", "--kv-events-replay", "tcp://127.0.0.1:0")
"""Any free ports. After a restart the ports are others, which subscribers with fixed addresses do not have to bear."""


def post(engine: EngineServe, path: str, body: object) -> Any:
    answer = httpx.post(f"{engine.url}{path}", json=body, timeout=DEADLINE_S)
    assert answer.status_code == 200, answer.text
    return answer.json() if answer.content.startswith(b"{") else {}


def complete(engine: EngineServe, prompt: str, **fields: object) -> list[int]:
    """Answer a prompt; returns the ids of its tokens."""
    post(engine, "/v1/completions", {"prompt": prompt, "max_tokens": 2, "temperature": 0} | fields)
    tokens: list[int] = post(engine, "/tokenize", {"prompt": prompt})["tokens"]
    return tokens


def whole(tokens: list[int], size: int = 16) -> int:
    return len(tokens) // size * size


@pytest.mark.slow
def test_a_subscriber_knows_what_is_cached(start_serve: StartServe, model: Path):
    engine = start_serve(str(model), "--dtype", "float32", *PORTS).wait_until_ready()
    block_size, events, replays = sockets_of(engine)
    with KVEventReader(events, replays) as reader:
        tokens = complete(engine, PROMPT)
        complete(engine, PROMPT, cache_salt="private")
        reader.catch_up()
        assert (block_size, reader.kinds[0], reader.seqs[0]) == (16, "AllBlocksCleared", 0)
        assert reader.longest(None, tokens) == whole(tokens) > 50
        num_blocks = len(reader.cached)

        more = complete(engine, PROMPT + " and one more")
        reader.read_until(lambda reader: len(reader.cached) > num_blocks)
        assert reader.longest(None, more) == whole(more)

        post(engine, "/flush_cache", {})
        reader.read_until(lambda reader: reader.kinds[-1] == "AllBlocksCleared")
        assert reader.cached == {}
    num_events = len(reader.kinds)
    metrics = engine.metrics_when(lambda metrics: metrics["kv_events_total"] >= num_events)
    assert (metrics["kv_events_total"], metrics["kv_event_replays_total"]) == (num_events, 1)
    assert engine.stop() == 0, engine.log
    assert engine.leftovers() == []


@pytest.mark.slow
def test_evictions_adapters_and_a_crash(start_serve: StartServe, model: Path, tmp_path: Path):
    """With pages of 4 tokens, a pool of 512, and an adapter; then the scheduler is killed."""
    folder = write_adapter(tmp_path / "sql", read_hf_spec(model))
    address, replay = (f"ipc://{tmp_path}/{name}" for name in ("events", "replay"))
    config = f'{{"enable_kv_cache_events": true, "endpoint": "{address}", "replay_endpoint": "{replay}"}}'
    engine = start_serve(
        *(str(model), "--dtype", "float32", "--page-size", "4", "--max-total-tokens", "512"),
        *("--max-model-len", "256", "--lora", f"sql={folder}", "--kv-events-config", config),
    ).wait_until_ready()
    assert sockets_of(engine) == (16, address, replay)
    with KVEventReader(address, replay) as reader:
        for number in range(11):
            complete(engine, f"{number} {PROMPT[:150]}", model="sql" if number % 2 else engine.model)
        adapted = complete(engine, f"and {PROMPT[:150]}", model="sql")
        reader.catch_up()
        assert "BlockRemoved" in reader.kinds
        assert 0 < len(reader.cached) * 16 <= 512
        assert reader.longest("sql", adapted) == whole(adapted) > 16
        assert reader.longest(None, adapted) == 0

        os.kill(engine.pids["scheduler"], signal.SIGKILL)
        # Meanwhile it polls, as subscribers do: in an idle one ZMQ does not renew the subscription.
        reader.read_until(lambda reader: reader.kinds[-1] == "AllBlocksCleared")
        assert (reader.seqs, reader.cached) == ([0], {})
        engine.wait_for_log("recovered restart=1")
        tokens = complete(engine, PROMPT[:150])
        reader.read_until(lambda reader: reader.longest(None, tokens) == whole(tokens))
        assert set(reader.cached.values()) == {
            (None, tuple(tokens[:n])) for n in range(16, len(tokens) + 1, 16)
        }
    assert engine.stop() == 0, engine.log


def test_an_address_in_use_ends_the_start_at_once(start_serve: StartServe):
    with zmq.Context() as context, context.socket(zmq.PUB) as taken:
        port = taken.bind_to_random_port("tcp://127.0.0.1")
        engine = start_serve("no-such-model", "--kv-events", f"tcp://127.0.0.1:{port}")

        assert engine.wait() == 2
    assert engine.causes[0].startswith(
        f"engine: kv_events is 'tcp://127.0.0.1:{port}', but it cannot be listened at"
    )
