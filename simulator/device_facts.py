"""`DeviceFacts`: the properties of a device that determine the duration of a step.

Peaks are from the vendors' public data sheets (NVIDIA H200, H100 SXM5 and A100 80GB SXM tensor core GPUs: dense BF16
without sparsity, memory bandwidth, PCIe per direction; network cards of the DGX systems of each generation). The share
of the peaks that a step reaches, and the fixed time of a step, are assumptions with an error of up to a factor of about
1.5; a decision log of the real machine gives better ones (`recorded/fitted.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

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
