"""Forms in which a folder's files hold tensors: `HeaderEntry`, stacks of experts, and layers of a single block.

Experts of a layer may be stored as one tensor; `unstacked` finds the parts that are the experts' own:

    mlp.experts.gate_up_proj   [E, 2I, H], or transposed: [E, H, 2I]
    mlp.experts.down_proj      [E, H, I], or transposed: [E, I, H]

In the header each part becomes an entry of its own, `mlp.experts.3.up_proj.weight`, so that nothing else knows about
stacks. As in transformers, a stack is transposed if it does not have the first shape. Some families have other names
for the two (`ExpertNames`). Stacks of Llama 4 and gpt-oss are always transposed. Those of gpt-oss have gates and ups
in turn, and a bias each, `<stack>_bias`. In MXFP4 these stacks are two tensors each, which are not transposed:

    <stack>_blocks   [E, outputs, inputs / 32, 16] bytes   -> `mlp.experts.3.up_proj.weight_blocks`
    <stack>_scales   [E, outputs, inputs / 32] bytes       -> `mlp.experts.3.up_proj.weight_scales`

Other stacks have the experts' tensors as they are, one after the other, with scales and all: those of MLX, and of
exports that quantize stacks:

    mlp.switch_mlp.up_proj.scales   [E, I, H / group]   -> `mlp.experts.3.up_proj.scales`
    mlp.experts.up_proj.weight      [E, I, H]           -> `mlp.experts.3.up_proj.weight`

Where each layer is a single block, as in Nemotron-H, the block is its `mixer`, whatever it is; everything else names it
by its kind (`usual_block_name`):

    backbone.layers.3.mixer.q_proj.weight  ->  model.layers.3.self_attn.q_proj.weight
"""

# E experts, I intermediate size of an expert, H hidden size.

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Set
from typing import TYPE_CHECKING, Final, NamedTuple

from ..spec.quantization import BLOCK_LEN
from .needed_tensors import needed_modules

if TYPE_CHECKING:
    from ..spec.experts_spec import ExpertsSpec
    from ..spec.model_spec import ModelSpec

# E experts, I intermediate size of an expert, H hidden size.


class HeaderEntry(NamedTuple):
    """One tensor in the header of a safetensors file, or the part of one that is an expert's own."""

    dtype_name: str  # as in the header
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the file
    num_bytes: int
    strides: tuple[int, ...] = ()  # in numbers; empty: contiguous
    added: int = 0  # to the values in the file


# E experts, I intermediate size of an expert, H hidden size.


_ITEM_BYTES: Final = {
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16"), 2),
    **dict.fromkeys(("U8", "I8", "F8_E4M3", "F8_E8M0"), 1),
}
_PLAIN: Final = ("F32", "F16", "BF16", "U8")
BLOCKS, SCALES = "_blocks", "_scales"
"""Ends of the names of a weight's two tensors in MXFP4."""
_USUAL_MODULES: Final = ("gate_proj", "up_proj", "down_proj")
"""Names of an expert's modules in MLX, whatever they are in the family's own files."""


class _Stack(NamedTuple):
    """The weights of all experts: the modules whose outputs it has, and their sizes.

    `in_turn`, `transposed`: see `ExpertNames`.
    """

    modules: tuple[str, ...]
    rows: int
    columns: int
    in_turn: bool
    transposed: bool


def unstacked(entries: Mapping[str, HeaderEntry], spec: ModelSpec) -> dict[str, HeaderEntry]:
    """The entries of a file with those of the experts' parts instead of stacks, if the model takes such parts."""
    if spec.experts is None:
        return dict(entries)
    stacks = _stacks(spec.experts, spec.experts.latent_size or spec.hidden_size)
    of_experts = _of_experts(spec.experts)
    if not any(suffix in name or of_experts.search(name) for name in entries for suffix in stacks):
        return dict(entries)
    needed = {module.name for module in needed_modules(spec, one_expert=True)}
    found: dict[str, HeaderEntry] = {}
    for name, entry in entries.items():
        match = of_experts.fullmatch(name)
        if match is not None:
            found |= _one_by_one(match, entry, spec.experts) or {name: entry}
            continue
        parts = dict(_parts(name, entry, spec.experts, stacks, needed))
        found |= parts or {name: entry}
    return found


