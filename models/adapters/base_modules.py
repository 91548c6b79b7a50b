"""`BaseModules`: the modules of a base model that an adapter can change; `Targets`: those that peft's fields select.

Patterns come from files that are not trusted, and Python's regular expressions can take exponential time; so patterns
with repeated groups or many repetitions are refused.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from ...runtime.errors import ConfigError
from ..hf.multimodal_types import MULTIMODAL
from ..spec.layer_form import KV_UP
from ..weight_files.needed_tensors import needed_modules
from ..weight_files.stored_forms import usual_block_name

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ..fields import Fields
    from ..spec.model_spec import ModelSpec

EMBEDDING: Final = "model.embed_tokens"
HEAD: Final = "lm_head"


STACKS: Final = ("up_proj", "down_proj")
"""Ends of transformers' parameters that stack the modules of all experts (gate_up_proj), in their order."""
EXPERTS: Final = "experts"
"""The modules of all experts, as a target of adapters."""


def target_of(name: str) -> str:
    """The name of a module in `--lora-target-modules`: the last part of its name, or `EXPERTS`."""
    return EXPERTS if f".{EXPERTS}." in name else name.rpartition(".")[2]


class BaseModule(NamedTuple):
    """A module with its number of inputs and outputs; the inputs of the embedding are the tokens."""

    name: str
    outputs: int
    inputs: int


