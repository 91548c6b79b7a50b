"""The arithmetic behind "auto", on described machines."""

from __future__ import annotations

import dataclasses

import pytest

from engine.runtime.config import EngineConfig
from engine.runtime.config_sources import from_arguments, merge
from engine.runtime.errors import ConfigError
from engine.runtime.host_facts import GpuFacts, HostFacts
from engine.runtime.memory_budget import RUNTIME_BYTES, plan_memory
from engine.runtime.model_files.model_spec import ModelSpec
from engine.runtime.resolve import resolve

GIB = 1 << 30

SPEC = ModelSpec(
    model_type="llama",
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    rms_norm_eps=1e-5,
    rope_theta=1e5,
    max_position_embeddings=8192,
    tie_word_embeddings=True,
    torch_dtype="bfloat16",
)
HOST = HostFacts(
    num_cpus=8,
    num_cores=4,
    cpu_quota=None,
    cpu_flags=frozenset({"avx2", "avx512_bf16"}),
    mem_available_bytes=16 * GIB,
    cgroup_free_bytes=None,
    torch_version="2.9.0+cpu",
)
GPU = GpuFacts("NVIDIA H100 80GB HBM3", 80 * GIB, 78 * GIB)
GPU_HOST = dataclasses.replace(HOST, gpus=(GPU,), torch_version="2.9.0")


def config(**settings) -> EngineConfig:
    """A configuration with some settings, each put into its group."""
    return merge(from_arguments(settings)).config


def pool_of(config: EngineConfig) -> int:
    assert isinstance(config.cache.max_total_tokens, int)
    return config.cache.max_total_tokens


def host(**facts) -> HostFacts:
    return dataclasses.replace(HOST, **facts)


def test_the_default_model_on_a_plain_machine():
    resolved = resolve(EngineConfig(), SPEC, HOST)
    model, cache, scheduler = resolved.config.model, resolved.config.cache, resolved.config.scheduler
    assert (model.device, model.dtype, model.num_threads, model.max_model_len) == ("cpu", "bfloat16", 4, 8192)
    assert (cache.mem_fraction, scheduler.chunked_prefill_size, scheduler.max_running_requests) == (
        0.4,
        512,
        64,
    )
    assert cache.max_total_tokens % cache.page_size == 0
    assert set(resolved.notes) == {
        "device",
        "dtype",
        "num_threads",
        "swap_space",
        "max_model_len",
        "mem_fraction",
        "max_total_tokens",
        "max_running_requests",
        "chunked_prefill_size",
    }
    assert all(note and "\n" not in note for note in resolved.notes.values())


def test_the_pool_is_what_the_sums_say():
    resolved = resolve(config(page_size=16), SPEC, HOST).config
    budget = plan_memory(
        SPEC,
        usable_bytes=16 * GIB,
        dtype="bfloat16",
        fraction=0.4,
        step_tokens=512 + 64,
        max_model_len=8192,
        max_running_requests=64,
        copies_tied_head=True,
    )
    head = SPEC.vocab_size * SPEC.hidden_size
    by_hand = (
        (16 * GIB - 2 * (SPEC.num_parameters + head) - budget.workspace_bytes) * 0.4 / (2 * 30 * 3 * 64 * 2)
    )
    assert budget.workspace_bytes > RUNTIME_BYTES
    assert resolved.cache.max_total_tokens == int(by_hand) // 16 * 16


@pytest.mark.parametrize(
    ("settings", "facts", "step_tokens", "running"),
    [
        pytest.param({}, {}, 512 + 64, 64, id="plain"),
        pytest.param(
            {}, {"num_cpus": 32, "num_cores": 16}, 512 + 256, 256, id="many cores run many requests"
        ),
        pytest.param({"max_model_len": 256}, {}, 512 + 64, 64, id="several prompts share a step"),
        pytest.param(
            {"max_model_len": 64, "max_running_requests": 2}, {}, 2 * 64 + 2, 2, id="no more than all prompts"
        ),
        pytest.param({"max_prefill_tokens": 100}, {}, 100 + 64, 64, id="the smaller limit holds"),
        pytest.param(
            {"max_prefill_tokens": 4, "chunked_prefill_size": 16}, {}, 16 + 64, 64, id="but a page at least"
        ),
        pytest.param(
            {"chunked_prefill_size": -1, "max_prefill_tokens": 1000},
            {},
            8192 + 64,
            64,
            id="a prompt of its own",
        ),
        pytest.param(
            {"chunked_prefill_size": -1, "max_prefill_tokens": 9000}, {}, 9000 + 64, 64, id="uncut prompts"
        ),
    ],
)
def test_the_workspace_is_that_of_the_largest_step(settings, facts, step_tokens, running):
    max_model_len = settings.get("max_model_len", 8192)
    budget = plan_memory(
        SPEC,
        usable_bytes=16 * GIB,
        dtype="bfloat16",
        fraction=0.4,
        step_tokens=step_tokens,
        max_model_len=max_model_len,
        max_running_requests=running,
        copies_tied_head=True,
    )
    most = budget.left_bytes // budget.kv_token_bytes

    with pytest.raises(ConfigError, match=f"memory holds {most} tokens:"):
        resolve(config(max_total_tokens=most + 16, **settings), SPEC, host(**facts))
    resolve(config(max_total_tokens=most, **settings), SPEC, host(**facts))


def test_resolving_twice_changes_nothing():
    once = resolve(EngineConfig(), SPEC, HOST).config
    again = resolve(once, SPEC, HOST)
    assert again.config == once
    assert again.notes == {}


