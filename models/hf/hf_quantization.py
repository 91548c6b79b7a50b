"""Reads how the weights of a Hugging Face folder are quantized.

The description is `quantization_config` of config.json, or a file of its own: older exports of AutoGPTQ and AutoAWQ
have one, ModelOpt writes `hf_quant_config.json`. A form that is not implemented is refused by name: weights read in the
wrong form load without an error and produce wrong output.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, Literal

from msgspec import structs

from ...runtime.config.model_choice import QuantMethod
from ...runtime.errors import ConfigError
from ..fields import Fields
from ..model_files import read_json
from ..spec.quantization import HEADS, QuantizationSpec, unnumbered
from .compressed_tensors import block_sizes, checked_names, module_names, read_compressed_tensors
from .mlx_quantization import read_mlx
from .torchao_quantization import read_torchao

SUPPORTED: Final = (
    "fp8 (e4m3; per tensor, channel or block; also as fbgemm_fp8), compressed-tensors with integers (4 and 8 bits, "
    "packed or not; per tensor, channel or group), compressed-tensors and modelopt with fp8, nvfp4, mxfp4, mxfp8 or "
    "several of these, awq (4 bits, gemm), gptq (4 and 8 bits), auto-round with integers in the layout of one of "
    "these, bitsandbytes (nf4, fp4, int8), torchao (int4, int8, float8), mxfp4 (experts) and the forms of MLX"
)
_OWN_FILES: Final = (("quantize_config.json", "gptq"), ("quant_config.json", "awq"))
"""Files that describe the quantization in exports older than `quantization_config`, with the method they imply."""
_MODELOPT_FILE: Final = "hf_quant_config.json"
_UNSUPPORTED: Final = f"{{}} is not supported; supported are: {SUPPORTED}"
_IMPLIED: Final = (
    ("quant_algo", "modelopt"),
    ("quantized_layers", "modelopt"),
    ("quant_type", "torchao"),
    ("load_in_4bit", "bitsandbytes"),
    ("load_in_8bit", "bitsandbytes"),
    ("config_groups", "compressed-tensors"),
    ("packing_format", "auto-round"),
    ("desc_act", "gptq"),
    ("zero_point", "awq"),
    ("activation_scheme", "fp8"),
    ("weight_block_size", "fp8"),
)
_ALSO: Final = (("config_groups", "modelopt"),)
"""Fields that a method shares with the one that they imply."""
_E4M3: Final = ("e4m3", "e4m3fn", "float8_e4m3fn")
_AUTO_ROUND_LAYOUTS: Final[Mapping[str, QuantMethod]] = {
    "auto_round:auto_gptq": "gptq",
    "auto_round:gptqmodel": "gptq",
    "auto_round": "gptq",
    "auto_round:auto_awq": "awq",
}
"""AutoRound's names of layouts, with the method that has the same."""
_PLAIN_BITS: Final = 16
"""AutoRound's way to say that a layer is not quantized."""
_GROUP_SIZES: Final = (32, 64, 128, 256, 512, 1024)


def read_quantization(folder: Path, config: Fields) -> QuantizationSpec | None:
    """The quantization that the files of a model folder declare; None: the weights are plain.

    A description in config.json has precedence over a file of its own, as in transformers. A second description must
    agree with the first one: where they differ, one of them is not of these weights.

    Raises:
        ConfigError: the form is not supported, the description is damaged, or there are two that differ.
    """
    if config.get("quantization") is not None:
        return read_mlx(config)
    found = [each for each in (_of_config(config), *_of_own_files(folder)) if each is not None]
    for path, spec in found[1:]:
        first_path, first = found[0]
        if _form(spec) != _form(first):
            raise ConfigError(
                f"{path}: describes {_form(spec)}, but {first_path} describes {_form(first)}; only one of them can be "
                "of these weights: download the model again, or remove the wrong description"
            )
    return found[0][1] if found else None


def _form(spec: QuantizationSpec) -> str:
    """The method, its bits and the sizes of its groups or blocks, for comparing and for messages."""
    sizes = f", blocks of {spec.block[0]} x {spec.block[1]}" if spec.block else ""
    sizes += f", {spec.bits} bits" if spec.method == "gptq" else ""
    return spec.method + (f", groups of {spec.group_size}" if spec.group_size else "") + sizes


def _of_config(config: Fields) -> tuple[Path, QuantizationSpec] | None:
    """The description in config.json."""
    name = config.given("quantization_config", "compression_config")
    value = config.get(name)
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise config.error(name, value, "expected an object")
    fields = Fields(config.path, value, f"{name}.")
    method = fields.text("quant_method", default=_implied_method(value))
    spec = _mxfp4(config) if method == "mxfp4" else _read(fields, method)
    _check_one_method(fields, method)
    return config.path, spec


