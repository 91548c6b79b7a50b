"""CPU features that the engine's kernels need, and when weights in blocks of 4 or 8 bits can stay quantized."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from ...runtime.config.engine_config import ModelConfig
    from .host_facts import HostFacts

KERNEL_FLAGS: Final = frozenset(("avx2", "fma"))
"""CPU features that the engine's kernels need. Without better instructions they multiply bfloat16 in float32 and bytes
in 16 bits."""


def against_blocks(
    model: ModelConfig, host: HostFacts, device: str, dtype: str, model_impl: str
) -> tuple[str, str]:
    """Why weights in blocks cannot be used without dequantizing, and a fix; empty strings if they can.

    Args:
        host: its CPU, and whether the engine's kernels are available on it.
        device, dtype, model_impl: without "auto".
    """
    if device != "cpu":
        return f"weights in blocks are multiplied by the CPU only, not by {device}", "use --device cpu"
    if dtype != "bfloat16":
        return (
            f"weights in blocks are multiplied with bfloat16 only, not with {dtype}",
            "use --dtype bfloat16",
        )
    if not host.cpu_flags.issuperset(KERNEL_FLAGS):
        return (
            "weights in blocks are multiplied with AVX2 and FMA, which this CPU lacks",
            "use another CPU",
        )
    if not host.has_cpu_kernels:
        return (
            "weights in blocks are multiplied by the engine's own kernels, for which there is no compiler",
            "install one (Debian: apt install g++)",
        )
    if model_impl == "transformers":
        return "transformers computes with plain weights only", "use --model-impl engine"
    if model.load_format == "dummy" and model.quantization in (None, "gguf"):
        return "random weights have no blocks from a file", "use int8, int4"
    return "", ""
