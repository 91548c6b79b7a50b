"""Models with random weights of real shapes, as folders in Hugging Face layout and as GGUF files.

The tensors are those of the table with which a start checks files, so every family of the engine can be written. The
tokenizer is that of another GGUF file, which may have fewer tokens than these models have rows.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np

from engine.models.families.registry import GGUF_FAMILIES
from engine.models.gguf.gguf_file import GGUFFile
from engine.models.gguf.gguf_tokenizer import build_gguf_tokenizer
from engine.models.gguf_names import stacked_names, stored_names
from engine.models.load_spec import load_spec
from engine.models.source import resolve_source
from engine.models.spec.model_spec import ModelSpec
from engine.models.weight_files.needed_tensors import Module, needed_modules

if TYPE_CHECKING:
    import gguf

    Bytes = np.typing.NDArray[np.uint8]

Recipe = Literal["Q4_0", "Q4_K_M", "W4A16"]
"""GGUF types of the linear layers; the second mixes Q4_K and Q6_K, the third has embeddings and head in bf16."""
GROUP_SIZE: Final = 32
"""Weights with one scale in a folder of 4 bits, as in Q4_0."""
DEVIATION: Final = 0.02
"""Of the weights of linear layers, as that of real models."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A real model's shape.

    Attributes:
        config: its config.json.
        metadata: keys of its GGUF file that are not common to all architectures, without the architecture's name.
        expert_type: GGUF type of its experts; everything else is in Q4_0.
    """

    config: Mapping[str, Any]
    metadata: Mapping[str, float | int | bool | str] = field(default_factory=dict)
    expert_type: str = "Q4_0"

    def with_layers(self, layers: int) -> Shape:
        """The same with another number of layers."""
        return Shape({**self.config, "num_hidden_layers": layers}, self.metadata, self.expert_type)


SHAPES: Final[Mapping[str, Shape]] = {
    name: Shape(**shape)
    for name, shape in json.loads(Path(__file__).with_name("shapes.json").read_text())["cpu"].items()
}
"""By the name of the model. Mixtures have four layers, and the vocabulary of the default model. LFM2 attends in layer 1
instead of 2, so that two layers have both kinds."""


def write_folder(shape: Shape, folder: Path, tokenizer: Path, four_bits: bool = False) -> Path:
    """A model in Hugging Face layout, written atomically if it is missing.

    Args:
        tokenizer: a GGUF file with one.
        four_bits: linear layers as compressed-tensors' `pack-quantized` (W4A16, symmetric); everything else is in bf16.
    """
    import torch
    from safetensors.torch import save_file

    if folder.exists():
        return folder
    partial = _partial(folder)
    partial.mkdir(parents=True)
    quantization = {"quantization_config": _W4A16} if four_bits else {}
    (partial / "config.json").write_text(json.dumps({**shape.config, **quantization}, indent=2))
    build_gguf_tokenizer(GGUFFile(tokenizer)).save(str(partial / "tokenizer.json"))
    (partial / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    generator = torch.Generator().manual_seed(0)

    def random(module: Module) -> torch.Tensor:
        if _is_norm(module):
            return torch.ones(module.shape, dtype=torch.bfloat16)
        weight = torch.empty(module.shape, dtype=torch.bfloat16)
        return weight.normal_(0.0, DEVIATION, generator=generator)

    def packed(module: Module) -> dict[str, torch.Tensor]:
        rows, columns = module.shape
        words = torch.randint(-(2**31), 2**31, (rows, columns // 8), dtype=torch.int32, generator=generator)
        scales = torch.empty((rows, columns // GROUP_SIZE)).uniform_(0.7, 1.3, generator=generator)
        scales = scales.mul_(DEVIATION / 4.6).to(torch.bfloat16)
        parts = {"packed": words, "scale": scales, "shape": torch.tensor([rows, columns])}
        return {f"{module.name}.{module.part}_{part}": tensor for part, tensor in parts.items()}

    index: dict[str, str] = {}
    for number, modules in enumerate(_shards(spec_of(partial))):
        tensors: dict[str, torch.Tensor] = {}
        for module in modules:
            if four_bits and module.is_linear:
                tensors |= packed(module)
            else:
                tensors[f"{module.name}.{module.part}"] = random(module)
            if module.has_bias:
                tensors[f"{module.name}.bias"] = torch.zeros(module.shape[0], dtype=torch.bfloat16)
        name = f"model-{number:05}.safetensors"
        save_file(tensors, partial / name, metadata={"format": "pt"})
        index |= dict.fromkeys(tensors, name)
    (partial / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    partial.rename(folder)
    return folder


_W4A16: Final = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 4,
                "type": "int",
                "symmetric": True,
                "dynamic": False,
                "observer": "minmax",
                "strategy": "group",
                "group_size": GROUP_SIZE,
            },
        }
    },
}


def write_gguf(shape: Shape, path: Path, tokenizer: Path, recipe: Recipe = "Q4_0") -> Path:
    """A GGUF file in 4 bits, written atomically if it is missing; `tokenizer`: another one with a tokenizer."""
    import gguf

    if path.exists():
        return path
    partial = _partial(path)
    partial.parent.mkdir(parents=True, exist_ok=True)
    config = partial.with_suffix(".config")
    config.mkdir(exist_ok=True)
    (config / "config.json").write_text(json.dumps(shape.config))
    spec = spec_of(config)
    shutil.rmtree(config)
    arch = next(arch for arch, family in GGUF_FAMILIES.items() if family.model_type == spec.model_type)
    writer: Any = gguf.GGUFWriter(partial, arch)  # its annotations are incomplete
    _copy_tokenizer(writer, gguf.GGUFReader(tokenizer), spec.vocab_size)
    _add_metadata(writer, spec)
    for key, value in shape.metadata.items():
        kind = {bool: "add_bool", int: "add_uint32", float: "add_float32", str: "add_string"}[type(value)]
        getattr(writer, kind)(f"{arch}.{key}", value)
    _add_tensors(writer, spec, shape.expert_type, recipe)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.rename(path)
    return path


def spec_of(folder: Path) -> ModelSpec:
    """The architecture of a folder, which may be without weights."""
    return load_spec(resolve_source(str(folder), need_weights=False))


def _partial(path: Path) -> Path:
    partial = path.with_name(path.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.unlink(missing_ok=True)
    return partial


def _is_norm(module: Module) -> bool:
    return len(module.shape) == 1


def _shards(spec: ModelSpec) -> Iterator[list[Module]]:
    """Modules of about a gigabyte each."""
    shard: list[Module] = []
    for module in needed_modules(spec):
        shard.append(module)
        if sum(2 * each.num_parameters for each in shard) > 1e9:
            yield shard
            shard = []
    if shard:
        yield shard


def _copy_tokenizer(writer: gguf.GGUFWriter, reader: gguf.GGUFReader, vocab_size: int) -> None:
    """With unused tokens up to the model's number, which llama.cpp wants."""
    import gguf

    num_tokens = len(reader.fields["tokenizer.ggml.tokens"].contents())
    more = vocab_size - num_tokens
    fillers: dict[str, list[Any]] = {
        "tokenizer.ggml.tokens": [f"<|unused_{n}|>" for n in range(more)],
        "tokenizer.ggml.token_type": [int(gguf.TokenType.UNUSED)] * more,
        "tokenizer.ggml.scores": [0.0] * more,
    }
    for entry in reader.fields.values():
        if not entry.name.startswith("tokenizer."):
            continue
        if entry.types[0] == gguf.GGUFValueType.ARRAY:
            writer.add_array(entry.name, [*entry.contents(), *fillers.get(entry.name, [])])
        else:
            writer.add_key_value(entry.name, entry.contents(), entry.types[0])


