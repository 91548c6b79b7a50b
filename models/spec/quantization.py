"""`QuantizationSpec`: the form of a checkpoint's linear weights, or the form to convert them to while loading.

`hf_quantization` and `gguf_config` read it from a model's files.

How each method stores a weight [out, in], by the names of its tensors:

    fp8    weight [out, in] e4m3; weight_scale or weight_scale_inv: one number, one per output, or one per block; with
           uint8 scales of 32 inputs, which are exponents, this is MXFP8
    awq    qweight int32 [in, out/8], qzeros int32 [in/group, out/8], scales [in/group, out]
    gptq   qweight int32 [in/8, out], qzeros int32 [in/group, out/8], scales [in/group, out], g_idx int32 [in]; with 8
           bits a word holds 4 integers instead of 8
    nvfp4  weight uint8 [out, in/2], in compressed-tensors weight_packed: 4-bit floats (e2m1), the first in the lower
           half of a byte; weight_scale e4m3 [out, in/16]; a factor of all scales: weight_scale_2, or in
           compressed-tensors its inverse, weight_global_scale
    mxfp4  the same with weight_scale uint8 [out, in/32], exponents, and without a factor
    compressed-tensors, for integers: weight_packed int32 [out, in/8] (4 bits) or [out, in/4] (8 bits), or weight int8
           [out, in]; weight_scale [out, in/group], [out, 1] or [1]; weight_zero_point int32 [out/8, in/group] or int8;
           weight_g_idx int32 [in]. Its 8-bit floats are fp8.
    bitsandbytes  weight uint8 [out * in / 2, 1], codes of nf4 or fp4 with a scale for 64 neighbors; or weight int8
    torchao  weight uint8 [out, in/2], integers; weight_scale and weight_zero_point [in/group, out], floats
    mixed  several of these, by module
    mlx    weight uint32 [out, in * bits / 32], words of neighboring inputs, the first in the lowest bits; scales and
           biases [out, in/group]: weight = integer * scale + bias. Without biases: NVFP4, MXFP4 and MXFP8, with scales
           uint8. Tables and routers may be in it, too. Stored forms differ by module (`parts`)
    gguf   a GGUF file's own formats, those in `GGUF_FORMS`; in a folder, experts in MXFP4 (`stored_forms`)

`int8` and `int4` are not checkpoint forms: plain weights are quantized to blocks while they are loaded.

`BlockForm` is how integers in blocks of 32 represent weights, for each GGUF format that stays quantized in memory. A
weight is number * scale + minimum, with one scale and one minimum per 32 neighboring inputs of an output. In some
formats the number is the code of a value in a table; NVFP4 has scales of 8 bits for 16 inputs each. GGUF formats that
are equivalent to this keep their numbers. The others (other scales of 16 numbers) are rounded again to 8 bits. The step
of that rounding is at most a quarter of the step of the file's own rounding.

Q4_K, Q5_K and Q6_K also have a layout of their own, with the numbers and the bytes of the file (`super_blocks.h`). It
needs whole superblocks of 256 inputs; the form is for parts of one.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, Literal, NamedTuple

import msgspec

from ...runtime.config.model_choice import QuantMethod

BLOCK_LEN: Final = 32
"""Inputs of a block, which share a scale."""
SUPERBLOCK_LEN: Final = 256
"""Inputs of a block of K-quants, whose scales share a factor."""


class BlockForm(NamedTuple):
    """How integers in blocks represent weights, see the module.

    Attributes:
        bits: per number, 4 or 8.
        zero: the number that represents 0, if blocks have no minimum of their own: the minimum is -zero * scale.
        has_minima: whether blocks have a minimum.
        is_exact: whether the numbers are those of the file.
        table: the values of the 16 numbers of 4 bits; None: numbers are their own values. `zero`
            differs from each by at most 127.
        scale_len: inputs that share a scale: 32, or 16 with scales of 8 bits (e4m3); 64 or 128 with 4 bits, where the
            number of inputs allows it.
        superblock_bytes: bytes of 256 inputs in the layout of the file; 0: there is no kernel for it.
    """

    bits: Literal[4, 8]
    zero: int
    has_minima: bool
    is_exact: bool = True
    table: tuple[int, ...] | None = None
    scale_len: int = 32
    superblock_bytes: int = 0

    def num_bytes(self, rows: int, columns: int) -> int:
        """Memory of a weight in the kernels' layout.

        Scales and minima take 16 bits for 32 inputs, except in superblocks.
        """
        if self.superblock_bytes and columns % SUPERBLOCK_LEN == 0:
            return rows * (columns // SUPERBLOCK_LEN) * self.superblock_bytes
        scale_len = max(self.scale_len, BLOCK_LEN)
        while columns % scale_len:
            scale_len //= 2
        return rows * columns * self.bits // 8 + rows * (columns // scale_len) * (4 if self.has_minima else 2)

    def is_held_like(self, other: BlockForm) -> bool:
        """Whether weights of both forms can be stored as one, in blocks."""
        mine, others = (one._replace(is_exact=True, superblock_bytes=0) for one in (self, other))
        return mine == others


WIDEST: Final = BlockForm(8, 0, has_minima=True)
"""Can hold the numbers of all other forms: the form of fused modules with different forms."""
INT8: Final = BlockForm(8, 128, has_minima=False)
INT4: Final = BlockForm(4, 0, has_minima=True)
TERNARY: Final = BlockForm(4, 1, has_minima=False)


def _with_table(values: Sequence[int]) -> BlockForm:
    """The form of codes of these values; codes that do not occur are 0."""
    zero = -min(values)
    table = tuple(zero + value for value in values)
    return BlockForm(4, zero, has_minima=False, table=table + (zero,) * (16 - len(table)))


def _with_signs(magnitudes: Sequence[int]) -> BlockForm:
    """The form of codes of 8 magnitudes and a sign, which is the upper bit."""
    padded = [*magnitudes, *[0] * (8 - len(magnitudes))]
    return _with_table([*padded, *(-value for value in padded)])


IQ4: Final = _with_table([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113])
MXFP4: Final = _with_signs([0, 1, 2, 3, 4, 6, 8, 12])
"""4-bit floats (e2m1: a sign, two bits of exponent, one of mantissa); a value is twice the float."""
IQ3_S: Final = _with_signs([1, 3, 5, 7, 9, 11, 13, 15])
IQ3_XXS: Final = _with_signs([4, 12, 20, 28, 36, 44, 52, 62])
IQ2: Final = _with_signs([8, 25, 43])
IQ1: Final = _with_table([-7, 1, 9, 0, 0, 0, 0, 0, -9, -1, 7])
"""-1, 0 and 1, an eighth more or less; a value is 8 times as much."""

NVFP4: Final = MXFP4._replace(scale_len=16)


class CodeTable(NamedTuple):
    """16 values of codes that whole numbers do not represent exactly.

    Attributes:
        divisor: the kernels multiply with the values times this, rounded to whole numbers.
    """

    values: tuple[float, ...]
    divisor: float

    @property
    def scaled(self) -> tuple[float, ...]:
        """The values as the kernels' whole numbers, before rounding."""
        return tuple(value * self.divisor for value in self.values)

    @property
    def form(self) -> BlockForm:
        """The form with rounded values."""
        return _with_table([round(value) for value in self.scaled])._replace(is_exact=False)


