"""`QuantizationSpec`: the form of a checkpoint's linear weights, or the form to convert them to while loading.

`hf_quantization` and `gguf_config` read it from a model's files.

How each method stores a weight [out, in], by the names of its tensors:

    fp8    weight [out, in] e4m3; weight_scale or weight_scale_inv: one number, one per output, or one per block
    awq    qweight int32 [in, out/8], qzeros int32 [in/group, out/8], scales [in/group, out]
    gptq   qweight int32 [in/8, out], qzeros int32 [in/group, out/8], scales [in/group, out], g_idx int32 [in]
    gguf   a GGUF file's own formats, those in `block_forms`; in a folder, experts in MXFP4 (`stacked_experts`)

`int8` and `int4` are not checkpoint forms: plain weights are quantized to blocks while they are loaded.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from ...runtime.config.model_choice import QuantMethod
from .block_forms import BLOCK_LEN, GGUF_FORMS, INT4, INT8, WIDEST, BlockForm

MADE: Final[tuple[QuantMethod, ...]] = ("fp8", "int8", "int4")
"""Made from plain weights while loading."""
BLOCK_METHODS: Final[tuple[QuantMethod, ...]] = ("gguf", "int8", "int4")
"""Stored as integers in blocks of 32 inputs, which the CPU kernels multiply directly."""

_ROUTER: Final = re.compile(
    r"\.(?:mlp|block_sparse_moe|feed_forward)\.(?:gate|router|router\.layer|shared_expert_gate)$"
)
_EXPERT: Final = re.compile(r"\.experts\.\d+\.")
_IN_8_BITS: Final = (
    ".q_proj",
    ".k_proj",
    ".v_proj",
    ".qkv_proj",
    ".down_proj",
    ".c_proj",
    ".embed_tokens_per_layer",
)
"""Modules that int4 keeps in 8 bits, besides the head: two fifths of SmolLM2-135M's linear layers. Perplexity rises by
20 % with 4 bits everywhere, by 11 % if down_proj has 4 bits too, and by 7.5 % with this choice."""
HEADS: Final = ("lm_head", "model.embed_tokens")
"""The output head's module, or the embedding's if the head is tied to it."""


class QuantizationSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The form of the weights.

    Attributes:
        stored: the checkpoint is in this form; if False, its weights are converted to it while loading.
        kept: the weights stay in it if the device supports it; if False, they are dequantized while loading.
        group_size: awq, gptq: inputs that share a scale and a zero; 0: all of them.
        reordered: gptq: `g_idx` maps each input to its group; if False, groups are neighboring inputs.
        zeros_less_one: gptq: stored zeros are one less than their value, as in the first version of the format.
        block: fp8: (outputs, inputs) that share a scale; None: all inputs of an output share one.
        activation_bound: fp8: larger inputs are clamped to this value; None: no bound.
        weights_only: fp8: activations keep their dtype.
        types: gguf: the file's format of each module stored in blocks; names of experts omit the expert's number.
        plain_modules: linear layers that are not quantized: names or parts of names in whole components
            ("mlp.gate"), or after "re:" regular expressions for the beginning of a name.
        renamed: pairs of beginnings of names: instead of the first, `plain_modules` may have the second.
    """

    method: QuantMethod
    stored: bool = True
    kept: bool = True
    group_size: int = 0
    reordered: bool = False
    zeros_less_one: bool = False
    block: tuple[int, int] | None = None
    activation_bound: float | None = None
    weights_only: bool = False
    types: dict[str, str] = {}
    plain_modules: tuple[str, ...] = ()
    renamed: tuple[tuple[str, str], ...] = ()

    def is_kept(self, *, on_cpu: bool) -> bool:
        """Whether weights stay in this form on the device, according to what is known before loading."""
        return self.kept and (not on_cpu or self.method in BLOCK_METHODS)

    def is_plain(self, name: str) -> bool:
        """Whether this linear layer keeps floating-point weights. Routers of experts do in every checkpoint."""
        if _ROUTER.search(name) or (self.method == "gguf" and unnumbered(name) not in self.types):
            return True
        others = [new + name.removeprefix(old) for old, new in self.renamed if name.startswith(old)]
        return any(
            pattern.search(each) for pattern in compiled(self.plain_modules) for each in (name, *others)
        )

    def form_of(self, name: str, columns: int) -> BlockForm | None:
        """The block form of a module with this many inputs; None: it is not stored in blocks."""
        if self.method not in BLOCK_METHODS or self.is_plain(name) or columns % BLOCK_LEN:
            return None
        if self.method == "gguf":
            return GGUF_FORMS[self.types[unnumbered(name)]]
        in_8_bits = self.method == "int8" or name in HEADS or name.endswith(_IN_8_BITS)
        return INT8 if in_8_bits else INT4

    def bytes_of(self, name: str, rows: int, columns: int) -> int | None:
        """Memory of one module's weight [rows, columns] with its scales, in the kernels' layout; None: it is plain."""
        if self.method in BLOCK_METHODS:
            form = self.form_of(name, columns)
            return None if form is None else form.num_bytes(rows, columns)
        if self.is_plain(name) or name in HEADS:
            return None
        if self.method == "fp8":
            groups = -(-columns // self.block[1]) if self.block else 1
            return rows * columns + 4 * rows * groups
        groups = -(-columns // self.group_size) if self.group_size else 1
        return rows * columns // 2 + 3 * rows * groups  # a scale in float16 and a zero in a byte

    def bytes_together(self, modules: Sequence[tuple[str, int]], columns: int) -> list[int | None]:
        """The same for modules that are fused, each with its number of rows; those of an expert into one weight."""
        forms = [self.form_of(name, columns) for name, _ in modules]
        held = [form for form in forms if form is not None]
        is_one_weight = any(is_of_expert(name) for name, _ in modules)
        if not is_one_weight or all(form == held[0] for form in held):
            return [self.bytes_of(name, rows, columns) for name, rows in modules]
        held = [form._replace(superblock_bytes=0) for form in held]
        if all(form.is_held_like(held[0]) for form in held):
            return [
                None if form is None else held[0].num_bytes(rows, columns)
                for form, (_, rows) in zip(forms, modules, strict=True)
            ]
        return [
            None if form is None else WIDEST.num_bytes(rows, columns)
            for form, (_, rows) in zip(forms, modules, strict=True)
        ]


def unnumbered(name: str) -> str:
    """The name of a module without the expert's number: the experts of a layer are one tensor of the file."""
    return _EXPERT.sub(".experts.", name)


def is_of_expert(name: str) -> bool:
    """Whether a module belongs to an expert."""
    return unnumbered(name) != name


@functools.lru_cache(maxsize=8)
def compiled(modules: tuple[str, ...]) -> tuple[re.Pattern[str], ...]:
    """The patterns of `QuantizationSpec.plain_modules`.

    Raises:
        re.error: one of them cannot be read.
    """
    return tuple(_patterns(modules))


def _patterns(modules: Iterable[str]) -> Iterable[re.Pattern[str]]:
    for module in modules:
        if module.startswith("re:"):
            yield re.compile(r"\A(?:" + module.removeprefix("re:") + ")")
        else:
            yield re.compile(r"(?:\A|\.)" + re.escape(module) + r"(?:\Z|\.)")
