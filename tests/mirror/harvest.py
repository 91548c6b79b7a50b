"""The variants of Triton kernels that servers of real models launch, seen on a mirror of an H200 while they start.

    python -m tests.mirror.harvest       # writes benchmarks/gpu/variants.json

A server compiles everything before it serves, so its start is enough. Each starts in a process of its own, in the
shapes of a real model with few layers. Nothing is computed, and memory is not touched: only types, strides and sizes
count.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"

import pytest
import torch
from torch import Tensor

from benchmarks.gpu.variants import Variant, read_variants, write_variants
from engine.launch.resolve.host_facts import read_host_facts
from engine.launch.resolve.memory_budget import capacity_of
from engine.launch.resolve.nvidia_gpus import GpuFacts
from engine.launch.resolve.prepare import prepare
from engine.model_runner.kernels.probe import Finding, KernelProbe
from engine.model_runner.load import load_model_runner
from engine.model_runner.weights.dummy import DummyStore
from engine.runtime.config.config_sources import from_arguments, merge

from .launches import Variant as Launched
from .memory import DeviceMemory, HostMemory
from .mirror import NO_SGL_KERNEL, mirror_device
from .streams import Stream

_SHAPES: Final = json.loads((Path(__file__).parents[2] / "benchmarks/shapes.json").read_text())
_FREE_BYTES: Final = 16 << 30
_NUM_SMS: Final = 132
_TIME_LIMIT_S: Final = 1200


@dataclass(frozen=True)
class Server:
    """A server that is started.

    Attributes:
        shape: config.json.
        settings: beside the model.
        capability: of the GPU.
        architectures: those that launch the same variants.
    """

    shape: dict[str, Any]
    settings: dict[str, Any] = field(default_factory=dict)
    capability: tuple[int, int] = (9, 0)
    architectures: tuple[int, ...] = (80, 90, 100)


def _shape(kind: str, name: str, **fields: Any) -> dict[str, Any]:
    config = _SHAPES[kind][name]
    return {**(config if kind == "gpu" else config["config"]), "num_hidden_layers": 2, **fields}


_LLAMA: Final = _shape("gpu", "Llama-3.1-8B")
_WITH_FP8: Final = (90, 100)
_AWQ: Final = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True}
_FP8_BLOCKS: Final = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "weight_block_size": [128, 128],
}
_GEMMA2: Final = {
    "model_type": "gemma2",
    "architectures": ["Gemma2ForCausalLM"],
    "vocab_size": 256_000,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
}
_QWEN3_NEXT: Final = {
    "model_type": "qwen3_next",
    "architectures": ["Qwen3NextForCausalLM"],
    "vocab_size": 151_936,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
SERVERS: Final = {
    "Qwen3-0.6B": Server(_shape("gpu", "Qwen3-0.6B")),
    "Qwen3-8B": Server(_shape("gpu", "Qwen3-8B")),
    "Llama-3.1-8B": Server(_LLAMA),
    "Llama-3.1-8B fp8 KV": Server(_LLAMA, {"kv_cache_dtype": "fp8"}, architectures=_WITH_FP8),
    "Llama-3.1-8B fp8": Server(_LLAMA, {"quantization": "fp8"}, architectures=_WITH_FP8),
    "Llama-3.1-8B fp8, A100": Server(_LLAMA, {"quantization": "fp8"}, (8, 0), (80,)),
    "Llama-3.1-8B drafts": Server(_LLAMA, {"speculative": "ngram"}),
    "Llama-3.1-8B AWQ": Server({**_LLAMA, "quantization_config": _AWQ}),
    "Qwen3-8B FP8": Server(
        _shape("gpu", "Qwen3-8B", quantization_config=_FP8_BLOCKS), architectures=_WITH_FP8
    ),
    "Gemma-2-2B": Server(_GEMMA2),
    "Gemma-3-1B": Server(_shape("cpu", "gemma-3-1b", num_hidden_layers=6)),
    "LFM2-1.2B": Server(_shape("cpu", "lfm2-1.2b", num_hidden_layers=3)),
    "Qwen3-30B-A3B": Server(_shape("cpu", "qwen3-30b-a3b", vocab_size=151_936)),
    "gpt-oss-20B": Server(_shape("cpu", "gpt-oss-20b", vocab_size=201_088)),
    "Qwen3-Next-80B-A3B": Server(_shape("cpu", "qwen3-30b-a3b", **_QWEN3_NEXT)),
}


def harvest(server: Server) -> list[Variant]:
    """Start a server; kernels must be made for the interpreter."""
    facts = read_host_facts()
    gpu = GpuFacts("mirror", _FREE_BYTES, _FREE_BYTES, server.capability)
    kernels = KernelProbe(NO_SGL_KERNEL, Finding("3.6"), server.capability)
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        (Path(folder) / "config.json").write_text(json.dumps(server.shape))
        settings = {
            "model": folder,
            "load_format": "dummy",
            "device": "cuda",
            "dtype": "bfloat16",
            **server.settings,
        }
        host = replace(facts, gpus=(gpu,), torch_version="2.11.0+cu130")
        prepared = prepare(merge(from_arguments({"swap_space": 0.0, **settings})), host=host)
        _compute_nothing(patch)
        with mirror_device(kernels=kernels, num_sms=_NUM_SMS) as mirror:
            mirror.memory.total_bytes = _FREE_BYTES
            with mirror.loading():
                capacity = capacity_of(prepared.config, prepared.spec)
                load_model_runner(prepared.config, prepared.source, prepared.spec, capacity)
            return [_variant(launched, server.architectures) for launched in mirror.launches.variants]


def _compute_nothing(patch: pytest.MonkeyPatch) -> None:
    """Drop queued calls, except the marks that are waited for; leave memory as the system gives it."""

    def allocate(_memory: Any, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty_strided(tuple(shape), tuple(stride), dtype=dtype)

    def allocate_host(_memory: Any, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype)

    patch.setattr(Stream, "put", lambda _stream, _work: None)
    patch.setattr(DeviceMemory, "allocate", allocate)
    patch.setattr(HostMemory, "allocate", allocate_host)
    patch.setattr(HostMemory, "is_pinned", lambda _memory, _tensor: True)
    patch.setattr(DummyStore, "read", lambda *_: None)


def _variant(launched: Launched, architectures: tuple[int, ...]) -> Variant:
    signature = {
        name: f"{kind}:16" if fact == "D" else kind
        for name, kind, fact in launched.arguments
        if kind != "constexpr"
    }
    return Variant(
        launched.module,
        launched.kernel,
        signature,
        dict(launched.constants),
        dict(launched.options),
        architectures,
    )


def merged(found: dict[str, list[Variant]]) -> list[Variant]:
    """Equal variants once, with the names of the servers and all their architectures."""
    servers: dict[str, dict[str, Variant]] = {}
    for server, variants in found.items():
        for variant in variants:
            servers.setdefault(json.dumps(variant.identity), {})[server] = variant
    result = []
    for same in servers.values():
        architectures = {arch for variant in same.values() for arch in variant.architectures}
        first = next(iter(same.values()))
        result.append(replace(first, architectures=tuple(sorted(architectures)), servers=tuple(same)))
    return result


def main() -> None:
    """All servers, in processes of their own, or one in this process."""
    parser = argparse.ArgumentParser(description="The Triton variants that servers launch while they start")
    parser.add_argument("--one", nargs=2, metavar=("SERVER", "FILE"), help="of one server, into another file")
    if one := parser.parse_args().one:
        write_variants(harvest(SERVERS[one[0]]), Path(one[1]))
        return
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in SERVERS:
            file = Path(folder) / "variants.json"
            command = [sys.executable, "-m", "tests.mirror.harvest", "--one", name, str(file)]
            subprocess.run(command, check=True, timeout=_TIME_LIMIT_S)
            found[name] = read_variants(file)
    write_variants(merged(found))


if __name__ == "__main__":
    main()
