"""`BaseModules`: the modules of a base model that an adapter can change, and why it cannot change the others."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from ...runtime.errors import ConfigError
from ..hf.multimodal_types import MULTIMODAL
from ..spec.layer_form import KV_UP
from ..weight_files.needed_tensors import needed_modules
from ..weight_files.single_blocks import usual_block_name

if TYPE_CHECKING:
    from ..spec.model_spec import ModelSpec

EMBEDDING: Final = "model.embed_tokens"
HEAD: Final = "lm_head"


class BaseModule(NamedTuple):
    """A module with its number of inputs and outputs; the inputs of the embedding are the tokens."""

    name: str
    outputs: int
    inputs: int


class BaseModules:
    """The modules by name, in the order of the model."""

    def __init__(self, spec: ModelSpec) -> None:
        self.by_name: dict[str, BaseModule] = {
            EMBEDDING: BaseModule(EMBEDDING, spec.hidden_size, spec.vocab_size)
        }
        for module in needed_modules(spec):
            if module.is_linear and ".experts." not in module.name and not module.name.endswith(KV_UP):
                self.by_name[module.name] = BaseModule(module.name, *module.shape)
        self.by_name[HEAD] = BaseModule(HEAD, spec.vocab_size, spec.hidden_size)
        self._spec, self._form = spec, spec.form
        self._kind = MULTIMODAL.get(spec.language_of)

    def find(self, name: str) -> BaseModule | None:
        """The module of a name in an adapter, which may lack the prefix of a model with a head.

        In an adapter of a multimodal model the language model's modules are called as in its folder.
        """
        if self._kind is not None:
            name = (self._kind.usual_name(f"{name}.") or "").removesuffix(".")
        if self._spec.mlp_layers:
            name = usual_block_name(self._spec, name)
        return self.by_name.get(name) or self.by_name.get(f"model.{name}")

    def is_of_tower(self, name: str) -> bool:
        """Whether a module in an adapter belongs to a tower, which is not loaded."""
        return self._kind is not None and self._kind.usual_name(f"{name}.") is None

    def linears(self) -> list[str]:
        """Names of the linear layers without the head: what peft calls "all-linear"."""
        return [name for name in self.by_name if name not in (EMBEDDING, HEAD)]

    def reason_against(self, name: str) -> str:
        """Why there is no such module."""
        if ".experts" in name or name.endswith(("mlp.gate", ".router", "shared_expert_gate")):
            return "adapters of experts and routers are not supported; train one without them"
        last = name.rpartition(".")[2]
        if name.endswith(KV_UP):
            return f"its adapters are not supported, because queries take in a part of {last}; train one without it"
        own = (*self._form.qkv_names, *self._form.mlp_names)
        if last in ("qkv_proj", "gate_up_proj"):
            return "this model has them as separate modules; use an adapter trained on q_proj, k_proj, v_proj, ..."
        if last in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj") and last not in own:
            fused = " and ".join(name for name in own if name in ("qkv_proj", "gate_up_proj"))
            return f"this model has {fused or ', '.join(own)} instead; use an adapter trained on them"
        return "the base model has no such linear layer; the adapter belongs to another model"


def check_shapes(
    path: Path,
    base: BaseModule,
    a: tuple[str, tuple[int, ...]],
    b: tuple[str, tuple[int, ...]],
    rank: int | None,
) -> int:
    """Check the shapes of A [rank, inputs] and B [outputs, rank], given with their tensors' names; returns the rank.

    Args:
        rank: the rank that the configuration says; None: it says none.

    Raises:
        ConfigError: they do not belong to the module, or to the rank.
    """
    (a_name, a_shape), (b_name, b_shape) = a, b
    found = a_shape[0] if len(a_shape) == 2 else 0
    if rank is None:
        rank = found
    for name, shape, wanted in (
        (a_name, a_shape, (rank, base.inputs)),
        (b_name, b_shape, (base.outputs, rank)),
    ):
        if shape == wanted and rank > 0:
            continue
        swapped = ""
        if a_shape == (base.outputs, rank) and b_shape == (rank, base.inputs):
            swapped = " (A and B are swapped)"
        elif shape == wanted[::-1]:
            swapped = " (it is transposed)"
        raise ConfigError(
            f"{path}: tensor {name!r} has the shape {list(shape)}, but {base.name} of this model with rank {rank} "
            f"needs {list(wanted)}{swapped}; the adapter belongs to another model, or its file is damaged"
        )
    return rank
