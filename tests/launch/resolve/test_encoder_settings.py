"""What `resolve` makes of the settings for an encoder."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest

from engine.launch.resolve.host_facts import HostFacts
from engine.launch.resolve.memory_budget import capacity_of
from engine.launch.resolve.nvidia_gpus import GpuFacts
from engine.launch.resolve.resolve import resolve
from engine.models.spec.encoder_spec import EncoderSpec
from engine.models.spec.layer_form import Biases
from engine.models.spec.model_spec import ModelSpec
from engine.models.weight_files.weight_memory import num_parameters
from engine.runtime.config.config_sources import from_arguments, merge
from engine.runtime.config.engine_config import EngineConfig, SchedulerConfig
from engine.runtime.errors import ConfigError

GIB = 1 << 30
MINILM = ModelSpec(
    model_type="bert",
    vocab_size=30522,
    hidden_size=384,
    intermediate_size=1536,
    num_layers=6,
    num_heads=12,
    num_kv_heads=12,
    head_dim=32,
    rms_norm_eps=1e-12,
    rope_theta=1e4,
    max_position_embeddings=512,
    tie_word_embeddings=True,
    torch_dtype="float32",
    biases=Biases(qkv=True, attention_out=True, mlp=True),
    encoder=EncoderSpec(post_norm=True, activation="gelu", position_rows=512, token_types=2),
)
BASE = msgspec.structs.replace(
    MINILM, hidden_size=768, intermediate_size=3072, num_layers=12, num_heads=12, num_kv_heads=12, head_dim=64
)
HOST = HostFacts(
    num_cpus=4,
    num_cores=2,
    cpu_quota=None,
    cpu_flags=frozenset({"avx2", "avx512_bf16"}),
    mem_available_bytes=8 * GIB,
    cgroup_free_bytes=None,
    torch_version="2.9.0+cpu",
)
GPU_HOST = dataclasses.replace(
    HOST, gpus=(GpuFacts("NVIDIA H100 80GB HBM3", 80 * GIB, 78 * GIB),), torch_version="2.9.0"
)


def config(**settings) -> EngineConfig:
    return merge(from_arguments(settings)).config


def test_texts_are_whole_and_nothing_outlives_a_step():
    resolved = resolve(config(), MINILM, HOST)
    ours = resolved.config
    assert ours.scheduler.chunked_prefill_size == -1
    assert not ours.cache.radix_cache and not ours.scheduler.in_batch_prefix_caching
    assert ours.cache.swap_space == 0.0 and ours.scheduler.preemption_mode == "recompute"
    assert ours.scheduler.multi_step_ms == 0.0 and ours.scheduler.target_step_ms == 0.0
    assert ours.model.max_model_len == 512 and ours.model.dtype == "bfloat16" == ours.cache.kv_cache_dtype
    assert {"radix_cache", "chunked_prefill_size", "swap_space", "max_total_tokens"} <= set(resolved.notes)


def test_resolving_again_changes_nothing():
    once = resolve(config(), MINILM, HOST).config
    assert resolve(once, MINILM, HOST).config == once
    on_gpu = resolve(config(), MINILM, GPU_HOST).config
    assert resolve(on_gpu, MINILM, GPU_HOST).config == on_gpu


def test_a_step_on_the_cpu_is_short_and_the_pool_holds_two():
    ours = resolve(config(), MINILM, HOST).config
    assert ours.scheduler.max_prefill_tokens == 2048 and ours.scheduler.max_running_requests == 256
    # Two steps: full of prompts (2048), or of one text of any length beside running ones; and half-filled last pages.
    assert ours.cache.max_total_tokens == 2 * 2048 + 256 * 16
    assert not ours.cache.pool_is_estimate, "no more than that on a GPU either"
    assert capacity_of(ours, MINILM).num_pages * 16 == ours.cache.max_total_tokens


def test_a_larger_model_has_shorter_steps_and_a_long_text_still_fits():
    ours = resolve(config(), BASE, HOST).config
    assert 512 <= ours.scheduler.max_prefill_tokens < 1400 and ours.scheduler.max_prefill_tokens % 16 == 0
    encoder = EncoderSpec(post_norm=False, activation="gelu", gated_mlp=True)
    long = msgspec.structs.replace(
        BASE, model_type="modernbert", max_position_embeddings=8192, encoder=encoder
    )
    ours = resolve(config(), long, HOST).config
    assert ours.model.max_model_len == 8192
    assert isinstance(ours.cache.max_total_tokens, int) and ours.cache.max_total_tokens >= 2 * 8192


def test_a_gpu_keeps_its_large_steps():
    ours = resolve(config(), MINILM, GPU_HOST).config
    assert ours.scheduler.max_prefill_tokens == SchedulerConfig().max_prefill_tokens
    assert ours.scheduler.max_running_requests == 1024


def test_own_values_are_kept():
    ours = resolve(
        config(max_prefill_tokens=4000, max_running_requests=9, max_total_tokens=1600), MINILM, HOST
    ).config
    assert ours.scheduler.max_prefill_tokens == 4000 and ours.scheduler.max_running_requests == 9
    assert ours.cache.max_total_tokens == 1600


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"speculative": "ngram"}, "speculative is ngram, but bert is an encoder"),
        (
            {"chunked_prefill_size": 512},
            "chunked_prefill_size is 512, but bert is an encoder: each token attends",
        ),
        ({"swap_space": 1.0}, "swap_space is 1.0"),
        ({"kv_host_size": 1.5}, "kv_host_size is 1.5"),
        ({"preemption_mode": "swap"}, "preemption_mode is swap"),
        ({"multi_step_ms": 40.0}, "multi_step_ms is 40.0"),
        ({"kv_cache_dtype": "int8"}, "kv_cache_dtype is int8"),
        ({"model_impl": "transformers"}, "only decoders run in transformers"),
        ({"quantization": "int8"}, "quantization is int8"),
        ({"tp": 2}, "tp is 2, but bert is an encoder"),
        ({"kv_events": "tcp://*:1"}, "kv_events is 'tcp://.*', but bert is an encoder: it keeps no prefixes"),
        ({"max_model_len": 513}, "the model knows positions up to 512 only"),
    ],
)
def test_settings_that_an_encoder_cannot_have_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        resolve(config(**settings), MINILM, HOST)


@pytest.mark.parametrize("preset", ["chat", "rag", "agents", "batch", "latency"])
@pytest.mark.parametrize("host", [HOST, GPU_HOST], ids=["cpu", "gpu"])
def test_a_preset_is_no_contradiction(preset, host):
    ours = resolve(config(preset=preset), MINILM, host).config
    assert ours.scheduler.chunked_prefill_size == -1
    assert isinstance(ours.cache.max_total_tokens, int) and ours.cache.max_total_tokens >= 2 * 512
    assert resolve(ours, MINILM, host).config == ours


def test_the_output_head_that_there_is_not_takes_no_memory():
    many_words = msgspec.structs.replace(MINILM, vocab_size=250_002)
    tight = dataclasses.replace(
        HOST, mem_available_bytes=1100 << 20
    )  # 206 MB of weights, 512 MB for the runtime
    assert resolve(config(), many_words, tight).config.cache.max_total_tokens == 2 * 2048 + 256 * 16


def test_parameters_are_those_of_the_real_minilm():
    pooler = 384 * 384 + 384  # in the file, and not read
    assert num_parameters(MINILM) == 22_713_216 - pooler
    assert MINILM.kv_bytes_per_token(2) == 2 * 384 * 2, "one layer"
