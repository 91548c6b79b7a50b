"""`read_gpus`: the GPUs that CUDA will show to the engine's processes, in CUDA's order.

The driver's management library (NVML) lists all GPUs in the order of their buses, whatever `CUDA_VISIBLE_DEVICES` says,
so its list is filtered as CUDA does it. Containers may lack that library although CUDA works: then torch is asked.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from .device_order import other_order
from .driver_gpu import DriverGpu, GpuFacts
from .nvml import list_gpus
from .torch_gpus import gpus_of_torch
from .visible_devices import visible_gpus

logger = logging.getLogger(__name__)

_MASK: Final = "CUDA_VISIBLE_DEVICES"


class Gpus(NamedTuple):
    """The GPUs that CUDA shows, in its order, and the number of others that `CUDA_VISIBLE_DEVICES` hides."""

    visible: tuple[GpuFacts, ...] = ()
    num_hidden: int = 0


def read_gpus(
    root: Path,
    environ: Mapping[str, str],
    *,
    torch_has_cuda: bool,
    ask_driver: Callable[[], Sequence[DriverGpu] | None] = list_gpus,
    ask_torch: Callable[[], tuple[GpuFacts, ...]] = gpus_of_torch,
) -> Gpus:
    """Find the GPUs; without a driver there are none.

    Args:
        root: of the file system with `dev/`.
        environ: the environment of this process.
        torch_has_cuda: whether the installed torch is a CUDA build.
        ask_driver, ask_torch: for tests.
    """
    if not (root / "dev/nvidiactl").exists():
        return Gpus()
    mask = environ.get(_MASK)
    gpus = ask_driver()
    if gpus is None:
        if not torch_has_cuda or mask == "":
            return Gpus()
        found = ask_torch()
        if found:
            logger.warning(
                "libnvidia-ml.so.1 cannot be used, so torch was asked for the GPUs, which takes seconds"
            )
        return Gpus(found)
    order = other_order(environ)
    if order is not None and len({gpu.facts.name for gpu in gpus}) > 1:
        logger.warning(
            "CUDA_DEVICE_ORDER=%s is replaced by PCI_BUS_ID: numbers in %s are those of nvidia-smi",
            order,
            _MASK,
        )
    visible = visible_gpus(gpus, mask)
    return Gpus(visible, max(0, len(gpus) - len(visible)))
