"""`DriverGpu`: one GPU as the driver lists it, with the MIG devices into which it is partitioned."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """One NVIDIA GPU: name, total and free memory, compute capability as (major, minor), None if unknown."""

    name: str
    total_bytes: int
    free_bytes: int
    compute_capability: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class DriverGpu:
    """One GPU, or one MIG device of it.

    Attributes:
        names: that `CUDA_VISIBLE_DEVICES` may give, in full: its UUID; a MIG device has the older form, too.
        is_partitioned: MIG is on: CUDA shows its MIG devices in its place.
        mig_devices: in the driver's order.
    """

    names: tuple[str, ...]
    facts: GpuFacts
    is_partitioned: bool = False
    mig_devices: tuple[DriverGpu, ...] = ()

    @property
    def is_mig(self) -> bool:
        """Whether it is a MIG device."""
        return self.names[0].startswith("MIG-")
