"""`DeviceFacts` and `ModelFacts`: what determines the duration of a step and the memory of a token.

Peaks are from the vendors' public data sheets (NVIDIA H200, H100 SXM5 and A100 80GB SXM tensor core GPUs: dense BF16
without sparsity, memory bandwidth, PCIe per direction; network cards of the DGX systems of each generation). The share
of the peaks that a step reaches, and the fixed time of a step, are assumptions with an error of up to a factor of about
1.5; a decision log of the real machine gives better ones (`fitted.py`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from ..models.weight_files.needed_tensors import attention_modules

if TYPE_CHECKING:
    from ..models.spec.model_spec import ModelSpec

GB: Final = 10**9
TERA: Final = 10**12


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFacts:
    """One device.

    Attributes:
        flops: peak of dense BF16 matmuls, per second.
        memory_bytes: of the device, GB of the data sheet.
        memory_bandwidth: bytes per second, peak.
        host_bandwidth: bytes per second between the device and host memory, one direction; for swaps.
        network_bandwidth: bytes per second between machines, per device; for prefill/decode splits.
        compute_share, bandwidth_share: of the peaks, as reached by large steps.
        step_overhead_s: fixed time of a step: planning, launching, sampling, copying tokens back.
        is_gpu: whether it is a GPU.
    """

    name: str
    flops: float
    memory_bytes: int
    memory_bandwidth: float
    host_bandwidth: float
    network_bandwidth: float
    compute_share: float
    bandwidth_share: float
    step_overhead_s: float
    is_gpu: bool = True

    def times(self, num_devices: int) -> DeviceFacts:
        """Several devices as one, by tensor parallelism: their sums, plus 0.5 ms per doubling for all-reduces."""
        if num_devices == 1:
            return self
        return replace(
            self,
            name=f"{num_devices} x {self.name}",
            flops=self.flops * num_devices,
            memory_bytes=self.memory_bytes * num_devices,
            memory_bandwidth=self.memory_bandwidth * num_devices,
            host_bandwidth=self.host_bandwidth * num_devices,
            network_bandwidth=self.network_bandwidth * num_devices,
            step_overhead_s=self.step_overhead_s + 0.0005 * (num_devices - 1).bit_length(),
        )


_H200: Final = DeviceFacts(
    name="h200",
    flops=989.5 * TERA,
    memory_bytes=141 * GB,
    memory_bandwidth=4.8 * TERA,
    host_bandwidth=64 * GB,  # PCIe 5.0 x16
    network_bandwidth=50 * GB,  # 400 Gbit/s
    compute_share=0.6,
    bandwidth_share=0.8,
    step_overhead_s=0.0015,
)
DEVICES: Final = {
    facts.name: facts
    for facts in (
        _H200,
        replace(_H200, name="h100", memory_bytes=80 * GB, memory_bandwidth=3.35 * TERA),
        replace(
            _H200,
            name="a100",
            flops=312 * TERA,
            memory_bytes=80 * GB,
            memory_bandwidth=2.039 * TERA,
            host_bandwidth=32 * GB,  # PCIe 4.0 x16
            network_bandwidth=25 * GB,  # 200 Gbit/s
        ),
        DeviceFacts(  # two cores of a cloud server with AVX-512 and AMX; the bandwidth of two DDR5-4800 channels
            name="cpu-2",
            flops=1.0 * TERA,
            memory_bytes=16 * GB,
            memory_bandwidth=40 * GB,
            host_bandwidth=10 * GB,
            network_bandwidth=1.25 * GB,
            compute_share=0.4,
            bandwidth_share=0.6,
            step_overhead_s=0.004,
            is_gpu=False,
        ),
    )
}


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Sizes of a dense decoder-only model. Parameters count matrices; norms and biases are negligible."""

    name: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    tie_word_embeddings: bool = False
    dtype_bytes: float = 2.0
    kv_parts: int = 2  # keys and values; with latent attention they are one
    attention_parameters: int | None = None  # of a layer, on average; None: those of q, k, v and o
    kv_numbers: int | None = None  # of a token, all layers; None: all layers have the same heads

    @classmethod
    def of(cls, name: str, spec: ModelSpec, dtype_bytes: float = 2.0) -> ModelFacts:
        """The facts of a model in local files."""
        return cls(
            name=name,
            num_layers=spec.num_layers,
            hidden_size=spec.hidden_size,
            intermediate_size=spec.intermediate_size,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            vocab_size=spec.vocab_size,
            max_position_embeddings=spec.max_position_embeddings,
            tie_word_embeddings=spec.tie_word_embeddings,
            dtype_bytes=dtype_bytes,
            kv_parts=2 if spec.latent is None else 1,
            attention_parameters=_attention_parameters(spec)
            if spec.latent or spec.streams.kv_sources or spec.streams.layer_heads
            else None,
            kv_numbers=spec.kv_bytes_per_token(1)
            if spec.streams.kv_sources or spec.streams.layer_heads
            else None,
        )

    @property
    def layer_parameters(self) -> int:
        """Parameters that are multiplied with every token."""
        attention = self.attention_parameters
        if attention is None:
            attention = 2 * self.hidden_size * self.head_dim * (self.num_heads + self.num_kv_heads)
        return self.num_layers * (attention + 3 * self.hidden_size * self.intermediate_size)

    @property
    def head_parameters(self) -> int:
        """Parameters that are multiplied only with sampled positions."""
        return self.hidden_size * self.vocab_size

    @property
    def weight_bytes(self) -> int:
        """Memory of all weights; an embedding that is not tied to the head counts separately."""
        embeddings = self.head_parameters * (1 if self.tie_word_embeddings else 2)
        return int((self.layer_parameters + embeddings) * self.dtype_bytes)

    @property
    def kv_token_bytes(self) -> int:
        """Memory of one token's keys and values, all layers; KV has 16 bits or more per element."""
        numbers = self.kv_numbers
        if numbers is None:
            numbers = self.num_layers * self.kv_parts * self.num_kv_heads * self.head_dim
        return int(numbers * max(self.dtype_bytes, 2.0))


def _attention_parameters(spec: ModelSpec) -> int:
    modules = [
        module
        for layer in spec.attention_layers
        for module in attention_modules(spec, layer)
        if module.is_linear
    ]
    return sum(math.prod(module.shape) for module in modules) // spec.num_layers


DEFAULT_MODEL: Final = "llama-3.1-8b"
_CONFIGS: Final = (  # from the published config.json files
    # name, layers, hidden and intermediate size, heads, KV heads, head dim, vocabulary, positions, tied embeddings
    ("smollm2-135m", 30, 576, 1536, 9, 3, 64, 49_152, 8192, True),
    ("llama-3.2-1b", 16, 2048, 8192, 32, 8, 64, 128_256, 131_072, True),
    ("llama-3.1-8b", 32, 4096, 14_336, 32, 8, 128, 128_256, 131_072, False),
    ("qwen2.5-32b", 64, 5120, 27_648, 40, 8, 128, 152_064, 32_768, False),
    ("llama-3.1-70b", 80, 8192, 28_672, 64, 8, 128, 128_256, 131_072, False),
)
MODELS: Final = {config[0]: ModelFacts(*config) for config in _CONFIGS}
"""Models with built-in facts, which need no files."""
