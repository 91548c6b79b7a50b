"""What all tests share: no GPU test without a GPU, and no wall-clock limit on Hypothesis' single examples."""

from __future__ import annotations

import hypothesis
import pytest

# The machine may be busy with other things; `timeout` in pyproject.toml ends what really hangs.
hypothesis.settings.register_profile("engine", deadline=None, print_blob=True)
hypothesis.settings.load_profile("engine")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip GPU tests where there is no GPU; torch is asked only when one is about to run."""
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    import torch

    if not torch.cuda.is_available():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