def _of_experts(experts: ExpertsSpec) -> re.Pattern[str]:
    """Names of tensors that all experts of a layer share; groups: the block, the module, and the kind of tensor."""
    modules = "|".join({*map(re.escape, (*experts.first_parts, experts.names.down)), *_USUAL_MODULES})
    return re.compile(rf"(.*\.{re.escape(experts.names.block)})\.(?:switch_mlp|experts)\.({modules})\.(\w+)")


def _one_by_one(match: re.Match[str], entry: HeaderEntry, experts: ExpertsSpec) -> dict[str, HeaderEntry]:
    """The parts of a tensor of all experts; nothing if it is not one."""
    block, module, kind = match.groups()
    if not entry.shape or entry.shape[0] != experts.num_experts or entry.dtype_name not in _ITEM_BYTES:
        return {}
    names = experts.names
    module = {"gate_proj": names.gate, "up_proj": names.up, "down_proj": names.down}.get(module, module)
    size = entry.num_bytes // experts.num_experts
    return {
        f"{block}.experts.{n}.{module}.{kind}": entry._replace(
            shape=entry.shape[1:], offset=entry.offset + n * size, num_bytes=size
        )
        for n in range(experts.num_experts)
    }


def _stacks(experts: ExpertsSpec, size: int) -> dict[str, _Stack]:
    """The stacks by the end of their names."""
    names, inner = experts.names, experts.intermediate_size
    form = names.stacks_in_turn, names.stacks_in_turn or names.stacks_transposed
    gate_up = _Stack(experts.first_parts, inner, size, *form)
    return {
        f".{names.block}.{names.gate_up_stack}": gate_up,
        f".{names.block}.{names.down_stack}": _Stack((names.down,), size, inner, *form),
    }


def _parts(
    name: str, entry: HeaderEntry, experts: ExpertsSpec, stacks: Mapping[str, _Stack], needed: Set[str]
) -> Iterator[tuple[str, HeaderEntry]]:
    """The parts of a stack; nothing for any other tensor, or for a stack of another shape or dtype."""
    for end in ("", "_bias", BLOCKS, SCALES):
        for suffix, stack in stacks.items():
            if not name.endswith(suffix + end) or entry.dtype_name not in _PLAIN:
                continue
            layout = _layout(entry, experts.num_experts, stack, end)
            if layout is None:
                return
            block = f"{name.removesuffix(suffix + end)}.{experts.names.block}"
            if f"{block}.experts.0.{stack.modules[0]}" not in needed:
                return
            kind = "bias" if end == "_bias" else f"weight{end}"
            for expert in range(experts.num_experts):
                for idx, module in enumerate(stack.modules):
                    part = layout.entry(entry, expert, idx)
                    yield f"{block}.experts.{expert}.{module}.{kind}", part
            return


