"""A model with state layers in the whole engine: texts do not depend on what is cached, cut, retracted or lost."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from engine import LLM, SamplingParams
from engine.runtime.errors import ConfigError
from engine.scheduler.journal.log_file import read_runs
from engine.scheduler.journal.replay import replay

SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "num_threads": 1,
    "page_size": 4,
    "max_total_tokens": 1024,
    "max_running_requests": 4,
}
SHARED = "one beginning that all of these prompts share, longer than some chunks of it: "
PROMPTS = [SHARED + f"prompt {n}" + " and more" * n for n in range(4)]
PARAMS = SamplingParams(temperature=1.0, seed=3, max_new_tokens=20, ignore_eos=True)


def save_tiny(model_type: str, tokenizer: Path, folder: Path, **options: Any) -> Path:
    """A random model with the tokenizer of another folder."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {
        "vocab_size": 272,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "eos_token_id": 2,
    }
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **sizes, **options))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.4)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, folder)
    return folder


@pytest.fixture(scope="module")
def tiny_lfm2(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tokenizer of the tiny Llama around a random LFM2."""
    return save_tiny(
        "lfm2",
        tiny_model,
        tmp_path_factory.mktemp("models") / "tiny-lfm2",
        block_auto_adjust_ff_dim=False,
        layer_types=["conv", "full_attention", "conv", "conv"],
    )


@pytest.fixture(scope="module")
def tiny_qwen(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same around a random Qwen3.5, whose layers are delta nets."""
    return save_tiny(
        "qwen3_5_text",
        tiny_model,
        tmp_path_factory.mktemp("models") / "tiny-qwen",
        head_dim=16,
        layer_types=["linear_attention", "full_attention", "linear_attention", "linear_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
    )


@pytest.fixture(scope="module")
def tiny_granite(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same around a random Granite 4, with layers of Mamba 2."""
    return save_tiny(
        "granitemoehybrid",
        tiny_model,
        tmp_path_factory.mktemp("models") / "tiny-granite",
        layer_types=["linear_attention", "full_attention", "linear_attention", "linear_attention"],
        num_local_experts=0,
        shared_intermediate_size=64,
        mamba_n_heads=4,
        mamba_d_state=16,
        embedding_multiplier=8.0,
        residual_multiplier=0.5,
    )


@pytest.fixture(scope="module")
def tiny_nemotron(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same around a random Nemotron-H, with experts; its layers are single blocks."""
    return save_tiny(
        "nemotron_h",
        tiny_model,
        tmp_path_factory.mktemp("models") / "tiny-nemotron",
        layers_block_type=["linear_attention", "full_attention", "moe", "linear_attention"],
        head_dim=16,
        mamba_num_heads=4,
        mamba_head_dim=16,
        n_groups=2,
        ssm_state_size=16,
        n_routed_experts=4,
        moe_intermediate_size=32,
        moe_shared_expert_intermediate_size=32,
    )


@pytest.fixture(scope="module")
def expected(tiny_lfm2: Path) -> list[str]:
    """The texts, each request alone and without a cache."""
    with LLM(str(tiny_lfm2), **SETTINGS, radix_cache=False, multi_step_ms=0) as llm:
        return [llm.generate([prompt], PARAMS)[0].text for prompt in PROMPTS]


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"chunked_prefill_size": 4},
        {"chunked_prefill_size": 32, "multi_step_ms": 1000.0},
        {"overlap": True, "max_total_tokens": 256},
        {"chaos": "oom=0.3:6,retract=0.2:8"},
        {"chaos": "retract=0.3:8", "overlap": True},
        {"kv_cache_dtype": "auto", "attention_backend": "torch_native", "record_steps": False},
    ],
    ids=str,
)
def test_texts_are_those_of_requests_alone(tiny_lfm2, expected, tmp_path, settings):
    log = tmp_path / "decisions.edl"
    with LLM(str(tiny_lfm2), **(SETTINGS | settings), decision_log=str(log)) as llm:
        first = llm.generate(PROMPTS, PARAMS)
        second = llm.generate(PROMPTS, PARAMS)

    assert [output.text for output in first] == expected
    assert [output.text for output in second] == expected
    [result] = [replay(each) for each in read_runs(log)]
    assert result.is_equal, result.difference


