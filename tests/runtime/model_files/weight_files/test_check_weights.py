"""What a check of weights reports of the files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from engine.runtime.model_files.gguf.gguf_file import GGUFFile
from engine.runtime.model_files.gguf.gguf_names import stored_names
from engine.runtime.model_files.model_spec import ModelSpec
from engine.runtime.model_files.weight_files.check_weights import check_gguf_weights
from engine.runtime.model_files.weight_files.needed_tensors import needed_modules

SPEC = ModelSpec(
    model_type="llama",
    vocab_size=100,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    rms_norm_eps=1e-5,
    rope_theta=1e4,
    max_position_embeddings=64,
    tie_word_embeddings=True,
    torch_dtype="bfloat16",
)


def test_all_files_of_a_split_model_are_counted(write_gguf: Callable[..., Path], tmp_path: Path) -> None:
    stored = {name: gguf for name, gguf, _ in stored_names(SPEC)}
    tensors = {
        stored[f"{module.name}.weight"]: np.zeros(module.shape, np.float32) for module in needed_modules(SPEC)
    }
    names = list(tensors)
    for part in range(3):
        own = {"split.no": part, "split.count": 3}
        path = tmp_path / f"m-0000{part + 1}-of-00003.gguf"
        write_gguf(path, own, {name: tensors[name] for name in names[part::3]})
    file = GGUFFile(tmp_path / "m-00001-of-00003.gguf")

    summary = check_gguf_weights(file, SPEC)
    assert (summary.num_files, summary.num_tensors) == (3, len(names))
    assert summary.num_bytes == sum(tensor.nbytes for tensor in tensors.values())
