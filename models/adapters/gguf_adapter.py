"""`gguf_modules`: the adapted modules of a GGUF file with a LoRA adapter, as llama.cpp's converter writes it.

    general.type = adapter, adapter.type = lora, adapter.lora.alpha = number, general.architecture
    <tensor>.lora_a [rank, inputs], <tensor>.lora_b [outputs, rank]; the embedding's A is [tokens, rank]

The rows of B for q and k are in llama.cpp's order, as those of the weights (`GGUFFamily.neighbors`).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from ...runtime.adapter_spec import AdapterModule
from ...runtime.errors import ConfigError
from ..families.registry import FAMILIES, GGUF_FAMILIES
from ..fields import Fields
from ..gguf.gguf_file import GGUFFile
from ..gguf_names import stored_names
from .base_modules import EMBEDDING, check_shapes

if TYPE_CHECKING:
    from ..spec.model_spec import ModelSpec
    from .base_modules import BaseModules

_DTYPES: Final = ("F32", "F16", "BF16", "Q8_0")
_MAX_ALPHA: Final = 1e9


def gguf_modules(path: Path, spec: ModelSpec, base: BaseModules) -> tuple[AdapterModule, ...]:
    """Read and check the header.

    Raises:
        ConfigError: see `read_adapter`.
    """
    file = GGUFFile(path)
    fields = Fields(path, file.metadata)
    kind, adapter = fields.text("general.type", "model"), fields.text("adapter.type", "")
    if kind != "adapter":
        raise fields.error("general.type", kind, 'expected "adapter": the file holds a model, not an adapter')
    if adapter != "lora":
        raise fields.error("adapter.type", adapter, 'expected "lora"; merge other adapters into the model')
    architecture = fields.text("general.architecture")
    if spec.model_type not in _model_types(architecture):
        raise fields.error(
            "general.architecture",
            architecture,
            f"but the base model is {spec.model_type}; the adapter belongs to another model",
        )
    if tokens := file.metadata.get("adapter.alora.invocation_tokens"):
        raise fields.error("adapter.alora.invocation_tokens", tokens, "activated LoRA is not supported")
    alpha = fields.number("adapter.lora.alpha", 0.0, _MAX_ALPHA)
    known = stored_names(spec, experts=False)
    names = {gguf: hf.removesuffix(".weight") for hf, gguf, _ in known if hf.endswith(".weight")}
    heads = {}
    family = GGUF_FAMILIES[architecture].gguf[architecture]
    if family.neighbors:
        heads = {"self_attn.q_proj": spec.num_heads, "self_attn.k_proj": spec.num_kv_heads}

    modules = []
    for stored, info in file.tensors.items():
        if info.ggml_type.name not in _DTYPES:
            raise ConfigError(
                f"{path}: tensor {stored!r} has the type {info.ggml_type.name}, expected one of {', '.join(_DTYPES)}"
            )
        tensor, dot, part = stored.rpartition(".")
        if part not in ("lora_a", "lora_b") or not dot:
            raise ConfigError(f"{path}: tensor {stored!r} is no part of a LoRA adapter")
        other = f"{tensor}.{'lora_b' if part == 'lora_a' else 'lora_a'}"
        if other not in file.tensors:
            raise ConfigError(f"{path}: {stored!r} is without {other!r}; the file is incomplete")
        if part == "lora_b":
            continue
        called = names.get(tensor, tensor)
        module = base.find(called)
        if module is None:
            raise ConfigError(f"{path}: tensor {stored!r}: {base.reason_against(called)}")
        if family.tiled_values and ".linear_attn." in module.name:
            raise ConfigError(
                f"{path}: tensor {stored!r} changes a delta net, whose heads have another order in GGUF files; give "
                "the adapter's folder instead"
            )
        is_embedding = module.name == EMBEDDING
        a_shape = info.shape[::-1] if is_embedding else info.shape
        rank = check_shapes(path, module, (stored, a_shape), (other, file.tensors[other].shape), None)
        suffix = module.name.partition("layers.")[2].partition(".")[2]
        modules.append(
            AdapterModule(
                module.name,
                rank,
                alpha / rank if alpha else 1.0,
                stored,
                other,
                heads.get(suffix, 0),
                is_embedding,
            )
        )
    if not modules:
        raise ConfigError(f"{path}: holds no LoRA tensors; the file is damaged")
    return tuple(sorted(modules, key=lambda module: module.name))


def _model_types(architecture: str) -> list[str]:
    """Hugging Face's `model_type` of the base models that files with this architecture adapt."""
    families = FAMILIES.values()
    return [one.model_type for one in families if architecture in (*one.gguf, one.stored_as)]
