"""Settings that the kernels refuse: with `--deterministic` (`check_deterministic`), and for weights in blocks of 4 or 8
bits that stay quantized (`against_blocks`).

The guarantee of the former: with the same weights on the same machine, a request's tokens and log-probabilities are
bit-identical alone or in a batch, whatever is cached, wherever its prompt is chunked, and after it was preempted and
recomputed. (A request that samples needs a seed, its own or the engine's, to draw the same tokens again.)

It holds because every operation computes a token from the tokens before it in one fixed order. The engine's CPU kernels
do so: a matmul is one chain of additions for each output (blocks of 4 or 8 bits in one order for any number of tokens),
norms, activations and rotary see one token, attention reads keys in blocks that begin at fixed positions, and the
sampler reads one row. Draft tokens therefore change no result either. Other libraries may split their sums differently
for another number of tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ...runtime.errors import ConfigError

if TYPE_CHECKING:
    from ...models.spec.model_spec import ModelSpec
    from ...runtime.config.engine_config import EngineConfig, ModelConfig
    from .host_facts import HostFacts


def check_deterministic(config: EngineConfig, spec: ModelSpec) -> None:
    """Check a resolved configuration; the runner checks whether the kernels can run here (`fixed_order`).

    Raises:
        ConfigError: `--deterministic` is set with settings that make bits depend on the batch; names all of them.
    """
    if not config.kernels.deterministic:
        return
    model, found = config.model, []
    if model.device != "cpu":
        found.append(
            f"device is {model.device}, and its kernels have no fixed order of sums; use --device cpu"
        )
    if model.dtype != "bfloat16":
        found.append(
            f"dtype is {model.dtype}, and oneDNN splits its matmuls by the number of tokens; use --dtype bfloat16"
        )
    if model.model_impl == "transformers":
        found.append(
            f"{spec.model_type} is computed by transformers, with torch's matmuls; use --model-impl engine"
        )
    if config.parallel.tp > 1:
        found.append(
            f"tp is {config.parallel.tp}, and sums over ranks depend on the number of tokens; use --tp 1"
        )
    if config.kernels.attention_backend not in (None, "native"):
        found.append(
            f"attention_backend is {config.kernels.attention_backend}, and only the blocks of native begin at fixed "
            "positions; omit --attention-backend"
        )
    if native := [name for name in config.kernels.avoided if name.partition(":")[0] == "native"]:
        found.append(
            f"avoid_kernels has {', '.join(native)}, and only those kernels keep one order; leave it out"
        )
    if found:
        raise ConfigError(f"deterministic is on, but {'; and '.join(found)}; or omit --deterministic")


KERNEL_FLAGS: Final = frozenset(("avx2", "fma"))
"""CPU features that the engine's kernels need on x86. Without better instructions they multiply bfloat16 in float32 and
bytes in 16 bits."""
ARM_KERNEL_FLAGS: Final = frozenset(("asimd",))
"""The same of 64-bit ARM."""


def runs_kernels(host: HostFacts) -> bool:
    """Whether the CPU has the instructions of the engine's kernels."""
    return any(host.cpu_flags.issuperset(flags) for flags in (KERNEL_FLAGS, ARM_KERNEL_FLAGS))


def against_blocks(
    model: ModelConfig, host: HostFacts, device: str, dtype: str, model_impl: str
) -> tuple[str, str]:
    """Reason why weights in blocks cannot be used without dequantizing, and a fix; empty strings if they can.

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
    if not runs_kernels(host):
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