NF4_CODES: Final = CodeTable(
    (
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ),
    123.26,
)
"""The codes of nf4 (Dettmers et al. 2023). The error of rounding is at most 0.29 % of the largest value of a block,
less than that of bfloat16 at this value (0.39 %), and a thirtieth of the steps between the values."""
_FP4: Final = (0.0, 0.0052083333, 0.66666667, 1.0, 0.33333333, 0.5, 0.16666667, 0.25)
FP4_CODES: Final = CodeTable((*_FP4, *(-value for value in _FP4)), 120.0)
"""The codes of bitsandbytes' fp4. All but the smallest are exact; its error is 0.3 % of the largest value."""

GGUF_FORMS: Final[Mapping[str, BlockForm]] = {
    "Q4_0": BlockForm(4, 8, has_minima=False),
    "Q4_1": BlockForm(4, 0, has_minima=True),
    "Q4_K": BlockForm(4, 0, has_minima=True, superblock_bytes=144),
    "Q5_0": BlockForm(8, 16, has_minima=False),
    "Q5_1": BlockForm(8, 0, has_minima=True),
    "Q5_K": BlockForm(8, 0, has_minima=True, superblock_bytes=176),
    "Q8_0": INT8,
    "IQ4_NL": IQ4,
    "IQ4_XS": IQ4,
    "MXFP4": MXFP4,
    "IQ3_S": IQ3_S,
    "IQ3_XXS": IQ3_XXS,
    "IQ2_XXS": IQ2,
    "IQ1_S": IQ1,
    "TQ1_0": TERNARY,
    "TQ2_0": TERNARY,
    "Q2_K": INT8._replace(is_exact=False),
    "Q3_K": INT8._replace(is_exact=False),
    "Q6_K": INT8._replace(is_exact=False, superblock_bytes=210),
    "IQ2_S": INT8._replace(is_exact=False),
    "IQ2_XS": INT8._replace(is_exact=False),
    "IQ1_M": INT8._replace(is_exact=False),
    "NVFP4": NVFP4,
}
"""By GGUF's names."""


