"""LoRA adapters as peft saves them, with random numbers, for the tests that need no peft."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from engine.models.adapters.base_modules import BaseModules
from engine.models.adapters.read_adapter import read_adapter
from engine.models.spec.model_spec import ModelSpec
from engine.runtime.adapter_spec import LoadedAdapter


def write_adapter(
    folder: Path,
    base: ModelSpec,
    *,
    seed: int = 0,
    rank: int = 4,
    modules: Sequence[str] = ("q_proj", "v_proj"),
    size: float = 0.5,
    **config: Any,
) -> Path:
    """Write an adapter of these modules in all layers; `config`: further fields of adapter_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    tensors = {}
    for module in BaseModules(base).by_name.values():
        if module.name.rpartition(".")[2] in modules:
            for part, shape in (("A", (rank, module.inputs)), ("B", (module.outputs, rank))):
                numbers = rng.standard_normal(shape) * size / np.sqrt(shape[1])
                tensors[f"base_model.model.{module.name}.lora_{part}.weight"] = numbers.astype(np.float32)
    save_file(tensors, folder / "adapter_model.safetensors")
    fields = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "bias": "none", **config}
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    return folder


def loaded(folder: Path, base: ModelSpec, store_id: int, name: str, *, pinned: bool = False) -> LoadedAdapter:
    """An adapter that a server has loaded."""
    return LoadedAdapter(store_id, read_adapter(folder, name, base), pinned)