def _of_own_files(folder: Path) -> Iterator[tuple[Path, QuantizationSpec]]:
    """The descriptions in files of their own, with their paths."""
    for file_name, method in _OWN_FILES:
        path = folder / file_name
        if path.exists():
            fields = Fields(path, read_json(path))
            yield path, _read(fields, fields.text("quant_method", default=method))
    path = folder / _MODELOPT_FILE
    if path.exists():
        values = read_json(path).get("quantization")
        if not isinstance(values, Mapping):
            raise Fields(path, {}).error("quantization", values, "expected an object")
        yield path, _read_modelopt(Fields(path, values, "quantization."), "exclude_modules")


def _implied_method(value: Mapping[str, object]) -> str | None:
    """The method of a description without `quant_method`, by a field that only this method has."""
    return next((method for name, method in _IMPLIED if value.get(name) is not None), None)


def _mxfp4(config: Fields) -> QuantizationSpec:
    """The experts of gpt-oss; all other modules are plain."""
    model_type = config.text("model_type")
    if model_type != "gpt_oss":
        raise config.error(
            "quantization_config.quant_method",
            "mxfp4",
            f"which is not supported for {model_type}, only for gpt_oss",
        )
    num_layers = config.integer("num_hidden_layers", 1, 1 << 12)
    modules = ("gate_proj", "up_proj", "down_proj")
    return QuantizationSpec(
        method="gguf",
        types={
            f"model.layers.{layer}.mlp.experts.{name}": "MXFP4"
            for layer in range(num_layers)
            for name in modules
        },
    )


def _read(fields: Fields, method: str) -> QuantizationSpec:
    match method:
        case "awq":
            return _read_awq(fields)
        case "gptq":
            return _read_gptq(fields)
        case "auto-round":
            return _read_auto_round(fields)
        case "fp8":
            return _read_fp8(fields)
        case "fbgemm_fp8":
            bound = fields.get("activation_scale_ub")
            return QuantizationSpec(
                method="fp8",
                activation_bound=None if bound is None else fields.number("activation_scale_ub", 1e-6, 1e9),
                plain_modules=module_names(fields, "modules_to_not_convert"),
            )
        case "compressed-tensors":
            return read_compressed_tensors(fields)
        case "modelopt":
            return _read_modelopt(fields, fields.given("ignore", "exclude_modules"))
        case "bitsandbytes":
            return _read_bitsandbytes(fields)
        case "torchao":
            return read_torchao(fields)
    raise fields.error("quant_method", method, _UNSUPPORTED.format("which"))


def _check_one_method(fields: Fields, method: str) -> None:
    """Check that no field is of another method: such a description has two in one, and only one would be read."""
    for name, implied in _IMPLIED:
        value = fields.get(name)
        if (
            value
            and implied not in method
            and str(value).lower() not in method
            and (name, method) not in _ALSO
        ):
            raise fields.error(
                name,
                value,
                f"which is of {implied}, but quant_method is {method}; two methods at once are not supported",
            )


_MODELOPT: Final[Mapping[str, QuantizationSpec]] = {
    **dict.fromkeys(("FP8", "FP8_PER_CHANNEL_PER_TOKEN"), QuantizationSpec(method="fp8")),
    **dict.fromkeys(("NVFP4", "W4A16_NVFP4", "W4A8_NVFP4_FP8"), QuantizationSpec(method="nvfp4")),
    **dict.fromkeys(("MXFP4", "W4A8_MXFP4_FP8"), QuantizationSpec(method="mxfp4")),
    "MXFP8": QuantizationSpec(method="fp8", block=(1, 32)),
    "FP8_PB_WO": QuantizationSpec(method="fp8", block=(128, 128), weights_only=True),
    "NVFP4_AWQ": QuantizationSpec(method="nvfp4", scales_inputs=True),
    "W8A16": QuantizationSpec(method="compressed-tensors", bits=8, symmetric=True, packed=False),
    "W8A8_SQ_PER_CHANNEL": QuantizationSpec(
        method="compressed-tensors", bits=8, symmetric=True, packed=False, scales_inputs=True
    ),
    **dict.fromkeys(
        ("W4A16_AWQ", "W4A8_AWQ"),
        QuantizationSpec(
            method="compressed-tensors", group_size=128, symmetric=True, packed=False, scales_inputs=True
        ),
    ),
}
"""The forms of weights by ModelOpt's names, in which A is for activations. AWQ has a group of its own in the files."""
_MIXED: Final = "MIXED_PRECISION"


