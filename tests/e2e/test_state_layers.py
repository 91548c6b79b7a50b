"""A server of a model with state layers: no token is lost or different when its scheduler is killed under its streams,
or when the whole engine is, whose states and pages are on disk."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from .conftest import StartServe
from .serving import DEADLINE_S, SLOW, EngineServe
from .test_kv_disk import PROMPT, WITHIN_S, ask, kill, stop, wait_until_stored

pytestmark = pytest.mark.real_process

SETTINGS = ("--dtype", "float32", "--max-total-tokens", "1024", "--max-running-requests", "4")
SHARED = "the quick brown fox jumps over the lazy dog, and one two three four five six seven "
PROMPTS = [SHARED + "a request waits " * n for n in range(4)]
NUM_TOKENS = 60


@pytest.fixture(scope="module")
def lfm2(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random LFM2 with the tokenizer of the other tests' model."""
    import torch
    from transformers import Lfm2Config, Lfm2ForCausalLM

    folder = tmp_path_factory.mktemp("models") / "small-lfm2"
    torch.manual_seed(0)
    config = Lfm2Config(
        vocab_size=json.loads((model / "config.json").read_text())["vocab_size"],
        hidden_size=64,
        intermediate_size=128,
        block_auto_adjust_ff_dim=False,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        layer_types=["conv", "full_attention", "conv"],
        eos_token_id=2,
    )
    reference = Lfm2ForCausalLM(config)
    with torch.no_grad():
        for parameter in reference.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 1.5 / parameter.shape[-1] ** 0.5)
    reference.save_pretrained(folder)
    for path in model.glob("tokenizer*"):
        shutil.copy(path, folder)
    return folder


def stream(url: str, prompt: str) -> str:
    """The text of a greedy completion, piece by piece."""
    body = {
        "prompt": prompt,
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    text = ""
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=DEADLINE_S) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                document = json.loads(line.removeprefix("data: "))
                assert "error" not in document, document
                text += document["choices"][0]["text"]
    return text


@pytest.mark.slow
def test_streams_survive_killed_schedulers(start_serve: StartServe, lfm2: Path):
    alone = start_serve(str(lfm2), *SETTINGS, "--disable-radix-cache").wait_until_ready()
    expected = [stream(alone.url, prompt) for prompt in PROMPTS]
    assert alone.stop() == 0, alone.log
    engine = start_serve(str(lfm2), *SETTINGS, *SLOW).wait_until_ready()
    source = random.Random(0)

    with ThreadPoolExecutor(4) as threads:
        for restart in (1, 2):
            jobs = [threads.submit(stream, engine.url, prompt) for prompt in PROMPTS]
            engine.metrics_when(lambda metrics: metrics["num_running_reqs"] >= 2)
            time.sleep(source.uniform(0.1, 1.0))
            os.kill(engine.pids["scheduler"], signal.SIGKILL)
            assert [job.result() for job in jobs] == expected
            engine.wait_for_log(f"recovered restart={restart}")

    engine.idle_metrics()
    assert engine.stop() == 0, engine.log
    assert engine.leftovers() == []


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("end", [kill, stop])
def test_a_prompt_and_its_state_survive_a_restart(
    start_serve: StartServe, lfm2: Path, tmp_path: Path, end: Callable[[EngineServe], None]
) -> None:
    def start() -> EngineServe:
        settings = ("--dtype", "float32", "--kv-disk", str(tmp_path / "disk"), "--log-level", "info")
        engine = start_serve(str(lfm2), *settings)
        engine.wait_until_ready(WITHIN_S)
        engine.wait_for_log("kv_stores.segment_store kv_disk=")
        return engine

    first = start()
    cold = ask(first, PROMPT)
    other = ask(first, [*PROMPT[:1500], 7])
    assert cold["meta_info"]["cached_tokens"] == 0
    if end is kill:
        wait_until_stored(first, 1984 * 256)
    end(first)

    second = start()
    warm = ask(second, PROMPT)

    assert warm["output_ids"] == cold["output_ids"] != other["output_ids"]
    assert warm["meta_info"]["cached_tokens"] == 1984
    assert warm["meta_info"]["cached_tokens_by_tier"] == {"disk": 1984}
    stop(second)
    assert "LedgerError" not in second.log