MADE: Final[tuple[QuantMethod, ...]] = ("fp8", "int8", "int4")
"""Made from plain weights while loading."""
BLOCK_METHODS: Final[tuple[QuantMethod, ...]] = ("gguf", "mlx", "int8", "int4")
"""Stored as integers in blocks of 32 inputs, which the CPU kernels multiply directly."""
FP4_METHODS: Final[tuple[QuantMethod, ...]] = ("nvfp4", "mxfp4")
"""4-bit floats, which the CPU kernels multiply directly, too: as codes of a table."""

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
MIXER_NAMES: Final = tuple(
    (r"model\.layers\.(\d+)\.[^.]+", rf"{body}.layers.\1.mixer") for body in ("backbone", "model")
)
"""`QuantizationSpec.renamed` where each layer is a single block, see `usual_block_name`."""


class QuantizationSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The form of the weights.

    Attributes:
        stored: the checkpoint is in this form; if False, its weights are converted to it while loading.
        kept: the weights stay in it if the device supports it; if False, they are dequantized while loading.
        bits: awq, gptq, compressed-tensors, bitsandbytes: 4 or 8 per integer; mlx: 2, 3, 4, 5, 6 or 8.
        group_size: awq, gptq, compressed-tensors, mlx, nvfp4: inputs that share a scale and a zero; 0: all of them.
        symmetric: compressed-tensors: all zero points are the middle of the range; mlx: floats without biases.
        packed: compressed-tensors: words of 4 bytes hold several integers; if False, each has a byte.
        reordered: gptq: `g_idx` maps each input to its group; if False, groups are neighboring inputs.
        zeros_less_one: gptq: stored zeros are one less than their value, as in the first version of the format.
        block: fp8: (outputs, inputs) that share a scale; None: all inputs of an output share one.
        activation_bound: fp8: larger inputs are clamped to this value; None: no bound.
        weights_only: fp8: activations keep their dtype.
        scales_inputs: modules may have factors of their inputs (`pre_quant_scale`), as those of AWQ and SmoothQuant in
            ModelOpt's exports.
        parts: mixed: names of modules, as `plain_modules`, and their form; without names: of all that no other names.
            mlx: the modules of other bits or groups.
        types: gguf: the file's format of each module stored in blocks; names of experts omit the expert's number.
        plain_modules: linear layers that are not quantized: names or parts of names in whole components
            ("mlp.gate"), or after "re:" regular expressions for the beginning of a name.
        renamed: regular expressions for the beginning of a name, and what lists of modules may have instead of it.
        stored_names: regular expressions, and what the names in the files have in their place; `plain_modules` has the
            engine's names, except in its expressions, which are matched with those of the files, too.
    """

    method: QuantMethod
    stored: bool = True
    kept: bool = True
    bits: int = 4
    group_size: int = 0
    symmetric: bool = False
    packed: bool = True
    reordered: bool = False
    zeros_less_one: bool = False
    block: tuple[int, int] | None = None
    activation_bound: float | None = None
    weights_only: bool = False
    scales_inputs: bool = False
    parts: tuple[tuple[tuple[str, ...], QuantizationSpec], ...] = ()
    types: dict[str, str] = {}
    plain_modules: tuple[str, ...] = ()
    renamed: tuple[tuple[str, str], ...] = ()
    stored_names: tuple[tuple[str, str], ...] = ()

    def is_kept(self, *, on_cpu: bool) -> bool:
        """Whether weights stay in this form on the device, according to what is known before loading."""
        if self.method == "mixed":
            return self.kept and any(form.is_kept(on_cpu=on_cpu) for _, form in self.parts)
        return self.kept and (self.is_in_blocks if on_cpu else self.method not in (*FP4_METHODS, "mlx"))

    @property
    def has_tables(self) -> bool:
        """Whether an embedding that is not tied to the head is quantized in the files, and stays so."""
        return self.method == "mlx" and self.kept

    @property
    def may_have_head(self) -> bool:
        """Whether the output head of a checkpoint may be quantized: if it is, it has scales."""
        return self.method in (*FP4_METHODS, "mixed") and not self.is_plain("lm_head")

    @property
    def is_in_blocks(self) -> bool:
        """Whether the CPU kernels multiply with the weights as blocks, unless sizes do not divide."""
        if self.method == "mlx":
            return any(form.mlx_form is not None for form in (self, *(form for _, form in self.parts)))
        if self.method in (*BLOCK_METHODS, *FP4_METHODS):
            return True
        if self.method == "mixed":
            return any(form.is_in_blocks for _, form in self.parts)
        return self.method != "fp8" and not self.reordered and self.group_size % BLOCK_LEN == 0

    def part_of(self, name: str) -> QuantizationSpec | None:
        """The form of a module; None: it is plain."""
        if self.method == "mlx":  # of any module that has scales
            return next((form for modules, form in self.parts if self._names(modules, name)), self)
        if self.is_plain(name):
            return None
        if self.method != "mixed":
            return self
        named = (form for modules, form in self.parts if not modules or self._names(modules, name))
        return next(named, None)

    def is_plain(self, name: str) -> bool:
        """Whether this linear layer keeps floating-point weights. Routers of experts do in every checkpoint."""
        if _ROUTER.search(name) or (self.method == "gguf" and unnumbered(name) not in self.types):
            return True
        return self._names(self.plain_modules, name)

    def _names(self, modules: tuple[str, ...], name: str) -> bool:
        """Whether one of `modules` is this module."""
        if not modules:
            return False
        names = self._with_renamed({name})
        parts, patterns = compiled(modules)
        if patterns and any(
            pattern.search(each) for pattern in patterns for each in names | self._stored_as(name)
        ):
            return True
        return not parts.isdisjoint(
            part for each in names | set(map(unnumbered, names)) for part in _parts(each)
        )

    def _with_renamed(self, names: set[str]) -> set[str]:
        return names | {re.sub(r"\A" + old, new, name) for old, new in self.renamed for name in names}

    def _stored_as(self, name: str) -> set[str]:
        """The names that a module, or the stack of its experts, may have in the files."""
        if not self.stored_names:
            return set()
        names = {f"{name}.", f"{unnumbered(name)}."}
        for old, new in self.stored_names:
            names |= {re.sub(old, new, each) for each in names}
        return self._with_renamed({each.removesuffix(".") for each in names})

    def form_of(self, name: str, columns: int) -> BlockForm | None:
        """The block form of a module with this many inputs; None: it is not stored in blocks."""
        if self.method not in BLOCK_METHODS or self.is_plain(name) or columns % BLOCK_LEN:
            return None
        if self.method == "gguf":
            return GGUF_FORMS[self.types[unnumbered(name)]]
        if self.method == "mlx":
            part = self.part_of(name)
            return None if part is None or columns % part.group_size else part.mlx_form
        in_8_bits = self.method == "int8" or name in HEADS or name.endswith(_IN_8_BITS)
        return INT8 if in_8_bits else INT4

    def bytes_of(self, name: str, rows: int, columns: int, *, on_cpu: bool = False) -> int | None:
        """Memory of one module's weight [rows, columns] with its scales, in the kernels' layout; None: it is plain."""
        if self.method in BLOCK_METHODS:
            form = self.form_of(name, columns)
            return None if form is None else form.num_bytes(rows, columns)
        part = self.part_of(name)
        if part is None or (part is not self and not part.is_kept(on_cpu=on_cpu)):
            return None
        if name in HEADS and not (self.method == "mixed" and part.method in FP4_METHODS):
            return None
        return part._num_bytes(rows, columns, on_cpu=on_cpu)

    def _num_bytes(self, rows: int, columns: int, *, on_cpu: bool) -> int:
        """Memory of a quantized weight of a checkpoint that is not in GGUF."""
        if self.method == "fp8":
            groups = -(-columns // self.block[1]) if self.block else 1
            return rows * columns + 4 * rows * groups
        if self.method in FP4_METHODS:
            return MXFP4.num_bytes(rows, columns)
        if on_cpu and self.block_form is not None and columns % BLOCK_LEN == 0:
            return self.block_form.num_bytes(rows, columns)
        groups = -(-columns // self.group_size) if self.group_size else 1
        return rows * columns * self.bits // 8 + 3 * rows * groups  # a scale in float16 and a zero in a byte

    @property
    def mlx_form(self) -> BlockForm | None:
        """mlx: the form in blocks, in which fewer bits are exact, too; None: there is none."""
        if self.symmetric:
            return None if self.bits == 8 else MXFP4 if self.group_size == BLOCK_LEN else NVFP4
        if self.group_size % BLOCK_LEN:
            return None
        return self._grouped(8 if self.bits > 4 else 4, 0, has_minima=True)

    @property
    def block_form(self) -> BlockForm | None:
        """awq, gptq, compressed-tensors: the form in blocks; None: groups are not whole blocks."""
        if self.group_size % BLOCK_LEN:
            return None
        zero = 1 << (self.bits - 1) if self.symmetric else 0
        return self._grouped(8 if self.bits == 8 else 4, zero, has_minima=not self.symmetric)

    def _grouped(self, bits: Literal[4, 8], zero: int, *, has_minima: bool) -> BlockForm:
        """The form of groups of whole blocks, which share scales in 4 bits."""
        lengths = (128, 64) if bits == 4 else ()
        shared = next((n for n in lengths if self.group_size % n == 0), BLOCK_LEN)
        return BlockForm(bits, zero, has_minima, scale_len=shared)

    def bytes_together(
        self, modules: Sequence[tuple[str, int]], columns: int, *, on_cpu: bool = False
    ) -> list[int | None]:
        """The same for modules that are fused, each with its number of rows; those of an expert into one weight."""
        forms = [self.form_of(name, columns) for name, _ in modules]
        held = [form for form in forms if form is not None]
        is_one_weight = any(is_of_expert(name) for name, _ in modules)
        if not is_one_weight or all(form == held[0] for form in held):
            return [self.bytes_of(name, rows, columns, on_cpu=on_cpu) for name, rows in modules]
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
def compiled(modules: tuple[str, ...]) -> tuple[frozenset[str], tuple[re.Pattern[str], ...]]:
    """The names and the patterns of `QuantizationSpec.plain_modules`.

    Raises:
        re.error: one of them cannot be read.
    """
    patterns = [module.removeprefix("re:") for module in modules if module.startswith("re:")]
    names = frozenset(module for module in modules if not module.startswith("re:"))
    return names, tuple(re.compile(rf"\A(?:{pattern})") for pattern in patterns)


def _parts(name: str) -> Iterator[str]:
    """A name, and its parts of neighboring components."""
    components = name.split(".")
    for start in range(len(components)):
        for stop in range(start + 1, len(components) + 1):
            yield ".".join(components[start:stop])
