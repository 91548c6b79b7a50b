"""`QuantizationSpec`: the form of a checkpoint's linear weights, or the form to convert them to while loading.

Read from `quantization_config` of config.json, or from the separate file of older exports. A form that is not
implemented is refused by name: weights read in the wrong form load without an error and produce wrong output.

How each method stores a weight [out, in], by the names of its tensors:

    fp8    weight [out, in] e4m3; weight_scale or weight_scale_inv: one number, one per output, or one per block
    awq    qweight int32 [in, out/8], qzeros int32 [in/group, out/8], scales [in/group, out]
    gptq   qweight int32 [in/8, out], qzeros int32 [in/group, out/8], scales [in/group, out], g_idx int32 [in]
    gguf   a GGUF file's own formats, those in `block_forms`

`int8` and `int4` are not checkpoint forms: plain weights are quantized to blocks while they are loaded.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, Literal

import msgspec

from .block_forms import BLOCK_LEN, GGUF_FORMS, INT4, INT8, WIDEST, BlockForm
from .fields import Fields
from .json_file import read_json

QuantMethod = Literal["fp8", "awq", "gptq", "gguf", "int8", "int4"]
Quantization = Literal[QuantMethod, "none"]
"""The values of `--quantization`."""

MADE: Final[tuple[QuantMethod, ...]] = ("fp8", "int8", "int4")
"""Made from plain weights while loading."""
BLOCK_METHODS: Final[tuple[QuantMethod, ...]] = ("gguf", "int8", "int4")
"""Stored as integers in blocks of 32 inputs, which the CPU kernels multiply directly."""

SUPPORTED: Final = (
    "fp8 (e4m3; per tensor, channel or block; also as fbgemm_fp8 and as compressed-tensors in float-quantized form), "
    "awq (4 bits, gemm) and gptq (4 bits)"
)
_OWN_FILES: Final = (("quantize_config.json", "gptq"), ("quant_config.json", "awq"))
"""Files that describe the quantization in exports older than `quantization_config`, with the method they imply."""
_GROUP_SIZES: Final = (32, 64, 128, 256, 512, 1024)
_ROUTER: Final = re.compile(r"\.mlp\.gate$")
_EXPERT: Final = re.compile(r"\.experts\.\d+\.")
_IN_8_BITS: Final = (".q_proj", ".k_proj", ".v_proj", ".qkv_proj", ".down_proj")
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

    def is_kept(self, *, on_cpu: bool) -> bool:
        """Whether weights stay in this form on the device, according to what is known before loading."""
        return self.kept and (not on_cpu or self.method in BLOCK_METHODS)

    def is_plain(self, name: str) -> bool:
        """Whether this linear layer keeps floating-point weights. Routers of experts do in every checkpoint."""
        if _ROUTER.search(name) or (self.method == "gguf" and unnumbered(name) not in self.types):
            return True
        return any(pattern.search(name) for pattern in _compiled(self.plain_modules))

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
        """The same for modules that are fused into one weight, each with its number of rows."""
        forms = [self.form_of(name, columns) for name, _ in modules]
        held = [form for form in forms if form is not None]
        if all(form.is_held_like(held[0]) for form in held):
            return [self.bytes_of(name, rows, columns) for name, rows in modules]
        return [
            None if form is None else WIDEST.num_bytes(rows, columns)
            for form, (_, rows) in zip(forms, modules, strict=True)
        ]


def read_quantization(folder: Path, config: Fields) -> QuantizationSpec | None:
    """The quantization that the files of a model folder declare; None: the weights are plain.

    Raises:
        ConfigError: the form is not supported, or the description is damaged.
    """
    value = config.get("quantization_config")
    if value is not None:
        if not isinstance(value, Mapping):
            raise config.error("quantization_config", value, "expected an object")
        fields = Fields(config.path, value, "quantization_config.")
        return _read(fields, fields.text("quant_method"))
    for name, method in _OWN_FILES:
        path = folder / name
        if path.exists():
            fields = Fields(path, read_json(path))
            return _read(fields, fields.text("quant_method", default=method))
    return None


def _read(fields: Fields, method: str) -> QuantizationSpec:
    match method:
        case "awq":
            return _read_awq(fields)
        case "gptq":
            return _read_gptq(fields)
        case "fp8":
            return _read_fp8(fields)
        case "fbgemm_fp8":
            bound = fields.get("activation_scale_ub")
            return QuantizationSpec(
                method="fp8",
                activation_bound=None if bound is None else fields.number("activation_scale_ub", 1e-6, 1e9),
                plain_modules=_names(fields, "modules_to_not_convert"),
            )
        case "compressed-tensors":
            return _read_compressed_tensors(fields)
    raise fields.error("quant_method", method, f"which is not supported; supported are: {SUPPORTED}")


def _read_awq(fields: Fields) -> QuantizationSpec:
    _must_be(fields, "version", "gemm", default="gemm")
    if not fields.boolean("zero_point", default=True):
        raise fields.error("zero_point", False, "only awq with zero points is supported")
    return QuantizationSpec(
        method="awq",
        group_size=_group_size(fields, "group_size", "q_group_size"),
        plain_modules=_names(fields, "modules_to_not_convert"),
    )


def _read_gptq(fields: Fields) -> QuantizationSpec:
    layout = fields.text("checkpoint_format", default=fields.text("format", default="gptq"))
    if layout not in ("gptq", "gptq_v2"):
        raise fields.error("checkpoint_format", layout, "only gptq and gptq_v2 are supported")
    if fields.boolean("is_marlin_format", default=False):
        raise fields.error("is_marlin_format", True, "only gptq and gptq_v2 are supported")
    if fields.boolean("lm_head", default=False):
        raise fields.error("lm_head", True, "a quantized output head is not supported")
    for name in ("dynamic", "modules_in_block_to_quantize"):
        if fields.get(name):
            raise fields.error(name, fields.get(name), "only one setting for all layers is supported")
    return QuantizationSpec(
        method="gptq",
        group_size=_group_size(fields, "group_size", "q_group_size"),
        reordered=fields.boolean("desc_act", default=False),
        zeros_less_one=layout == "gptq",
        plain_modules=_names(fields, "modules_to_not_convert"),
    )


def _read_fp8(fields: Fields) -> QuantizationSpec:
    _must_be(fields, "fmt", "e4m3", default="e4m3")
    scheme = fields.text("activation_scheme", default="dynamic")
    if scheme not in ("dynamic", "static"):
        raise fields.error("activation_scheme", scheme, "expected dynamic or static")
    name = "modules_to_not_convert" if fields.get("modules_to_not_convert") else "ignored_layers"
    return QuantizationSpec(
        method="fp8", block=_block(fields, "weight_block_size"), plain_modules=_names(fields, name)
    )


def _read_compressed_tensors(fields: Fields) -> QuantizationSpec:
    layout = fields.text("format")
    if layout not in ("float-quantized", "naive-quantized"):
        raise fields.error("format", layout, "only float-quantized with fp8 weights is supported")
    sparsity = fields.get("sparsity_config")
    if isinstance(sparsity, Mapping) and sparsity.get("format", "dense") != "dense":
        raise fields.error("sparsity_config", sparsity, "sparse weights are not supported")
    groups = fields.get("config_groups")
    if not isinstance(groups, Mapping) or len(groups) != 1:
        raise fields.error("config_groups", groups, "expected exactly one group")
    ((name, group),) = groups.items()
    if not isinstance(group, Mapping) or not isinstance(group.get("weights"), Mapping):
        raise fields.error("config_groups", groups, "expected a group with `weights`")
    if group.get("targets") != ["Linear"]:
        raise fields.error("config_groups", groups, "only a group with the targets ['Linear'] is supported")
    weights = Fields(fields.path, group["weights"], f"quantization_config.config_groups.{name}.weights.")
    if weights.integer("num_bits", 1, 64) != 8 or weights.text("type") != "float":
        raise weights.error("num_bits", weights.get("num_bits"), "only 8-bit float weights are supported")
    if not weights.boolean("symmetric", default=True):
        raise weights.error("symmetric", False, "only symmetric weights are supported")
    strategy = weights.text("strategy")
    if strategy not in ("tensor", "channel", "block"):
        raise weights.error("strategy", strategy, "only tensor, channel and block are supported")
    return QuantizationSpec(
        method="fp8",
        block=_block(weights, "block_structure") if strategy == "block" else None,
        weights_only=group.get("input_activations") is None,
        plain_modules=_names(fields, "ignore"),
    )


def _group_size(fields: Fields, *names: str) -> int:
    """Inputs of a group, 0 for all; checks that weights have 4 bits (older exports use another field for it)."""
    bits = "bits" if fields.get("w_bit") is None else "w_bit"
    if fields.integer(bits, 1, 32) != 4:
        raise fields.error(bits, fields.get(bits), "only 4 bits are supported")
    name = next((name for name in names if fields.get(name) is not None), names[0])
    size = fields.integer(name, -1, 1 << 20)
    if size == -1:
        return 0
    if size not in _GROUP_SIZES:
        raise fields.error(name, size, f"supported are -1 and {', '.join(map(str, _GROUP_SIZES))}")
    return size


def _block(fields: Fields, name: str) -> tuple[int, int] | None:
    sizes = fields.integers(name, 1, 1 << 20)
    if not sizes:
        return None
    if len(sizes) != 2:
        raise fields.error(name, list(sizes), "expected two whole numbers")
    return sizes[0], sizes[1]


def _must_be(fields: Fields, name: str, only: str, default: str) -> None:
    value = fields.text(name, default=default)
    if value.lower() != only:
        raise fields.error(name, value, f"only {only} is supported")


def _names(fields: Fields, name: str) -> tuple[str, ...]:
    """A list of modules; empty if missing."""
    value = fields.get(name)
    if value is None:
        return ()
    if not isinstance(value, list) or any(not isinstance(item, str) or not item for item in value):
        raise fields.error(name, value, "expected a list of module names")
    try:
        _compiled(tuple(value))
    except re.error as error:
        raise fields.error(name, value, f"holds a regular expression that cannot be read: {error}") from None
    return tuple(value)


def unnumbered(name: str) -> str:
    """The name of a module without the expert's number: the experts of a layer are one tensor of the file."""
    return _EXPERT.sub(".experts.", name)


@functools.lru_cache(maxsize=8)
def _compiled(modules: tuple[str, ...]) -> tuple[re.Pattern[str], ...]:
    return tuple(_patterns(modules))


def _patterns(modules: Iterable[str]) -> Iterable[re.Pattern[str]]:
    for module in modules:
        if module.startswith("re:"):
            yield re.compile(r"\A(?:" + module.removeprefix("re:") + ")")
        else:
            yield re.compile(r"(?:\A|\.)" + re.escape(module) + r"(?:\Z|\.)")
