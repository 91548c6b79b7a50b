"""What a check of weights reports of the files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
from msgspec import structs
from safetensors.numpy import save_file

from engine.models.gguf.gguf_file import GGUFFile
from engine.models.gguf_names import stored_names
from engine.models.spec.encoder_spec import DenseSpec, PoolingSpec
from engine.models.spec.model_spec import ModelSpec
from engine.models.weight_files.check_weights import check_folder_weights, check_gguf_weights
from engine.models.weight_files.needed_tensors import needed_modules
from engine.runtime.errors import ConfigError

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


def test_an_embedder_may_have_names_without_a_prefix_and_no_head(tmp_path: Path) -> None:
    spec = structs.replace(
        SPEC,
        tie_word_embeddings=True,
        pooling=PoolingSpec(task="embed", pooling="last", size=SPEC.hidden_size),
    )
    write_weights(tmp_path, {name.removeprefix("model."): shape for name, shape in shapes_of(spec).items()})

    checked, summary = check_folder_weights(tmp_path, spec)

    assert checked == spec
    assert summary.num_tensors == len(shapes_of(spec))


def test_an_embedder_s_own_head_is_not_used(tmp_path: Path) -> None:
    spec = structs.replace(SPEC, pooling=PoolingSpec(task="embed", pooling="last", size=SPEC.hidden_size))
    write_weights(tmp_path, shapes_of(spec) | {"lm_head.weight": (SPEC.vocab_size, SPEC.hidden_size)}, seed=1)

    assert check_folder_weights(tmp_path, spec)[0].tie_word_embeddings


def test_a_classifier_is_needed(tmp_path: Path) -> None:
    dense = (DenseSpec(weight="score.weight", in_features=SPEC.hidden_size, out_features=2),)
    spec = structs.replace(SPEC, pooling=PoolingSpec(task="score", pooling="last", size=2, dense=dense))
    write_weights(tmp_path, shapes_of(spec))
    check_folder_weights(tmp_path, spec)

    write_weights(tmp_path, shapes_of(SPEC))
    with pytest.raises(ConfigError, match=r"tensor 'score.weight' is missing"):
        check_folder_weights(tmp_path, spec)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (None, r"2_Dense: has only pickled weights \(.bin\)"),
        ({"linear.weight": (8, 32)}, "tensor 'linear.bias' is missing"),
        ({"linear.weight": (8, 31), "linear.bias": (8,)}, r"has the shape \[8, 31\], .* asks for \[8, 32\]"),
        (
            {"linear.weight": (8, 32), "linear.bias": (8,), "residual.weight": (8, 32)},
            "unexpected tensor 'residual",
        ),
        ({"linear.weight": (8, 32), "linear.bias": (8,)}, ""),
    ],
)
def test_layers_with_folders_of_their_own(
    tmp_path: Path, tensors: dict[str, tuple[int, ...]] | None, message: str
) -> None:
    dense = (
        DenseSpec(
            folder="2_Dense", weight="linear.weight", bias="linear.bias", in_features=32, out_features=8
        ),
    )
    spec = structs.replace(SPEC, pooling=PoolingSpec(task="embed", pooling="last", size=8, dense=dense))
    write_weights(tmp_path, shapes_of(SPEC))
    (tmp_path / "2_Dense").mkdir()
    if tensors is None:
        (tmp_path / "2_Dense" / "pytorch_model.bin").touch()
    else:
        write_weights(tmp_path / "2_Dense", tensors)

    if not message:
        check_folder_weights(tmp_path, spec)
        return
    with pytest.raises(ConfigError, match=message):
        check_folder_weights(tmp_path, spec)


def shapes_of(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    return {f"{module.name}.weight": module.shape for module in needed_modules(spec)}


def write_weights(folder: Path, shapes: Mapping[str, tuple[int, ...]], seed: int = 0) -> None:
    generator = np.random.default_rng(seed)
    save_file(
        {name: generator.standard_normal(shape, np.float32) for name, shape in shapes.items()},
        folder / "model.safetensors",
    )