def _add_metadata(writer: gguf.GGUFWriter, spec: ModelSpec) -> None:
    writer.add_context_length(spec.max_position_embeddings)
    writer.add_embedding_length(spec.hidden_size)
    writer.add_block_count(spec.num_layers)
    writer.add_feed_forward_length(spec.intermediate_size)
    writer.add_head_count(spec.num_heads)
    if spec.state is None:
        writer.add_head_count_kv(spec.num_kv_heads)
    else:
        layers = range(spec.num_layers)
        writer.add_head_count_kv([spec.num_kv_heads if spec.attends(layer) else 0 for layer in layers])
        writer.add_shortconv_l_cache(spec.state.conv_taps)
    writer.add_key_length(spec.head_dim)
    writer.add_value_length(spec.head_dim)
    writer.add_layer_norm_rms_eps(spec.rms_norm_eps)
    writer.add_rope_freq_base(spec.rope_theta)
    writer.add_vocab_size(spec.vocab_size)
    if spec.experts is not None:
        writer.add_expert_count(spec.experts.num_experts)
        writer.add_expert_used_count(spec.experts.num_active)
        writer.add_expert_feed_forward_length(spec.experts.intermediate_size)


def _add_tensors(writer: gguf.GGUFWriter, spec: ModelSpec, expert_type: str, recipe: Recipe) -> None:
    import gguf

    rng = np.random.default_rng(0)
    stored = {name: in_file for name, in_file, _ in stored_names(spec)}
    stacks = dict(stacked_names(spec))
    for module in needed_modules(spec, one_expert=True):
        if module.is_expert:
            assert spec.experts is not None
            stack = module.name.replace(".experts.0.", ".experts.")
            blocks = random_blocks(rng, (spec.experts.num_experts, *module.shape), expert_type)
            writer.add_tensor(stacks[stack], blocks, raw_dtype=gguf.GGMLQuantizationType[expert_type])
            if module.has_bias:
                biases = np.zeros((spec.experts.num_experts, module.shape[0]), dtype=np.float32)
                writer.add_tensor(stacks[stack].removesuffix("weight") + "bias", biases)
            continue
        name = stored[f"{module.name}.{module.part}"]
        if _is_norm(module):
            writer.add_tensor(name, np.ones(module.shape, dtype=np.float32))
        elif module.is_linear or module.name in ("model.embed_tokens", "lm_head"):
            if recipe == "W4A16" and not module.is_linear:
                writer.add_tensor(
                    name, _random_bf16(rng, module.shape), raw_dtype=gguf.GGMLQuantizationType.BF16
                )
                continue
            kind = _type_in_q4_k_m(module.name, spec) if recipe == "Q4_K_M" else "Q4_0"
            blocks = random_blocks(rng, module.shape, kind)
            writer.add_tensor(name, blocks, raw_dtype=gguf.GGMLQuantizationType[kind])
        else:  # a router, or a convolution without its axis of length 1
            weight = rng.standard_normal(module.shape, dtype=np.float32) * np.float32(DEVIATION)
            writer.add_tensor(name, weight.reshape(module.shape[0], -1))
        if module.has_bias:
            writer.add_tensor(stored[f"{module.name}.bias"], np.zeros(module.shape[0], dtype=np.float32))


