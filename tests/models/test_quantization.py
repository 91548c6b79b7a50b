"""`QuantizationSpec`: which modules stay plain, what a flag may ask for, and the memory of each form."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
import pytest

from engine.launch.resolve.memory_budget import plan_memory
from engine.models.families.gpt_oss import NAMES as GPT_OSS_NAMES
from engine.models.spec.experts_spec import LFM2_NAMES, MIXTRAL_NAMES, ExpertNames
from engine.models.spec.model_spec import ModelSpec, with_quantization
from engine.models.spec.quantization import QuantizationSpec
from engine.models.weight_files.weight_memory import num_parameters, weight_bytes
from engine.runtime.config.model_choice import QuantMethod
from engine.runtime.errors import ConfigError


def spec(**changes: Any) -> ModelSpec:
    facts: dict[str, Any] = {
        "model_type": "llama",
        "vocab_size": 1000,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_layers": 3,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e4,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    return ModelSpec(**(facts | changes))


def test_modules_that_stay_plain_are_matched_in_whole_components() -> None:
    found = QuantizationSpec(method="awq", plain_modules=("gate_up", "layers.1", "re:.*v_proj"))

    assert [
        found.is_plain(name)
        for name in (
            "model.layers.1.mlp.down_proj",
            "model.layers.0.self_attn.v_proj",
            "model.layers.0.mlp.gate",  # the router of experts, whether or not the checkpoint says so
            "model.layers.11.mlp.down_proj",
            "model.layers.0.mlp.gate_up_proj",
            "model.layers.0.mlp.gate_proj",
        )
    ] == [True, True, True, False, False, False]


@pytest.mark.parametrize(
    "names",
    [ExpertNames(), MIXTRAL_NAMES, LFM2_NAMES, GPT_OSS_NAMES],
    ids=["usual", "mixtral", "lfm2", "gpt_oss"],
)
def test_routers_stay_plain(names: ExpertNames) -> None:
    block = f"model.layers.0.{names.block}"
    found = QuantizationSpec(method="int4", stored=False)

    assert found.is_plain(f"{block}.{names.router}") and found.is_plain(
        f"model.layers.0.mlp.{names.shared_gate}"
    )
    assert not found.is_plain(f"{block}.experts.0.{names.gate}")


@pytest.mark.parametrize(
    ("stored", "asked", "message"),
    [
        (QuantizationSpec(method="awq"), "fp8", "quantization is fp8, but the checkpoint's weights are awq"),
        (None, "gptq", "quantization is gptq, but .*not quantized, and only fp8, int8, int4 can be"),
    ],
)
def test_a_flag_that_contradicts_the_checkpoint(
    stored: QuantizationSpec | None, asked: QuantMethod, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        with_quantization(spec(quantization=stored), asked)


def test_a_flag_that_agrees_changes_nothing_and_fp8_can_be_made_of_plain_weights() -> None:
    awq = spec(quantization=QuantizationSpec(method="awq", group_size=64))
    assert with_quantization(awq, "awq") is awq
    assert with_quantization(spec(), None) == spec()

    made = with_quantization(spec(), "fp8")

    assert made.quantization == QuantizationSpec(method="fp8", stored=False)
    assert with_quantization(made, "fp8") is made
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(made), type=ModelSpec) == made


def test_memory_of_quantized_weights() -> None:
    linears = {"q": (256, 256), "k": (128, 256), "v": (128, 256), "o": (256, 256)}
    linears |= {"gate": (512, 256), "up": (512, 256), "down": (256, 512)}
    in_linears = 3 * sum(rows * columns for rows, columns in linears.values())
    rest = 2 * (num_parameters(spec()) - in_linears)

    fp8 = spec(quantization=QuantizationSpec(method="fp8"))
    assert weight_bytes(fp8, 2) == rest + in_linears + 3 * 4 * sum(rows for rows, _ in linears.values())
    assert weight_bytes(fp8, 2, dequantized=True) == weight_bytes(spec(), 2)

    awq = spec(quantization=QuantizationSpec(method="awq", group_size=64, plain_modules=("mlp",)))
    attention = [linears[name] for name in "qkvo"]
    quantized = 3 * sum(rows * columns // 2 + 3 * rows * columns // 64 for rows, columns in attention)
    plain = 2 * (num_parameters(spec()) - 3 * sum(rows * columns for rows, columns in attention))
    assert weight_bytes(awq, 2) == quantized + plain


def test_parts_that_are_fused_keep_their_bytes_unless_they_are_one_weight() -> None:
    """q and k in Q4_K, v in Q6_K; gates and rows of an expert are one weight, so 8-bit blocks with minima."""
    types = {"q": "Q4_K", "k": "Q4_K", "v": "Q6_K", "mlp.experts.gate": "Q4_K", "mlp.experts.up": "Q6_K"}
    gguf = QuantizationSpec(method="gguf", types=types)
    assert gguf.bytes_together([("q", 64), ("k", 32), ("v", 32)], 512) == [64 * 288, 32 * 288, 32 * 420]
    assert gguf.bytes_together([("mlp.experts.3.gate", 8), ("mlp.experts.3.up", 8)], 512) == [
        8 * 16 * 36,
        8 * 16 * 36,
    ]


def test_memory_is_planned_for_what_the_device_keeps() -> None:
    def weights(*, reordered: bool = False, bits: Literal[4, 8] = 4, **device: Any) -> int:
        gptq = QuantizationSpec(method="gptq", bits=bits, group_size=128, reordered=reordered)
        budget = plan_memory(
            spec(quantization=gptq, tie_word_embeddings=False),
            usable_bytes=1 << 30,
            dtype="bfloat16",
            fraction=0.5,
            step_tokens=16,
            max_model_len=64,
            max_running_requests=2,
            **device,
        )
        return budget.weights_bytes

    assert weights(reordered=True, on_cpu=True) == weight_bytes(spec(), 2)  # dequantized while loading
    in_blocks = weights(on_cpu=True) - weights(
        on_cpu=False
    )  # a minimum of 2 bytes per group, not a zero point
    assert in_blocks == 3 * (2 * 256 * 256 + 2 * 128 * 256 + 3 * 512 * 256) * (4 - 3) / 128
    assert weights(on_cpu=False) < 0.6 * weight_bytes(spec(), 2)
    numbers = 3 * (2 * 256 * 256 + 2 * 128 * 256 + 3 * 512 * 256)
    assert weights(bits=8, on_cpu=False) - weights(on_cpu=False) == numbers // 2
    more_scales = numbers * (4 / 32 - 4 / 128)  # 8 bits have a scale and a minimum per 32 numbers
    assert weights(bits=8, on_cpu=True) - weights(on_cpu=True) == numbers // 2 + more_scales
