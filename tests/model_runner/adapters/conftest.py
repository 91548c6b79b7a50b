"""Tiny models with adapters in slots."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from engine.model_runner.adapters.adapter_store import SlotSizes
from engine.models.adapters.read_adapter import read_adapter
from engine.runtime.adapter_spec import AdapterSpec
from tests.model_runner.adapters.peft_adapters import PeftAdapter, make_adapter

if TYPE_CHECKING:
    from tests.model_runner.conftest import Driver, TinyModel

WIDE = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96}
"""Sizes that all kernels of the CPU take: heads of 16, gates in whole vectors."""


class Adapted:
    """A tiny model, adapters of it, and their specs."""

    def __init__(self, tiny: TinyModel, adapters: list[PeftAdapter], specs: list[AdapterSpec]) -> None:
        self.tiny, self.adapters, self.specs = tiny, adapters, specs


@pytest.fixture
def make_adapted(make_tiny_model: Callable[..., TinyModel], tmp_path: Path) -> Callable[..., Adapted]:
    """A tiny Llama and so many adapters, of ranks 2, 3, 4, ..."""

    def make(
        num: int, dtype: str = "float32", model: dict[str, Any] | None = None, **options: Any
    ) -> Adapted:
        tiny = make_tiny_model("llama", dtype=dtype, **{**WIDE, **(model or {})})
        adapters = [
            make_adapter(tiny.reference, tmp_path / f"adapter{n}", seed=n, r=n + 2, **options)
            for n in range(num)
        ]
        specs = [read_adapter(one.folder, f"a{n}", tiny.spec) for n, one in enumerate(adapters)]
        return Adapted(tiny, adapters, specs)

    return make


@pytest.fixture
def make_adapted_driver(make_driver: Callable[..., Driver]) -> Callable[..., Driver]:
    """A driver with the adapters in slots 1, 2, ..."""

    def make(adapted: Adapted, targets: set[str] | None = None, **options: Any) -> Driver:
        num = len(adapted.specs)
        driver = make_driver(
            adapted.tiny.spec,
            options.pop("path", adapted.tiny.folder),
            adapter_slots=SlotSizes(num, num + 2, targets),
            **options,
        )
        for n, spec in enumerate(adapted.specs, start=1):
            driver.runner.adapters.store.read(n, spec)
        driver.step([], adapter_loads=[(n, n) for n in range(1, num + 1)])
        return driver

    return make
