"""One setting under two names: the reading is that of transformers, or the refusal names both.

Every pair of names is tried alone, with equal values, with different ones and with empty ones, for each architecture.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest
import torch
import transformers
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

from engine.model_runner.layers.rotary import rotary_frequencies
from engine.models.hf.hf_config import read_hf_spec
from engine.models.spec.layer_form import RopeScaling
from engine.models.spec.model_spec import ModelSpec
from engine.runtime.errors import ConfigError

BASE: Final[dict[str, Any]] = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "pad_token_id": 0,
}
SMALL_EXPERTS: Final = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
FAMILIES: Final[dict[str, dict[str, Any]]] = {
    "llama": {"architectures": ["LlamaForCausalLM"]},
    "mistral": {"architectures": ["MistralForCausalLM"], "sliding_window": None},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"]},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"]},
    "qwen3_moe": {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4, **SMALL_EXPERTS},
    "gemma3_text": {"architectures": ["Gemma3ForCausalLM"]},
    "phi3": {"architectures": ["Phi3ForCausalLM"]},
}
LINEAR: Final = {"type": "linear", "factor": 4.0}
YARN: Final = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
LLAMA3: Final = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1024,
}
LONGROPE: Final = {
    "type": "longrope",
    "short_factor": [1.0, 1.0, 1.5, 2.0],
    "long_factor": [1.0, 2.0, 3.0, 4.0],
}
FLAT: Final[tuple[dict[str, Any] | None, ...]] = (
    None,
    {},
    {"rope_type": "default", "rope_theta": 777.0},
    {"rope_theta": 777.0},
    LINEAR,
    {**LINEAR, "rope_theta": 777.0},
    {**LINEAR, "rope_type": "default"},
    {"rope_type": "linear", "type": "default", "factor": 4.0},
    YARN,
    LLAMA3,
    LONGROPE,
)
BY_LAYER: Final[tuple[dict[str, Any], ...]] = (
    {"full_attention": {"rope_type": "default", "rope_theta": 777.0}},
    {"sliding_attention": {"rope_type": "default", "rope_theta": 777.0}},
    {"full_attention": {"rope_type": "linear", "factor": 4.0}, "sliding_attention": {"rope_type": "default"}},
    {"full_attention": None, "sliding_attention": {"rope_type": "default", "rope_theta": 99.0}},
)


class Case(NamedTuple):
    """A configuration, and the names of which a refusal must name those that it has."""

    model_type: str
    changes: dict[str, Any]
    names: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.model_type}-{json.dumps(self.changes)}"


def rope_cases() -> Iterator[Case]:
    names = ("rope_parameters", "rope_scaling")
    for model_type in FAMILIES:
        is_gemma = model_type == "gemma3_text"
        for new in (*FLAT, *BY_LAYER) if is_gemma else FLAT:
            for old in FLAT:
                for outer in ({}, {"rope_theta": 5000.0, "rope_local_base_freq": 300.0}):
                    yield Case(model_type, {"rope_parameters": new, "rope_scaling": old, **outer}, names)
    for model_type in FAMILIES:
        for rope in (YARN, LLAMA3, LONGROPE):
            for inner in (None, 1024, 2048):
                for outer_value in (None, 1024, 2048):
                    name = "original_max_position_embeddings"
                    values = {key: value for key, value in rope.items() if key != name}
                    if inner is not None:
                        values[name] = inner
                    yield Case(model_type, {"rope_scaling": values, name: outer_value}, (name,))


def pair_cases(model_type: str, old: str, new: str, first: Any, second: Any, **rest: Any) -> Iterator[Case]:
    """All combinations of two values and null under two names."""
    for old_value in (..., None, first, second):
        for new_value in (..., None, first, second):
            changes = {old: old_value, new: new_value, **rest}
            yield Case(model_type, {k: v for k, v in changes.items() if v is not ...}, (old, new))


def other_cases() -> Iterator[Case]:
    for model_type in FAMILIES:
        yield from pair_cases(model_type, "torch_dtype", "dtype", "bfloat16", "float16")
        rest = {"rope_scaling": LINEAR}
        yield from pair_cases(model_type, "partial_rotary_factor", "partial_rotary_factor", 1.0, 1.0, **rest)
    yield from pair_cases("qwen3_moe", "num_local_experts", "num_experts", 4, 8)
    yield from pair_cases("gemma3_text", "hidden_act", "hidden_activation", "gelu_pytorch_tanh", "silu")
    pattern = ("_sliding_window_pattern", "sliding_window_pattern", 2, 3)
    yield from pair_cases("gemma3_text", *pattern)
    yield from pair_cases("gemma3_text", *pattern, layer_types=["full_attention", "sliding_attention"] * 3)
    types = [["full_attention"] * 6, ["full_attention"] * 3 + ["sliding_attention"] * 3]
    for model_type in ("qwen2", "qwen3"):
        windows = {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 2}
        yield from pair_cases(model_type, "layer_types", "layer_types", *types, **windows)


def config_of(case: Case) -> dict[str, Any]:
    return {"model_type": case.model_type, **BASE, **FAMILIES[case.model_type], **case.changes}


def ours(folder: Path) -> ModelSpec | str:
    """The reading, or the refusal."""
    try:
        return read_hf_spec(folder)
    except ConfigError as error:
        return str(error)


def theirs(folder: Path) -> Any:
    """The configuration of transformers, or None if it refuses the file."""
    try:
        return transformers.AutoConfig.from_pretrained(folder)
    except Exception:  # configuration classes raise many kinds of errors
        return None


def theirs_rope(config: Any) -> list[tuple[torch.Tensor, float]] | None:
    """Frequencies and scale: of all layers, or of full-attention and windowed ones. None: refused."""
    try:
        if config.model_type == "gemma3_text":
            rope = Gemma3RotaryEmbedding(config)
            kinds = ("full_attention", "sliding_attention")
            return [(getattr(rope, f"{k}_inv_freq"), getattr(rope, f"{k}_attention_scaling")) for k in kinds]
        rope = (Phi3RotaryEmbedding if config.model_type == "phi3" else LlamaRotaryEmbedding)(config)
        return [(rope.inv_freq, rope.attention_scaling)]
    except (KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError):
        return None


def ours_rope(spec: ModelSpec) -> list[tuple[torch.Tensor, float]]:
    """The same; of longrope the short factors, as transformers computes them at first."""
    dim, original = spec.rotary_dim or spec.head_dim, spec.rope_scaling.original_max_position
    max_model_len = original if spec.rope_scaling.kind == "longrope" else 4096
    full = rotary_frequencies(spec.rope_theta, dim, spec.rope_scaling, max_model_len)
    ropes = [(full, spec.rope_scaling.attention_factor)]
    if spec.windows is not None and spec.windows.rope_theta is not None:
        ropes.append((rotary_frequencies(spec.windows.rope_theta, dim, RopeScaling(), max_model_len), 1.0))
    return ropes


def same_rope(first: list[tuple[torch.Tensor, float]], second: list[tuple[torch.Tensor, float]]) -> bool:
    return all(
        torch.allclose(f, g, rtol=1e-5, atol=0) and abs(s - t) < 1e-6
        for (f, s), (g, t) in zip(first, second, strict=True)
    )


def write(folder: Path, case: Case) -> None:
    (folder / "config.json").write_text(json.dumps(config_of(case)))


def fault(folder: Path, case: Case) -> str:
    """What is wrong with our reading or refusal; "" for nothing, "equal" for the reading of transformers."""
    write(folder, case)
    spec = ours(folder)
    if isinstance(spec, str):
        given = [name for name in case.names if case.changes.get(name) not in (None, {})]
        if all(name in spec for name in given):
            return ""
        for name in given:  # refused for itself, not because of the other one
            write(folder, case._replace(changes={k: v for k, v in case.changes.items() if k != name}))
            if isinstance(ours(folder), str):
                return ""
        return f"names not both: {spec}"
    config = theirs(folder)
    if config is None or (spec.experts is not None and config.num_experts is None):
        return ""
    reference = theirs_rope(config)
    if reference is not None and not same_rope(ours_rope(spec), reference):
        return f"another rope: {ours_rope(spec)}, {reference}"
    if f"torch.{spec.torch_dtype}" != str(config.dtype or "torch.float32"):
        return f"another dtype: {spec.torch_dtype}, {config.dtype}"
    if spec.experts is not None and spec.experts.num_experts != config.num_experts:
        return f"other experts: {spec.experts.num_experts}, {config.num_experts}"
    kinds = [
        "sliding_attention" if windowed else "full_attention"
        for windowed in (spec.windows.layers if spec.windows else ())
    ]
    if kinds and kinds != getattr(config, "layer_types", kinds):
        return f"other windows: {kinds}, {config.layer_types}"
    return "equal"


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("model_type", FAMILIES)
@pytest.mark.parametrize("cases", [rope_cases, other_cases])
def test_two_spellings_are_read_as_in_transformers_or_refused(
    tmp_path: Path, cases: Any, model_type: str
) -> None:
    found = {str(case): fault(tmp_path, case) for case in cases() if case.model_type == model_type}
    faults = {case: text for case, text in found.items() if text not in ("", "equal")}
    assert not faults, "\n".join(f"{case}: {text}" for case, text in faults.items())
    assert list(found.values()).count("equal") > 10


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("n_embd", "hidden_size"),
        ("n_layer", "num_hidden_layers"),
        ("n_head", "num_attention_heads"),
        ("num_kv_heads", "num_key_value_heads"),
    ],
)
def test_sizes_of_other_architectures_have_one_name(tmp_path: Path, old: str, new: str) -> None:
    config = {"model_type": "novel", "architectures": ["NovelForCausalLM"], **BASE}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config | {old: BASE[new]}))
    assert isinstance(ours(tmp_path), ModelSpec)
    path.write_text(json.dumps(config | {old: 2 * BASE[new]}))
    assert f"{new} is {BASE[new]}, but {old} is {2 * BASE[new]}" in str(ours(tmp_path))


@pytest.mark.parametrize("model_type", FAMILIES)
def test_the_published_spellings_are_read(tmp_path: Path, model_type: str) -> None:
    """A refusal of everything would pass the other test."""
    published = {"phi3": LONGROPE, "gemma3_text": {"rope_type": "linear", "factor": 8.0}}
    write(tmp_path, Case(model_type, {"rope_scaling": published.get(model_type, LINEAR)}, ()))
    assert isinstance(ours(tmp_path), ModelSpec)
