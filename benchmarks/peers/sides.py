"""`Side`: a measured server as data: its command, its address, and its expected times.

All sides get the same share of the machine: every core that this process may use, the same KV capacity in tokens,
sequences of the same length. Other settings are those that its makers recommend and that measured best.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pathlib import Path

    from benchmarks.peers.setup import LlamaCpp, Vllm

MODEL_NAME: Final = "smollm2"
MAX_MODEL_LEN: Final = 4096
HOST: Final = "127.0.0.1"
LLAMA_SLOTS: Final = 16
"""Slots of llama.cpp, which divide its KV: more make each slower, with fewer, requests wait."""


@dataclass(frozen=True, slots=True)
class Side:
    """One server.

    Attributes:
        environment: added to ours.
        fills_kv: its KV pool becomes resident only when it is written, so it is filled before memory is read.
        expected_s: seconds that the start ("start"), filling ("fill") and one round of each workload take, roughly.
    """

    name: str
    command: tuple[str, ...]
    port: int
    environment: Mapping[str, str] = field(default_factory=dict)
    fills_kv: bool = True
    expected_s: Mapping[str, float] = field(default_factory=dict)

    @property
    def url(self) -> str:
        """The address of the server."""
        return f"http://{HOST}:{self.port}"

    def settings(self) -> dict[str, object]:
        """The settings that affect a result."""
        return {"command": list(self.command), "environment": dict(self.environment)}


_FAST: Final = {"fill": 36, "W1": 11, "W2": 7, "W3": 24, "W4": 8, "W5": 34}
_ENGINE_S: Final = {"start": 3, **_FAST}
_VLLM_S: Final = {"start": 80, **_FAST}
_LLAMA_4BIT_S: Final = {"start": 2, "fill": 0, "W1": 10, "W2": 15, "W3": 100, "W4": 75, "W5": 70}
_LLAMA_BF16_S: Final = {"start": 2, "fill": 0, "W1": 16, "W2": 22, "W3": 130, "W4": 75, "W5": 90}

ENGINE_VARIANTS: Final[Mapping[str, tuple[str, ...]]] = {
    "engine-bf16": (),
    "engine-4bit": (),  # the GGUF file's own weights are kept as they are
    "engine-int8": ("--quantization", "int8", "--kv-cache-dtype", "int8"),
}
PEERS: Final = ("vllm", "llama-bf16", "llama-4bit")
SIDES: Final = (*ENGINE_VARIANTS, *PEERS)


@dataclass(frozen=True, slots=True)
class Models:
    """One model in all its forms; `bf16_folder` may be another model, for the sides that serve no other form."""

    gguf: Path
    bf16_folder: Path
    bf16_gguf: Path


@dataclass(frozen=True, slots=True)
class Room:
    """KV capacity of every server."""

    num_tokens: int
    token_bytes: int


def form_of(name: str, models: Models) -> Path:
    """The model form that the side of this name serves."""
    match name:
        case "engine-4bit" | "llama-4bit":
            return models.gguf
        case "llama-bf16":
            return models.bf16_gguf
        case _:
            return models.bf16_folder


def make_side(
    name: str, port: int, models: Models, vllm: Vllm, llama: LlamaCpp, cores: tuple[int, ...], room: Room
) -> Side:
    """The side of this name, on this port."""
    model = form_of(name, models)
    if name in ENGINE_VARIANTS:
        return _engine(name, port, model, room)
    if name == "vllm":
        return _vllm(port, model, vllm, cores, room)
    return _llama(name, port, model, llama, cores, room)


def _engine(name: str, port: int, model: Path, room: Room) -> Side:
    # -P: without the current folder, which would allow `import runtime`.
    command = [sys.executable, "-P", "-m", "engine", "serve", str(model), "--served-model-name", MODEL_NAME]
    command += ["--host", HOST, "--port", str(port), "--max-model-len", str(MAX_MODEL_LEN)]
    command += ["--max-total-tokens", str(room.num_tokens), *ENGINE_VARIANTS[name]]
    return Side(name, tuple(command), port, expected_s=_ENGINE_S)


def _vllm(port: int, model: Path, vllm: Vllm, cores: tuple[int, ...], room: Room) -> Side:
    command = [str(vllm.command), "serve", str(model), "--served-model-name", MODEL_NAME]
    command += ["--host", HOST, "--port", str(port), "--dtype", "bfloat16", "--enable-prefix-caching"]
    command += ["--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", "128"]
    command += ["--max-num-batched-tokens", "2048"]
    # In bytes, because its environment variable accepts only whole GiB.
    command += ["--kv-cache-memory-bytes", str(room.num_tokens * room.token_bytes)]
    environment = {
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "XDG_CACHE_HOME": str(vllm.cache),
        "VLLM_CACHE_ROOT": str(vllm.cache / "vllm"),
        "TORCHINDUCTOR_CACHE_DIR": str(vllm.cache / "inductor"),
        "LD_PRELOAD": ":".join(map(str, vllm.preloads)),
        "PATH": f"{vllm.command.parent}:{os.environ.get('PATH', '')}",
        "PYTHONPATH": "",  # not the engine's
    }
    return Side("vllm", tuple(command), port, environment, expected_s=_VLLM_S)


def _llama(name: str, port: int, model: Path, llama: LlamaCpp, cores: tuple[int, ...], room: Room) -> Side:
    command = [str(llama.server), "--model", str(model), "--alias", MODEL_NAME]
    command += ["--host", HOST, "--port", str(port), "--threads", str(len(cores))]
    command += ["--parallel", str(LLAMA_SLOTS), "--no-kv-unified", "--ctx-size", str(room.num_tokens)]
    expected_s = _LLAMA_4BIT_S if name == "llama-4bit" else _LLAMA_BF16_S
    # It clears its KV at the start, so all of it is resident from then on.
    return Side(name, tuple(command), port, fills_kv=False, expected_s=expected_s)
