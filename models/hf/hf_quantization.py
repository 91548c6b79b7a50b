"""Reads how the weights of a Hugging Face folder are quantized.

The description is `quantization_config` of config.json, or a file of its own: older exports of AutoGPTQ and AutoAWQ
have one, ModelOpt writes `hf_quant_config.json`. A form that is not implemented is refused by name: weights read in the
wrong form load without an error and produce wrong output.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from msgspec import structs

from ...runtime.errors import ConfigError
from ..fields import Fields
from ..model_files import read_json
from ..spec.quantization import IntForm, QuantizationSpec, compiled

SUPPORTED: Final = (
    "fp8 (e4m3; per tensor, channel or block; also as fbgemm_fp8, as compressed-tensors in float-quantized form and as "
    "FP8 of modelopt), compressed-tensors with integers (4 and 8 bits, packed or not; per tensor, channel or group), "
    "awq (4 bits, gemm), gptq (4 bits) and mxfp4 (experts)"
)
_OWN_FILES: Final = (("quantize_config.json", "gptq"), ("quant_config.json", "awq"))
"""Files that describe the quantization in exports older than `quantization_config`, with the method they imply."""
_MODELOPT_FILE: Final = "hf_quant_config.json"
_UNSUPPORTED: Final = f"{{}} is not supported; supported are: {SUPPORTED}"
_IMPLIED: Final = (
    ("quant_algo", "modelopt"),
    ("quantized_layers", "modelopt"),
    ("load_in_4bit", "bitsandbytes"),
    ("load_in_8bit", "bitsandbytes"),
    ("config_groups", "compressed-tensors"),
    ("desc_act", "gptq"),
    ("zero_point", "awq"),
    ("activation_scheme", "fp8"),
    ("weight_block_size", "fp8"),
)
_ALSO: Final = (("config_groups", "modelopt"),)
"""Fields that a method shares with the one that they imply."""
_E4M3: Final = ("e4m3", "e4m3fn", "float8_e4m3fn")
_FP8_LAYOUTS: Final = ("float-quantized", "naive-quantized")
_INT_LAYOUTS: Final = ("pack-quantized", "int-quantized", "naive-quantized")
_LAYOUTS: Final = (*_INT_LAYOUTS, "float-quantized", "mixed-precision")
_REORDERED: Final = (True, "group", "dynamic")
"""The values of `actorder` with which the groups of a checkpoint are not neighboring inputs."""
_ALL_LINEAR: Final = "Linear"
"""The target of a group of compressed-tensors that stands for all linear layers."""
_COMPRESSED_TENSORS: Final = (
    *("quant_method", "format", "config_groups", "ignore", "sparsity_config", "transform_config"),
    # Without effect on the values of weights and activations:
    *("version", "quantization_status", "global_compression_ratio", "kv_cache_scheme"),
)
"""Fields of compressed-tensors that are read, or change nothing. Any other one may change what is computed."""
_GROUP_SIZES: Final = (32, 64, 128, 256, 512, 1024)


def read_quantization(folder: Path, config: Fields) -> QuantizationSpec | None:
    """The quantization that the files of a model folder declare; None: the weights are plain.

    A description in config.json has precedence over a file of its own, as in transformers. A second description must
    agree with the first one: where they differ, one of them is not of these weights.

    Raises:
        ConfigError: the form is not supported, the description is damaged, or there are two that differ.
    """
    if config.get("quantization") is not None:
        raise config.error("quantization", config.get("quantization"), _UNSUPPORTED.format("the form of MLX"))
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
    """The method and the sizes of its groups or blocks, for comparing and for messages."""
    sizes = f", blocks of {spec.block[0]} x {spec.block[1]}" if spec.block else ""
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
        case "modelopt":
            return _read_modelopt(fields, fields.given("ignore", "exclude_modules"))
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


def _read_modelopt(fields: Fields, plain: str) -> QuantizationSpec:
    """ModelOpt names modules with `*` as in shells. Its static scales of activations and the KV cache are not used."""
    algorithm = fields.text("quant_algo")
    if algorithm != "FP8":
        raise fields.error(
            "quant_algo", algorithm, "only FP8 of modelopt is supported; use the original weights"
        )
    return QuantizationSpec(
        method="fp8", plain_modules=tuple(_pattern_of_glob(name) for name in _names(fields, plain))
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
        group_size=_group_size(fields, "group_size", "q_group_size"),
        plain_modules=_names(fields, "modules_to_not_convert"),
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
    number_format = fields.text("fmt", default="e4m3")
    if number_format.lower() not in _E4M3:
        raise fields.error("fmt", number_format, "only e4m3 is supported")
    scheme = fields.text("activation_scheme", default="dynamic")
    if scheme not in ("dynamic", "static"):
        raise fields.error("activation_scheme", scheme, "expected dynamic or static")
    name = fields.given("modules_to_not_convert", "ignored_layers")
    return QuantizationSpec(
        method="fp8", block=_block(fields, "weight_block_size"), plain_modules=_names(fields, name)
    )


def _read_compressed_tensors(fields: Fields) -> QuantizationSpec:
    layout = fields.text("format")
    if layout not in _LAYOUTS:
        raise fields.error("format", layout, f"supported are {', '.join(_LAYOUTS)}")
    sparsity = fields.get("sparsity_config")
    if isinstance(sparsity, Mapping) and sparsity.get("format", "dense") != "dense":
        raise fields.error("sparsity_config", sparsity, "sparse weights are not supported")
    transform = fields.get("transform_config")
    if isinstance(transform, Mapping) and not any(transform.values()):
        transform = None
    if transform:
        raise fields.error("transform_config", transform, "inputs that are transformed are not supported")
    for name in fields:
        if name not in _COMPRESSED_TENSORS and fields.get(name):
            raise fields.error(name, fields.get(name), "this setting is not known; use the original weights")
    groups = fields.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise fields.error("config_groups", groups, "expected at least one group")
    read = [_read_group(fields, name, group, layout) for name, group in groups.items()]
    if all(isinstance(one, IntForm) for one in read):
        forms = [one for one in read if isinstance(one, IntForm)]
        return QuantizationSpec(
            method="compressed-tensors",
            int_forms=tuple(sorted(forms, key=lambda form: not form.modules)),
            reordered=any(group["weights"].get("actorder") in _REORDERED for group in groups.values()),
            plain_modules=_names(fields, "ignore"),
        )
    if len(read) > 1:
        raise fields.error(
            "config_groups",
            groups,
            "several groups are supported only if all have integers; use another export",
        )
    (fp8,) = read
    assert isinstance(fp8, QuantizationSpec)
    return structs.replace(fp8, plain_modules=_names(fields, "ignore"))


def _read_group(fields: Fields, name: str, group: Any, layout: str) -> IntForm | QuantizationSpec:
    """A group of `config_groups`: a form of integers, or the description of 8-bit floats.

    Args:
        layout: of groups that name none.
    """
    if not isinstance(group, Mapping) or not isinstance(group.get("weights"), Mapping):
        raise fields.error(f"config_groups.{name}", group, "expected a group with `weights`")
    within = Fields(fields.path, group, f"quantization_config.config_groups.{name}.")
    if group.get("output_activations"):
        raise within.error(
            "output_activations", group["output_activations"], "quantized outputs are not supported"
        )
    layout = within.text("format", default=layout)
    weights = Fields(fields.path, group["weights"], f"quantization_config.config_groups.{name}.weights.")
    if weights.text("type") == "int":
        return _read_int_group(within, weights, layout)
    if layout not in _FP8_LAYOUTS:
        raise within.error("format", layout, f"floats are supported in the layouts {', '.join(_FP8_LAYOUTS)}")
    if weights.integer("num_bits", 1, 64) != 8 or weights.text("type") != "float":
        raise weights.error("num_bits", weights.get("num_bits"), "only 8-bit float weights are supported")
    if not weights.boolean("symmetric", default=True):
        raise weights.error("symmetric", False, "only symmetric weights are supported")
    if group.get("targets") != [_ALL_LINEAR]:
        raise within.error("targets", group.get("targets"), f"for floats only [{_ALL_LINEAR!r}] is supported")
    strategy = weights.text("strategy")
    if strategy not in ("tensor", "channel", "block"):
        raise weights.error("strategy", strategy, "only tensor, channel and block are supported")
    return QuantizationSpec(
        method="fp8",
        block=_block(weights, "block_structure") if strategy == "block" else None,
        weights_only=group.get("input_activations") is None,
    )


def _read_int_group(group: Fields, weights: Fields, layout: str) -> IntForm:
    """A group with integers. Its activations may be quantized, too; here they are multiplied as they are."""
    if layout not in _INT_LAYOUTS:
        raise group.error(
            "format", layout, f"integers are supported in the layouts {', '.join(_INT_LAYOUTS)}"
        )
    bits = weights.integer("num_bits", 1, 64)
    if bits not in (4, 8):
        raise weights.error("num_bits", bits, "integers of 4 and 8 bits are supported")
    strategy = weights.text("strategy")
    if strategy not in ("tensor", "channel", "group"):
        raise weights.error("strategy", strategy, "only tensor, channel and group are supported")
    size = weights.integer("group_size", 1, 1 << 20) if strategy == "group" else 0
    targets = _names(group, "targets")
    for target in targets:
        if target != _ALL_LINEAR and target.isalnum() and target[0].isupper():
            raise group.error("targets", list(targets), f"of classes only {_ALL_LINEAR} is supported")
    if not targets:
        raise group.error("targets", list(targets), "expected the modules of the group")
    return IntForm(
        bits=8 if bits == 8 else 4,
        group_size=size,
        symmetric=weights.boolean("symmetric", default=True),
        packed=layout == "pack-quantized",
        modules=() if _ALL_LINEAR in targets else targets,
    )


def _group_size(fields: Fields, *names: str) -> int:
    """Inputs of a group, 0 for all; checks that weights have 4 bits (older exports use another field for it)."""
    bits = fields.given("bits", "w_bit")
    if fields.integer(bits, 1, 32) != 4:
        raise fields.error(bits, fields.get(bits), "only 4 bits are supported")
    name = fields.given(*names)
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
        compiled(tuple(value))
    except re.error as error:
        raise fields.error(name, value, f"holds a regular expression that cannot be read: {error}") from None
    return tuple(value)
