"""`--kv-disk` on real servers: prompts survive a restart, however the engine ended."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from .conftest import StartServe
from .serving import EngineServe

pytestmark = [pytest.mark.real_process, pytest.mark.slow, pytest.mark.timeout(900)]

PROMPT = [5 + (k * k * 7 + 3 * k) % 300 for k in range(2000)]
WITHIN_S = 300.0
STORED = 'kv_tier_bytes_total{tier="disk",direction="store"}'


def ask(engine: EngineServe, input_ids: list[int], max_new_tokens: int = 24, **more: Any) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_new_tokens": max_new_tokens}
    body = {"input_ids": input_ids, "sampling_params": sampling, **more}
    response = httpx.post(f"{engine.url}/generate", json=body, timeout=WITHIN_S)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def kill(engine: EngineServe) -> None:
    for pid in (engine.process.pid, *engine.pids.values()):
        os.kill(pid, signal.SIGKILL)
    engine.process.wait()


def stop(engine: EngineServe) -> None:
    assert engine.stop() == 0, engine.log
    assert "Traceback" not in engine.log


@pytest.fixture
def start(start_serve: StartServe, tmp_path: Path) -> Callable[..., EngineServe]:
    """Start a server on the folder of the test, and wait until it has read what is there."""

    def start_on_disk(*arguments: str) -> EngineServe:
        engine = start_serve(*arguments, "--kv-disk", str(tmp_path / "disk"), "--log-level", "info")
        engine.wait_until_ready(WITHIN_S)
        engine.wait_for_log("kv_stores.segment_store kv_disk=")
        return engine

    return start_on_disk


def wait_until_stored(engine: EngineServe, num_bytes: int) -> None:
    """Wait until the disk has the prompts."""
    engine.metrics_when(lambda metrics: metrics[STORED] >= num_bytes)


TP, PP = ("--tp", "2"), ("--pp", "2")


@pytest.mark.parametrize(
    ("end", "ranks"), [(kill, ()), (stop, ()), (kill, TP), (stop, TP), (kill, PP), (stop, PP)]
)
def test_a_prompt_survives_a_restart(
    start: Callable[..., EngineServe], model: Path, end: Callable[[EngineServe], None], ranks: Sequence[str]
) -> None:
    first = start(str(model), *ranks)
    cold = ask(first, PROMPT)
    assert cold["meta_info"]["cached_tokens"] == 0
    if end is kill:
        wait_until_stored(first, 1984 * 256)
    end(first)

    second = start(str(model), *ranks)
    warm = ask(second, PROMPT)

    assert (warm["text"], warm["output_ids"]) == (cold["text"], cold["output_ids"])
    assert warm["meta_info"]["cached_tokens"] == 1984
    assert warm["meta_info"]["cached_tokens_by_tier"] == {"disk": 1984}
    assert second.idle_metrics()['kv_tier_hit_tokens_total{tier="disk"}'] == 1984
    stop(second)


OTHER_PROMPT = [7, *PROMPT[:-1]]


@pytest.mark.parametrize("end", [kill, stop])
def test_each_replica_finds_what_the_other_one_has_stored(
    start: Callable[..., EngineServe], model: Path, end: Callable[[EngineServe], None]
) -> None:
    def ask_replica(engine: EngineServe, replica: int, prompt: list[int]) -> tuple[list[int], int]:
        answer = ask(engine, prompt, data_parallel_rank=replica)
        return answer["output_ids"], answer["meta_info"].get("cached_tokens_by_tier", {}).get("disk", 0)

    def start_two() -> EngineServe:
        engine = start(str(model), "--dp", "2", "--dtype", "float32")
        while engine.log.count("kv_stores.segment_store kv_disk=") < 2:
            engine.leave_the_core_to_it()
        return engine

    first = start_two()
    cold = [ask_replica(first, replica, prompt) for replica, prompt in enumerate((PROMPT, OTHER_PROMPT))]
    assert [loaded for _, loaded in cold] == [0, 0]
    wait_until_stored(first, 2 * 1984 * 512)
    for replica, (prompt, (output, _)) in enumerate(zip((OTHER_PROMPT, PROMPT), reversed(cold), strict=True)):
        assert ask_replica(first, replica, prompt) == (output, 1984)
    end(first)

    second = start_two()
    for replica in (0, 1):
        for prompt, (output, _) in zip((PROMPT, OTHER_PROMPT), cold, strict=True):
            assert ask_replica(second, replica, prompt) == (output, 1984)
    stop(second)


def test_two_servers_on_one_folder_find_what_each_other_store(
    start: Callable[..., EngineServe], model: Path
) -> None:
    one, other = start(str(model)), start(str(model))
    cold = ask(one, PROMPT), ask(other, OTHER_PROMPT)
    for engine in (one, other):
        wait_until_stored(engine, 1984 * 256)

    kill(one)
    warm = ask(other, PROMPT)
    third = start(str(model))
    warm_other = ask(third, OTHER_PROMPT)

    assert [each["output_ids"] for each in (warm, warm_other)] == [each["output_ids"] for each in cold]
    for answer in (warm, warm_other):
        assert answer["meta_info"]["cached_tokens_by_tier"] == {"disk": 1984}
    stop(other)
    stop(third)


def test_a_record_that_is_damaged_in_the_part_of_one_rank_is_lost_to_all(
    start: Callable[..., EngineServe], model: Path, tmp_path: Path
) -> None:
    first = start(str(model), *TP)
    cold = ask(first, PROMPT)
    stop(first)
    (segment,) = (tmp_path / "disk").glob("*/*.open")
    data = bytearray(segment.read_bytes())
    data[60 * 8192 + 64 + 3000] ^= 1  # of 4,096 bytes of a page the second half is that of rank 1
    segment.write_bytes(data)

    second = start(str(model), *TP)
    warm = ask(second, PROMPT)

    assert warm["output_ids"] == cold["output_ids"]
    assert warm["meta_info"]["cached_tokens_by_tier"] == {"disk": 60 * 16}
    stop(second)


@pytest.mark.model
@pytest.mark.parametrize("end", [kill, stop])
def test_a_prompt_of_the_default_model_survives_a_restart(
    start: Callable[..., EngineServe], end: Callable[[EngineServe], None]
) -> None:
    prompt = [100 + (k * k * 31 + 17 * k) % 40_000 for k in range(2000)]
    first = start("default")
    cold = ask(first, prompt)
    if end is kill:
        wait_until_stored(first, 1984 * 23_040)
    end(first)

    second = start("default")
    warm = ask(second, prompt)

    assert warm["text"] == cold["text"]
    assert warm["meta_info"]["cached_tokens_by_tier"] == {"disk": 1984}
    stop(second)


@pytest.mark.parametrize(
    ("role", "ranks"), [("scheduler", ()), ("model_runner_1", TP), ("model_runner_1", PP)]
)
def test_a_rank_that_is_killed_while_it_loads_and_stores(
    start: Callable[..., EngineServe], model: Path, role: str, ranks: Sequence[str]
) -> None:
    """Its requests go on in the next one, from whatever the disk has, with the tokens that they get anyway."""
    # In bfloat16 a token that is computed with those before it may differ from the one after a step of its own.
    settings = ("--dtype", "float32", "--max-total-tokens", "6000", "--max-restarts", "20")
    engine = start(str(model), *settings, *ranks)
    prompts = [[20 + number, *PROMPT[: 600 + 200 * number]] for number in range(4)]
    expected = [ask(engine, prompt)["output_ids"] for prompt in prompts]
    with ThreadPoolExecutor(len(prompts)) as pool:
        for number in range(5):
            lives = engine.log.count("started child=scheduler")
            with engine.stopped():
                answers = [pool.submit(ask, engine, prompt) for prompt in prompts]
                engine.wait_for_requests(len(prompts))
            for _ in range(
                number
            ):  # 0.02 s each: before the look-ups, while it loads, while it computes and stores
                engine.leave_the_core_to_it()
            os.kill(engine.pids[role], signal.SIGKILL)
            assert [answer.result()["output_ids"] for answer in answers] == expected
            while engine.log.count("started child=scheduler") == lives:
                engine.leave_the_core_to_it()
    engine.idle_metrics()
    stop(engine)
    assert "LedgerError" not in engine.log


@pytest.mark.parametrize("end", [kill, stop])
def test_what_the_pool_evicts_is_found_again(
    start: Callable[..., EngineServe], model: Path, end: Callable[[EngineServe], None]
) -> None:
    """Six prompts of 1,600 tokens in a pool of 4,096 with `--kv-write evicted`; SIGTERM stores what is left in it."""
    settings = ("--kv-write", "evicted", "--max-total-tokens", "4096")
    engine = start(str(model), *settings)
    prompts = [[20 + number, *PROMPT[:1599]] for number in range(6)]
    cold = [ask(engine, prompt) for prompt in prompts]
    assert sum(answer["meta_info"]["cached_tokens"] for answer in cold) == 0
    engine.idle_metrics()
    for prompt, answer in zip(prompts[:3], cold, strict=False):
        again = ask(engine, prompt)
        assert again["output_ids"] == answer["output_ids"]
        assert again["meta_info"]["cached_tokens_by_tier"]["disk"] >= 1024
    end(engine)

    engine = start(str(model), *settings)
    found = [ask(engine, prompt) for prompt in prompts]

    assert [each["output_ids"] for each in found] == [each["output_ids"] for each in cold]
    loaded = [each["meta_info"].get("cached_tokens_by_tier", {}).get("disk", 0) for each in found]
    if end is stop:
        assert loaded == [1584] * 6
    else:
        assert sorted(loaded)[-3] == 1584, "those that were evicted were stored"
    stop(engine)


def test_a_flush_survives_a_crash(start: Callable[..., EngineServe], model: Path) -> None:
    engine = start(str(model), "--kv-write", "through")
    ask(engine, PROMPT)
    wait_until_stored(engine, 1984 * 256)
    assert httpx.post(f"{engine.url}/flush_cache", timeout=WITHIN_S).status_code == 200
    kill(engine)

    engine = start(str(model))

    assert ask(engine, PROMPT)["meta_info"]["cached_tokens"] == 0
    stop(engine)


def test_a_folder_that_cannot_be_used_is_named_at_the_start(
    start_serve: StartServe, model: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    engine = start_serve(str(model), "--kv-disk", str(tmp_path / "file"))
    assert engine.wait() != 0
    assert any("kv_disk is" in line and "name a folder with --kv-disk" in line for line in engine.causes)