def _read_modelopt(fields: Fields, plain: str) -> QuantizationSpec:
    """ModelOpt names modules with `*` as in shells. Its static scales of activations and the KV cache are not used."""
    algorithm = fields.text("quant_algo")
    names = tuple(_pattern_of_glob(name) for name in module_names(fields, plain))
    if algorithm == _MIXED:
        return QuantizationSpec(method="mixed", parts=_modelopt_parts(fields), plain_modules=names)
    return structs.replace(
        _modelopt_form(fields, "quant_algo", algorithm, fields.get("group_size")), plain_modules=names
    )


def _modelopt_form(
    fields: Fields, name: str, algorithm: object, group_size: object = None
) -> QuantizationSpec:
    form = _MODELOPT.get(str(algorithm).upper())
    if form is None:
        supported = ", ".join((*_MODELOPT, _MIXED))
        raise fields.error(
            name, algorithm, f"supported of modelopt are {supported}; use the original weights"
        )
    if form.group_size and isinstance(group_size, int) and group_size > 0:
        return structs.replace(form, group_size=group_size)
    return form


def _modelopt_parts(fields: Fields) -> tuple[tuple[tuple[str, ...], QuantizationSpec], ...]:
    """The modules of each algorithm of `quantized_layers`; the experts of a layer have one."""
    layers = fields.get("quantized_layers")
    if not isinstance(layers, Mapping) or not layers:
        raise fields.error("quantized_layers", layers, "expected the modules and their quant_algo")
    found: dict[str, tuple[object, object]] = {}
    for name, settings in layers.items():
        own = settings if isinstance(settings, Mapping) else {"quant_algo": settings}
        one = own.get("quant_algo"), own.get("group_size")
        form = _modelopt_form(fields, f"quantized_layers.{name}.quant_algo", *one)
        first = found.setdefault(unnumbered(name), one)
        if _modelopt_form(fields, "", *first) != form:
            raise fields.error(
                f"quantized_layers.{name}.quant_algo",
                one[0],
                f"which is {first[0]} for another expert; experts of one form are supported",
            )
    forms = {one: _modelopt_form(fields, "", *one) for one in found.values()}
    return tuple(
        (tuple(name for name, each in found.items() if each == one), form) for one, form in forms.items()
    )


def _pattern_of_glob(name: str) -> str:
    if "*" not in name and "?" not in name:
        return name
    return "re:" + fnmatch.translate(name)


def _read_awq(fields: Fields) -> QuantizationSpec:
    _must_be(fields, "version", "gemm", default="gemm")
    if not fields.boolean("zero_point", default=True):
        raise fields.error("zero_point", False, "only awq with zero points is supported")
    return QuantizationSpec(
        method="awq",
        bits=_bits(fields, 4),
        group_size=_group_size(fields, "group_size", "q_group_size"),
        plain_modules=module_names(fields, "modules_to_not_convert"),
    )


def _read_gptq(fields: Fields) -> QuantizationSpec:
    name = fields.given("checkpoint_format", "format")
    layout = fields.text(name, default="gptq")
    if layout not in ("gptq", "gptq_v2"):
        raise fields.error(name, layout, "only gptq and gptq_v2 are supported")
    if fields.boolean("is_marlin_format", default=False):
        raise fields.error("is_marlin_format", True, "only gptq and gptq_v2 are supported")
    if fields.boolean("lm_head", default=False):
        raise fields.error("lm_head", True, "a quantized output head is not supported")
    if fields.get("modules_in_block_to_quantize"):
        raise fields.error(
            "modules_in_block_to_quantize",
            fields.get("modules_in_block_to_quantize"),
            "only one setting for all layers is supported",
        )
    return QuantizationSpec(
        method="gptq",
        bits=_bits(fields, 4, 8),
        group_size=_group_size(fields, "group_size", "q_group_size"),
        reordered=fields.boolean("desc_act", default=False),
        zeros_less_one=layout == "gptq",
        plain_modules=(*module_names(fields, "modules_to_not_convert"), *_plain_by_dynamic(fields)),
    )


def _plain_by_dynamic(fields: Fields) -> Iterator[str]:
    """The modules that GPTQModel's `dynamic` leaves out: after `-:` regular expressions for the beginning of a name."""
    dynamic = fields.get("dynamic") or {}
    if not isinstance(dynamic, Mapping):
        raise fields.error("dynamic", dynamic, "expected an object")
    for pattern, settings in dynamic.items():
        if pattern.startswith("-:"):
            yield from checked_names(fields, "dynamic", ["re:" + pattern.removeprefix("-:")])
        elif _differs(fields, settings):
            raise fields.error(
                "dynamic", {pattern: settings}, "only one setting for all quantized layers is supported"
            )


def _differs(fields: Fields, settings: object) -> bool:
    """Whether the settings of some modules are not those of all."""
    if not isinstance(settings, Mapping):
        return True
    return any(value is not None and value != fields.get(name) for name, value in settings.items())