class _Layout(NamedTuple):
    """Shape and strides of a part, and its place in numbers: expert * `each` + module * `step`."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    each: int
    step: int

    def entry(self, stack: HeaderEntry, expert: int, module: int) -> HeaderEntry:
        item_bytes = _ITEM_BYTES[stack.dtype_name]
        return stack._replace(
            shape=self.shape,
            offset=stack.offset + (expert * self.each + module * self.step) * item_bytes,
            num_bytes=math.prod(self.shape) * item_bytes,
            strides=self.strides,
        )


def _layout(entry: HeaderEntry, num: int, stack: _Stack, end: str) -> _Layout | None:
    """The parts of a tensor; None: it has another shape."""
    rows, columns, num_modules = stack.rows, stack.columns, len(stack.modules)
    height = rows * num_modules  # of one expert's matrix
    if end == "" and entry.shape == (num, height, columns) and not stack.transposed:
        return _Layout((rows, columns), (columns, 1), height * columns, rows * columns)
    if end == "" and entry.shape == (num, columns, height):
        across, step = (num_modules, 1) if stack.in_turn else (1, rows)
        return _Layout((rows, columns), (across, height), height * columns, step)
    inner = {
        "_bias": (),
        SCALES: (columns // BLOCK_LEN,),
        BLOCKS: (columns // BLOCK_LEN, BLOCK_LEN // 2),
    }.get(end)
    if inner is None or entry.shape != (num, height, *inner):
        return None
    width = math.prod(inner)
    across, step = (num_modules * width, width) if stack.in_turn else (width, rows * width)
    strides = (across, *(math.prod(inner[n + 1 :]) for n in range(len(inner))))
    return _Layout((rows, *inner), strides, height * width, step)


_CONVOLUTIONS: Final = (".conv1d.weight", ".conv.weight")
_NORMS: Final = (
    ".input_layernorm.weight",
    ".post_attention_layernorm.weight",
    ".q_norm.weight",
    ".k_norm.weight",
    "model.norm.weight",
)


def from_mlx(files: list[dict[str, HeaderEntry]], spec: ModelSpec) -> list[dict[str, HeaderEntry]]:
    """The entries of all files of a folder, also if MLX has written it: with the axes and norms that others have.

    Convolutions are [channels, taps, 1] there, which has the numbers of [channels, 1, taps] in the same order. 1 was
    added to norms around zero (ml-explore/mlx-lm:mlx_lm/models/qwen3_next.py, `sanitize`).
    """
    taps = 1 if spec.state is None else spec.state.conv_taps

    def is_turned(name: str, entry: HeaderEntry) -> bool:
        return taps > 1 and name.endswith(_CONVOLUTIONS) and entry.shape[1:] == (taps, 1)

    if not any(is_turned(name, entry) for entries in files for name, entry in entries.items()):
        return files
    ends = _NORMS if spec.form.norm == "offset_rms" else ()

    def usual(name: str, entry: HeaderEntry) -> HeaderEntry:
        if is_turned(name, entry):
            return entry._replace(shape=(entry.shape[0], 1, taps))
        return entry._replace(added=1) if name.endswith(ends) else entry

    return [{name: usual(name, entry) for name, entry in entries.items()} for entries in files]


_BODY: Final = "backbone."
_RENAMED: Final = {"model.embeddings.": "model.embed_tokens.", "model.norm_f.": "model.norm."}
_BLOCK: Final = re.compile(r"((?:model\.)?layers\.(\d+)\.)mixer\.(.+)")


def usual_block_name(spec: ModelSpec, name: str) -> str:
    """The name in a model in which the kinds of blocks have names of their own; `name`: of a tensor or module."""
    if name.startswith(_BODY):
        name = "model." + name.removeprefix(_BODY)
    for old, new in _RENAMED.items():
        if f"{name}.".startswith(old):
            name = (new + f"{name}.".removeprefix(old)).removesuffix(".")
    match = _BLOCK.fullmatch(name)
    if match is None or int(match[2]) >= spec.num_layers:
        return name
    layer = int(match[2])
    kind = "self_attn" if spec.attends(layer) else spec.form.names.mlp
    if spec.state is not None and spec.state.layers[layer]:
        kind = spec.state.module
    return f"{match[1]}{kind}.{match[3]}"


_LAYER: Final = re.compile(r"(model\.layers\.)(\d+)(\..+)")
_EMBEDDING: Final = "model.embed_tokens.weight"


def without_image_layers(spec: ModelSpec, names: Mapping[str, str]) -> dict[str, str]:
    """Stored names and usual names, without those of `FilesSpec.image_layers`."""
    skipped, found = spec.files.image_layers, {}
    for stored, name in names.items():
        match = _LAYER.fullmatch(name)
        if match is None:
            found[stored] = name
        elif int(match[2]) not in skipped:
            layer = int(match[2]) - sum(other < int(match[2]) for other in skipped)
            found[stored] = f"{match[1]}{layer}{match[3]}"
    return found


def cut_embedding(spec: ModelSpec, entries: Mapping[str, HeaderEntry]) -> dict[str, HeaderEntry]:
    """The entries with an embedding that has no rows beyond the vocabulary."""
    entry = entries.get(_EMBEDDING)
    if entry is None or len(entry.shape) != 2 or entry.shape[0] <= spec.vocab_size:
        return dict(entries)
    rows, size = entry.shape
    cut = entry._replace(shape=(spec.vocab_size, size), num_bytes=entry.num_bytes // rows * spec.vocab_size)
    return {**entries, _EMBEDDING: cut}
