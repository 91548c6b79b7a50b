"""What tests of kernels share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.conftest import HAS_NVIDIA_DRIVER


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where Triton kernels run here: a GPU, or without a driver the CPU, in Triton's interpreter."""
    return torch.device("cuda" if HAS_NVIDIA_DRIVER else "cpu")


@pytest.fixture(scope="module")
def poisoned() -> Iterator[None]:
    """What nobody has written holds NaN; whole numbers are 0, which looks like the first row of something.

    torch's own switch for this, deterministic algorithms, imports its compiler first, which takes seconds.
    """
    empty = torch.empty

    def poisoned_empty(*args: Any, **options: Any) -> torch.Tensor:
        out = empty(*args, **options)
        return out.fill_(torch.nan if out.is_floating_point() else 0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", poisoned_empty)
        yield