def _read_auto_round(fields: Fields) -> QuantizationSpec:
    """Integers of AutoRound (Cheng et al. 2023; intel/auto-round) in the layout of AWQ or GPTQ.

    `auto_round:auto_gptq` stores zeros less one; `auto_round` and `auto_round:gptqmodel` store them as they are.
    """
    layout = fields.text("packing_format", default="auto_round:auto_gptq")
    if layout not in _AUTO_ROUND_LAYOUTS:
        raise fields.error("packing_format", layout, f"supported are {', '.join(_AUTO_ROUND_LAYOUTS)}")
    _must_be(fields, "data_type", "int", default="int")
    act_bits = fields.integer("act_bits", 1, 64, default=_PLAIN_BITS)
    if act_bits < _PLAIN_BITS:
        raise fields.error("act_bits", act_bits, "quantized inputs are not supported")
    if rotation := fields.get("rotation_config"):
        raise fields.error("rotation_config", rotation, "inputs that are rotated are not supported")
    plain = list(module_names(fields, "modules_to_not_convert"))
    extra = fields.get("extra_config") or {}
    if not isinstance(extra, Mapping):
        raise fields.error("extra_config", extra, "expected an object")
    for name, settings in extra.items():
        bits = settings.get("bits") if isinstance(settings, Mapping) else None
        if isinstance(bits, int) and bits >= _PLAIN_BITS:
            plain.append(name if name.replace(".", "").replace("_", "").isalnum() else f"re:.*(?:{name})")
        elif name in HEADS or _differs(fields, settings):
            raise fields.error(
                "extra_config", {name: settings}, "only one setting for all quantized layers is supported"
            )
    method = _AUTO_ROUND_LAYOUTS[layout]
    return QuantizationSpec(
        method=method,
        bits=_bits(fields, *((4,) if method == "awq" else (4, 8))),
        group_size=_group_size(fields, "group_size"),
        zeros_less_one=layout == "auto_round:auto_gptq",
        plain_modules=checked_names(fields, "extra_config", plain),
    )


def _read_bitsandbytes(fields: Fields) -> QuantizationSpec:
    """Codes of 4 bits or integers of 8; modules without scales are plain. Activations keep their dtype."""
    in_4_bits, in_8_bits = (fields.boolean(f"load_in_{bits}bit", default=False) for bits in (4, 8))
    if in_4_bits == in_8_bits:
        raise fields.error(
            "load_in_4bit", in_4_bits, f"but load_in_8bit is {in_8_bits}; one of them is needed"
        )
    if in_4_bits:
        kind = fields.text("bnb_4bit_quant_type", default="fp4")
        if kind not in ("nf4", "fp4"):
            raise fields.error("bnb_4bit_quant_type", kind, "supported are nf4 and fp4")
        storage = fields.text("bnb_4bit_quant_storage", default="uint8").removeprefix("torch.")
        if storage != "uint8":
            raise fields.error(
                "bnb_4bit_quant_storage", storage, "only uint8 is supported; save the model with it"
            )
    return QuantizationSpec(
        method="bitsandbytes",
        bits=4 if in_4_bits else 8,
        group_size=64 if in_4_bits else 0,
        symmetric=True,
        plain_modules=module_names(fields, "llm_int8_skip_modules"),
    )


def _read_fp8(fields: Fields) -> QuantizationSpec:
    number_format = fields.text("fmt", default="e4m3")
    if number_format.lower() not in _E4M3:
        raise fields.error("fmt", number_format, "only e4m3 is supported")
    scheme = fields.text("activation_scheme", default="dynamic")
    if scheme not in ("dynamic", "static"):
        raise fields.error("activation_scheme", scheme, "expected dynamic or static")
    name = fields.given("modules_to_not_convert", "ignored_layers")
    return QuantizationSpec(
        method="fp8", block=block_sizes(fields, "weight_block_size"), plain_modules=module_names(fields, name)
    )


def _bits(fields: Fields, *supported: int) -> Literal[4, 8]:
    """Bits of an integer; older exports use another field for them."""
    name = fields.given("bits", "w_bit")
    bits = fields.integer(name, 1, 32)
    if bits not in supported:
        raise fields.error(name, bits, f"only {' and '.join(map(str, supported))} bits are supported")
    return 8 if bits == 8 else 4


def _group_size(fields: Fields, *names: str) -> int:
    """Inputs of a group, 0 for all."""
    name = fields.given(*names)
    size = fields.integer(name, -1, 1 << 20)
    if size == -1:
        return 0
    if size not in _GROUP_SIZES:
        raise fields.error(name, size, f"supported are -1 and {', '.join(map(str, _GROUP_SIZES))}")
    return size


def _must_be(fields: Fields, name: str, only: str, default: str) -> None:
    value = fields.text(name, default=default)
    if value.lower() != only:
        raise fields.error(name, value, f"only {only} is supported")