@pytest.mark.parametrize(
    ("facts", "dtype", "word"),
    [
        ({"cpu_flags": frozenset({"amx_bf16", "avx512_bf16"})}, "bfloat16", "amx_bf16"),
        ({"cpu_flags": frozenset({"avx512f"})}, "float32", "no bfloat16"),
        ({"cpu_flags": frozenset({"asimd", "bf16"})}, "bfloat16", "bf16"),
    ],
)
def test_dtype_follows_the_instructions_of_the_cpu(facts, dtype, word):
    resolved = resolve(EngineConfig(), SPEC, host(**facts))
    assert resolved.config.model.dtype == dtype
    assert word in resolved.notes["dtype"]


@pytest.mark.parametrize(
    ("facts", "threads"),
    [
        ({"num_cpus": 8, "num_cores": 8}, 8),
        ({"num_cpus": 2, "num_cores": 1}, 1),
        ({"cpu_quota": 1.5}, 2),
        ({"cpu_quota": 0.2}, 1),
        ({"cpu_quota": 64.0}, 4),
    ],
)
def test_threads_follow_affinity_and_quota(facts, threads):
    assert resolve(EngineConfig(), SPEC, host(**facts)).config.model.num_threads == threads


def test_the_cgroup_limit_counts_and_not_only_the_machine():
    roomy = resolve(EngineConfig(), SPEC, HOST).config
    tight = resolve(EngineConfig(), SPEC, host(cgroup_free_bytes=3 * GIB)).config
    assert pool_of(tight) < pool_of(roomy) / 4
    assert tight == resolve(EngineConfig(), SPEC, host(mem_available_bytes=3 * GIB)).config


def test_the_pool_is_no_larger_than_what_may_run_at_once():
    resolved = resolve(config(max_running_requests=1, max_model_len=100), SPEC, HOST)
    assert resolved.config.cache.max_total_tokens == 112  # one context of 100 in pages of 16
    assert "1 requests x 100 tokens" in resolved.notes["max_total_tokens"]


def test_little_memory_shortens_the_context_and_says_so():
    resolved = resolve(EngineConfig(), SPEC, host(mem_available_bytes=int(1.25 * GIB)))
    length = pool_of(resolved.config)
    assert 256 <= length < 8192
    assert resolved.config.model.max_model_len == length
    assert resolved.notes["max_model_len"].startswith("bounded by memory, (1.2 GiB free - ")
    assert resolved.config.scheduler.max_running_requests == length // 1024


def test_no_memory_is_an_error_with_the_sums():
    with pytest.raises(
        ConfigError, match=r"context of 0 tokens only: \(.* free - .* weights - .* workspace\) x 0.4"
    ):
        resolve(EngineConfig(), SPEC, host(mem_available_bytes=GIB // 2))


def test_an_asked_length_that_memory_does_not_hold_is_an_error():
    with pytest.raises(
        ConfigError, match=r"max_model_len is 8192, but memory holds \d+ tokens: .*--mem-fraction"
    ):
        resolve(config(max_model_len=8192), SPEC, host(mem_available_bytes=int(1.25 * GIB)))


def test_an_asked_pool_that_memory_does_not_hold_is_an_error():
    with pytest.raises(
        ConfigError, match=r"max_total_tokens is 10000000, which takes 214\.\d GiB, but memory holds"
    ):
        resolve(config(max_total_tokens=10_000_000), SPEC, HOST)


def test_an_asked_pool_bounds_an_auto_length_only():
    resolved = resolve(config(max_total_tokens=65, page_size=4), SPEC, HOST)
    assert resolved.config.cache.max_total_tokens == 64
    assert resolved.config.model.max_model_len == 64
    assert resolved.notes["max_total_tokens"] == "65 in whole pages of 4"
    both = resolve(config(max_total_tokens=64, max_model_len=1000), SPEC, HOST).config
    assert (both.cache.max_total_tokens, both.model.max_model_len) == (64, 1000)


def test_a_pool_below_one_page_is_an_error():
    with pytest.raises(ConfigError, match="less than one page of 16 tokens"):
        resolve(config(max_total_tokens=15), SPEC, HOST)


def test_more_context_than_the_model_knows_is_an_error():
    with pytest.raises(ConfigError, match="max_model_len is 8193, but the model knows positions up to 8192"):
        resolve(config(max_model_len=8193), SPEC, HOST)


@pytest.mark.parametrize(("asked", "chunk"), [(100, 96), (5, 16), (-1, -1), (512, 512), ("auto", 512)])
def test_chunks_are_whole_pages(asked, chunk):
    assert (
        resolve(config(chunked_prefill_size=asked), SPEC, HOST).config.scheduler.chunked_prefill_size == chunk
    )


def test_a_gpu_is_taken_where_torch_can_use_it():
    resolved = resolve(EngineConfig(), SPEC, GPU_HOST)
    assert (resolved.config.model.device, resolved.config.cache.mem_fraction) == ("cuda", 0.88)
    assert resolved.config.scheduler.chunked_prefill_size == 8192
    assert resolved.config.scheduler.max_running_requests == 256
    assert "H100" in resolved.notes["device"]
    without = resolve(EngineConfig(), SPEC, dataclasses.replace(GPU_HOST, torch_version="2.9.0+cpu"))
    assert without.config.model.device == "cpu"
    assert "no CUDA" in without.notes["device"]


def test_cuda_without_gpu_or_build_is_an_error():
    with pytest.raises(ConfigError, match="no NVIDIA driver or GPU is visible"):
        resolve(config(device="cuda"), SPEC, HOST)
    with pytest.raises(ConfigError, match="not a CUDA build"):
        resolve(config(device="cuda"), SPEC, dataclasses.replace(GPU_HOST, torch_version="2.9.0+cpu"))
