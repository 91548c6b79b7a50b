"""What the installed transformers can compute, read from its files: equal to what its own tables and classes say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from msgspec.structs import replace
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from engine.launch.resolve import model_resolution
from engine.launch.resolve.transformers_support import (
    COMPUTED,
    TABLES_OF,
    WITH_OWN_ATTENTION,
    WITH_STATE,
    Installed,
    find_transformers,
    why_no_package,
    why_not_transformers,
)
from engine.models.source import ModelSource
from engine.models.spec.model_spec import ModelSpec
from engine.models.spec.quantization import QuantizationSpec
from engine.runtime.config.engine_config import ModelConfig
from engine.runtime.errors import ConfigError

SPEC = ModelSpec(
    model_type="olmo2",
    vocab_size=96,
    hidden_size=48,
    intermediate_size=64,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    head_dim=8,
    rms_norm_eps=1e-5,
    rope_theta=1e4,
    max_position_embeddings=512,
    tie_word_embeddings=False,
    torch_dtype="float32",
    eos_token_ids=(),
)


def test_the_installed_package_is_found_as_it_is() -> None:
    found = find_transformers()
    assert found is not None
    assert found.version == transformers.__version__
    assert found.folder == Path(str(transformers.__file__)).parent


def test_every_language_model_is_known() -> None:
    installed = find_transformers()
    reasons = {name: why_not_transformers(name, installed) for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}
    assert not [name for name, reason in reasons.items() if reason and "no built-in" in reason]
    assert [reasons[name] for name in ("mixtral", "olmo2", "granite", "cohere2", "glm4_moe")] == [None] * 5
    for name in ("nemotron_h", "jamba", "qwen3_next", "mamba", "falcon_h1", "bamba"):
        assert "layers keep a state" in str(reasons[name])
    for name in ("bloom", "mpt", "gptj", "codegen"):
        assert "does not support external attention" in str(reasons[name])


@pytest.mark.parametrize(
    "name", ["baichuan", "xverse", "internlm2", "qwen", "phi3small", "phi3_v", "vit", "", "a/b"]
)
def test_code_from_a_folder_is_no_way_out(name: str) -> None:
    reason = why_not_transformers(name, find_transformers())
    assert reason is not None and f"no built-in language model for model_type {name!r}" in reason


def test_packages_that_cannot_be_used(tmp_path: Path) -> None:
    assert "not installed" in str(why_no_package(None))
    assert "4.57.1 is too old" in str(why_no_package(Installed("4.57.1", tmp_path)))
    assert why_no_package(find_transformers()) is None
    assert why_not_transformers("olmo2", Installed("6.0", tmp_path)) is None  # its tables are elsewhere


@pytest.mark.skipif(
    not transformers.__version__.startswith(TABLES_OF), reason=f"the tables are of {TABLES_OF}"
)
def test_the_tables_say_what_the_package_says() -> None:
    installed = find_transformers()
    assert set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) == COMPUTED | WITH_STATE | WITH_OWN_ATTENTION
    for name in (*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, "minimax_m3", "xverse", "deepseek_ref"):
        told = why_not_transformers(name, None)
        assert told == why_not_transformers(name, installed) or str(told).startswith(
            f"transformers {TABLES_OF} has no"
        )
        assert told == why_not_transformers(name, Installed("4.57.1", Path("/nowhere")))


@pytest.mark.parametrize(
    ("model_type", "quantization", "message"),
    [
        ("phi3small", {"quant_method": "fp8"}, "no built-in language model for model_type 'phi3small'"),
        ("falcon_h1", {"quant_method": "fp8"}, "its layers keep a state"),
        (
            "hy_v4",
            {"quant_method": "fp8"},
            r"the weights are quantized \(fp8\), but transformers computes with plain",
        ),
        ("hy_v4", None, "not installed; install it"),
    ],
)
def test_a_missing_package_is_the_last_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model_type: str, quantization: object, message: str
) -> None:
    monkeypatch.setattr(model_resolution, "find_transformers", lambda: None)
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 99}
    config = {
        "model_type": model_type,
        "max_position_embeddings": 64,
        **sizes,
        "quantization_config": quantization,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))

    with pytest.raises(ConfigError, match=message):
        model_resolution.read_model(ModelConfig(model=str(tmp_path)), ModelSource("hf", str(tmp_path), ""))


@pytest.mark.parametrize(
    ("fields", "settings", "reason"),
    [
        (
            {"model_type": "novel"},
            {},
            "no built-in language model for model_type 'novel', and code from a model's",
        ),
        (
            {"quantization": QuantizationSpec(method="awq")},
            {},
            r"weights are quantized .awq., but transformers computes with plain",
        ),
        (
            {},
            {"quantization": "fp8"},
            "quantization is fp8, but .*transformers computes with plain weights only",
        ),
    ],
)
def test_what_transformers_does_not_compute_is_refused(
    fields: dict[str, Any], settings: dict[str, Any], reason: str
) -> None:
    config = ModelConfig(model_impl="transformers", **settings)
    with pytest.raises(ConfigError, match=reason):
        model_resolution.check_implementation(
            config, ModelSource("hf", "folder", "test"), replace(SPEC, **fields)
        )


def test_gguf_files_are_not_read_by_transformers() -> None:
    config = ModelConfig(model_impl="transformers")
    with pytest.raises(ConfigError, match="not GGUF files; use --model-impl engine"):
        model_resolution.check_implementation(config, ModelSource("gguf", "file.gguf", "test"), SPEC)