def _random_bf16(rng: np.random.Generator, shape: tuple[int, ...]) -> Bytes:
    weight = rng.standard_normal(shape, dtype=np.float32) * np.float32(DEVIATION)
    return (weight.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)


def _type_in_q4_k_m(name: str, spec: ModelSpec) -> str:
    """As `llama-quantize` chooses: 6 bits for the head, and for some layers' v and down projection."""
    if name in ("model.embed_tokens", "lm_head"):
        return "Q6_K" if name == "lm_head" or spec.tie_word_embeddings else "Q4_K"
    if not name.endswith(("v_proj", "down_proj")):
        return "Q4_K"
    layer, eighth = int(name.split(".")[2]), spec.num_layers // 8
    is_outer = layer < eighth or layer >= 7 * spec.num_layers // 8
    return "Q6_K" if is_outer or (layer - eighth) % 3 == 2 else "Q4_K"


def random_blocks(rng: np.random.Generator, shape: tuple[int, ...], ggml_type: str) -> Bytes:
    """Weights of about `DEVIATION`: uniform numbers, and scales that give their values this size."""
    if ggml_type in ("Q4_K", "Q6_K"):
        return _random_super_blocks(rng, shape, ggml_type)
    num = int(np.prod(shape)) // 32
    nibbles = rng.integers(0, 256, (num, 16), dtype=np.uint8)
    if ggml_type == "MXFP4":  # a power of two; the nibbles are values to 6, with a deviation of 2.9
        scales = np.full((num, 1), 127 - 7, dtype=np.uint8)
    else:
        assert ggml_type == "Q4_0", ggml_type  # integers from -8 to 7, with a deviation of 4.6
        deltas = rng.uniform(0.7, 1.3, num) * DEVIATION / 4.6
        scales = deltas.astype(np.float16).view(np.uint8).reshape(-1, 2)
    blocks = np.concatenate([scales, nibbles], axis=1)
    return blocks.reshape(*shape[:-1], -1)


def _random_super_blocks(rng: np.random.Generator, shape: tuple[int, ...], ggml_type: str) -> Bytes:
    num = int(np.prod(shape)) // 256
    deltas = rng.uniform(0.7, 1.3, (num, 1)) * DEVIATION

    def halves(values: np.typing.NDArray[np.float64]) -> Bytes:
        return values.astype(np.float16).view(np.uint8)

    if ggml_type == "Q4_K":  # 63 * (0 to 15, less 7.5); the 6 bits of all scales and minima are ones
        scales = deltas / (4.6 * 63)
        ones = np.full((num, 12), 255, dtype=np.uint8)
        parts = [halves(scales), halves(scales * 7.5), ones, rng.integers(0, 256, (num, 128), dtype=np.uint8)]
    else:  # 64 * (-32 to 31)
        numbers = rng.integers(0, 256, (num, 192), dtype=np.uint8)
        parts = [numbers, np.full((num, 16), 64, dtype=np.uint8), halves(deltas / (18.5 * 64))]
    return np.concatenate(parts, axis=1).reshape(*shape[:-1], -1)
