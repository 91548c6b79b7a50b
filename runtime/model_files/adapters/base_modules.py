"""`BaseModules`: the modules of a base model that an adapter can change, and why it cannot change the others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from ..weight_files.needed_tensors import KV_UP, needed_modules

if TYPE_CHECKING:
    from ..model_spec import ModelSpec

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
        self._fused = spec.model_type == "phi3"

    def find(self, name: str) -> BaseModule | None:
        """The module of a name in an adapter, which may lack the prefix of a model with a head."""
        return self.by_name.get(name) or self.by_name.get(f"model.{name}")

    def linears(self) -> list[str]:
        """Names of the linear layers without the head: what peft calls "all-linear"."""
        return [name for name in self.by_name if name not in (EMBEDDING, HEAD)]

    def reason_against(self, name: str) -> str:
        """Why there is no such module."""
        if ".experts" in name or name.endswith("mlp.gate"):
            return "adapters of experts and routers are not supported; train one without them"
        last = name.rpartition(".")[2]
        if name.endswith(KV_UP):
            return f"its adapters are not supported, because queries take in a part of {last}; train one without it"
        if self._fused and last in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"):
            return "this model has qkv_proj and gate_up_proj instead; use an adapter trained on them"
        if last in ("qkv_proj", "gate_up_proj"):
            return "this model has them as separate modules; use an adapter trained on q_proj, k_proj, v_proj, ..."
        return "the base model has no such linear layer; the adapter belongs to another model"