def test_a_second_turn_starts_from_a_checkpoint(tiny_lfm2):
    with LLM(str(tiny_lfm2), **SETTINGS) as llm:
        [first] = llm.generate([PROMPTS[0]], PARAMS)
        turn = PROMPTS[0] + first.text + " and then"
        [second] = llm.generate([turn], PARAMS)
        [again] = llm.generate([turn], PARAMS)
    with LLM(str(tiny_lfm2), **SETTINGS, radix_cache=False) as llm:
        [alone] = llm.generate([turn], PARAMS)

    assert second.text == again.text == alone.text
    assert second.usage.cached_tokens > len(SHARED) // 2
    assert again.usage.cached_tokens > second.usage.cached_tokens
    assert alone.usage.cached_tokens == 0


@pytest.mark.slow
def test_drafts_change_no_text(tiny_lfm2):
    greedy = SamplingParams(temperature=0.0, max_new_tokens=150, ignore_eos=True)
    prompts = [prompt + "a b c a b c a b c a b" for prompt in PROMPTS[:2]]
    with LLM(str(tiny_lfm2), **SETTINGS) as llm:
        alone = [llm.generate([prompt], greedy)[0].text for prompt in prompts]
    with LLM(str(tiny_lfm2), **SETTINGS, speculative="ngram") as llm:
        outputs = llm.generate(prompts, greedy)
    assert [output.text for output in outputs] == alone


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    "name", ["tiny_qwen", "tiny_granite", pytest.param("tiny_nemotron", marks=pytest.mark.slow)]
)
def test_recurrent_states_are_kept_too(request, name):
    """Chunks, checkpoints, retractions and drafts."""
    folder = str(request.getfixturevalue(name))
    base: dict[str, Any] = SETTINGS | {"max_total_tokens": 8192}  # with room for a checkpoint of each prompt
    with LLM(folder, **base, radix_cache=False) as llm:
        alone = [llm.generate([prompt], PARAMS)[0].text for prompt in PROMPTS]
    for settings in ({"chunked_prefill_size": 8, "chaos": "retract=0.2:8"}, {"speculative": "ngram"}):
        with LLM(folder, **base, **settings) as llm:
            first, second = llm.generate(PROMPTS, PARAMS), llm.generate(PROMPTS, PARAMS)
        assert [output.text for output in first] == [output.text for output in second] == alone
        if "chaos" not in settings:
            assert all(output.usage.cached_tokens > len(SHARED) // 2 for output in second)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"preemption_mode": "swap"}, "preemption_mode is swap, but lfm2 has layers with a state"),
        ({"swap_space": 1.0}, "swap_space is 1.0, but lfm2 has layers with a state"),
        ({"kv_host_size": 1.0}, "kv_host_size is 1, but lfm2 has layers with a state"),
        ({"model_impl": "transformers"}, "only the engine's own model keeps its states"),
    ],
)
def test_what_needs_earlier_states_is_refused(tiny_lfm2, settings, message):
    with pytest.raises(ConfigError, match=message):
        LLM(str(tiny_lfm2), **SETTINGS, **settings)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_types": ["conv", "mamba", "conv", "conv"]}, "layer_types .* expected a list of"),
        ({"layer_types": ["conv"]}, "1 kinds of layers for 4 layers"),
        ({"layer_types": ["conv"] * 4}, "at least one layer with attention"),
        ({"conv_L_cache": 1}, "conv_L_cache is 1, expected a whole number from 2"),
        ({"block_use_swiglu": False}, "block_use_swiglu is False, only true is supported"),
        ({"conv_dim": 16}, "conv_dim is 16, only the hidden size 32 is supported"),
    ],
)
def test_unknown_forms_are_refused_by_name(tiny_lfm2, tmp_path, change, message):
    folder = tmp_path / "changed"
    shutil.copytree(tiny_lfm2, folder)
    config = json.loads((folder / "config.json").read_text()) | change
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=message):
        LLM(str(folder), **SETTINGS)