class BaseModules:
    """The modules by name, in the order of the model.

    Attributes:
        has_tower: whether images are computed, by modules that adapters do not change.
    """

    def __init__(self, spec: ModelSpec) -> None:
        self.has_tower = spec.vision is not None
        self.by_name: dict[str, BaseModule] = {
            EMBEDDING: BaseModule(EMBEDDING, spec.hidden_size, spec.vocab_size)
        }
        for module in needed_modules(spec):
            if module.is_linear and not module.name.endswith(KV_UP):
                self.by_name[module.name] = BaseModule(module.name, *module.shape)
        self.by_name[HEAD] = BaseModule(HEAD, spec.vocab_size, spec.hidden_size)
        self._spec, self._form = spec, spec.form
        self._kind = MULTIMODAL.get(spec.files.language_of)

    def find(self, name: str) -> BaseModule | None:
        """The module of a name in an adapter, which may lack the prefix of a model with a head.

        In an adapter of a multimodal model the language model's modules are called as in its folder.
        """
        if self._kind is not None:
            name = (self._kind.usual_name(f"{name}.") or "").removesuffix(".")
        if self._form.mlp_layers:
            name = usual_block_name(self._spec, name)
        return self.by_name.get(name) or self.by_name.get(f"model.{name}")

    def is_of_tower(self, name: str) -> bool:
        """Whether a module in an adapter belongs to a tower or to what connects it."""
        return self._kind is not None and self._kind.usual_name(f"{name}.") is None

    def linears(self) -> list[str]:
        """Names of the linear layers without the head and the experts: what peft calls "all-linear"."""
        return [name for name in self.by_name if name not in (EMBEDDING, HEAD) and target_of(name) != EXPERTS]

    def expert_parts(self, layer: int, *, is_down: bool) -> list[tuple[BaseModule, tuple[int, int, int]]]:
        """The modules of an expert in a stack, called `experts.*`, with their rows of the stack.

        Empty: the layer has no such experts.
        """
        experts = self._spec.experts
        if experts is None:
            return []
        names = experts.names
        block = f"{self._spec.layer_name(layer)}.{names.block}.{EXPERTS}"
        parts = (names.down,) if is_down else experts.first_parts
        modules = [self.by_name.get(f"{block}.0.{part}") for part in parts]
        found = [module for module in modules if module is not None]
        num, height = len(found), sum(module.outputs for module in found)
        if names.stacks_in_turn:
            rows = [(n, height, num) for n in range(num)]
        else:
            rows = [(n * height // num, (n + 1) * height // num, 1) for n in range(num)]
        called = [
            module._replace(name=module.name.replace(f"{EXPERTS}.0.", f"{EXPERTS}.*.")) for module in found
        ]
        return list(zip(called, rows, strict=True))

    @property
    def are_stacks_transposed(self) -> bool:
        """Whether peft takes inputs of experts for outputs, as their stacks do not say that they are transposed."""
        return self._spec.experts is not None and self._spec.experts.names.stacks_transposed

    @property
    def num_experts(self) -> int:
        """Experts of a layer."""
        return 0 if self._spec.experts is None else self._spec.experts.num_experts

    def reason_against(self, name: str) -> str:
        """Reason why there is no such module."""
        if name.endswith(("mlp.gate", ".router", "shared_expert_gate")):
            return "adapters of routers are not supported; train one without them"
        last = name.rpartition(".")[2]
        if "_exps." in name:
            return "adapters of experts in GGUF files are not supported; give the adapter's folder instead"
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


ALL_LINEAR: Final = "all-linear"
_MAX_PATTERN_CHARS: Final = 2000
_MAX_REPETITIONS: Final = 8
_REPEATED_GROUP: Final = re.compile(r"\)[*+{]")
_REPETITION: Final = re.compile(r"(?<!\\)[*+{]")
_LAYER: Final = re.compile(r".*?\.[^.]*\.(\d+)\.")


class Targets:
    """The selection of one configuration."""

    def __init__(self, fields: Fields, base: BaseModules) -> None:
        """Read `target_modules`, `exclude_modules`, `layers_to_transform` and `layers_pattern`.

        Raises:
            ConfigError: a value is of another type, or a pattern is invalid.
        """
        self._linears = set(base.linears())
        self._chosen = _names_or_pattern(fields, "target_modules")
        self._excluded = _names_or_pattern(fields, "exclude_modules")
        layers = fields.get("layers_to_transform")
        self._layers: set[int] | None = None
        if layers is not None and layers != []:
            indices = layers if isinstance(layers, list) else [layers]
            self._layers = {index for index in indices if type(index) is int and index >= 0}
            if len(self._layers) != len(indices):
                raise fields.error("layers_to_transform", layers, "expected layer numbers, each once")
        patterns = fields.get("layers_pattern") or []
        patterns = [patterns] if isinstance(patterns, str) else patterns
        if not isinstance(patterns, list) or any(not isinstance(pattern, str) for pattern in patterns):
            raise fields.error("layers_pattern", patterns, "expected a string or a list of strings")
        self._layer_patterns = [
            compiled(fields, "layers_pattern", pattern, r"(?:^|.*?\.){}\.(\d+)\.") for pattern in patterns
        ] or [_LAYER]

    def include(self, name: str) -> bool:
        """Whether the module of this name is selected, by peft's rules."""
        if self._excluded is not None and _matches(self._excluded, name):
            return False
        if self._chosen is None:
            return True
        if self._chosen == ALL_LINEAR:
            return name in self._linears and self._includes_layer_of(name)
        if isinstance(self._chosen, re.Pattern):
            return _matches(self._chosen, name)
        return _matches(self._chosen, name) and self._includes_layer_of(name)

    def _includes_layer_of(self, name: str) -> bool:
        if self._layers is None:
            return True
        found = next(filter(None, (pattern.match(name) for pattern in self._layer_patterns)), None)
        return found is not None and int(found[1]) in self._layers


def pattern_value(patterns: Sequence[tuple[re.Pattern[str], float]], name: str, default: float) -> float:
    """The value of the first pattern that matches the end of a module's name."""
    return next((value for pattern, value in patterns if pattern.match(name)), default)


def compiled_patterns(fields: Fields, name: str) -> list[tuple[re.Pattern[str], float]]:
    """A field such as `rank_pattern`: numbers by patterns of module names.

    Raises:
        ConfigError: it is no such object.
    """
    values = fields.get(name) or {}
    if not isinstance(values, dict):
        raise fields.error(name, values, "expected an object of numbers by module names")
    return [
        (compiled(fields, name, pattern, r"(?:.*\.)?(?:{})$"), _number(fields, name, values, pattern))
        for pattern in values
    ]


def compiled(fields: Fields, name: str, pattern: str, form: str = "{}") -> re.Pattern[str]:
    """A pattern of the file, put into `form`.

    Raises:
        ConfigError: it is invalid, or could take long.
    """
    too_long = len(pattern) > _MAX_PATTERN_CHARS or len(_REPETITION.findall(pattern)) > _MAX_REPETITIONS
    if too_long or _REPEATED_GROUP.search(pattern):
        raise fields.error(
            name,
            pattern,
            f"expected a pattern without repeated groups and with at most {_MAX_REPETITIONS} repetitions",
        )
    try:
        return re.compile(form.replace("{}", pattern))
    except re.error as error:
        raise fields.error(name, pattern, f"which is no regular expression: {error}") from error


def _names_or_pattern(fields: Fields, name: str) -> list[str] | re.Pattern[str] | str | None:
    value = fields.get(name)
    if value is None or value == []:
        return None
    if isinstance(value, str):
        return ALL_LINEAR if value.lower() == ALL_LINEAR else compiled(fields, name, value)
    if not isinstance(value, list) or any(not isinstance(item, str) for item in value):
        raise fields.error(name, value, "expected module names, or a pattern")
    return value


def _matches(chosen: list[str] | re.Pattern[str] | str, name: str) -> bool:
    if isinstance(chosen, re.Pattern):
        return chosen.fullmatch(name) is not None
    return any(name == each or name.endswith(f".{each}") for each in chosen)


def _number(fields: Fields, name: str, values: Mapping[str, object], pattern: str) -> float:
    value = values[pattern]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e6:
        raise fields.error(f"{name}[{pattern!r}]", value, "expected a positive number")
    return float(value)
