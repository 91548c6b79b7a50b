"""The arithmetic behind "auto", on described machines."""

from __future__ import annotations

import dataclasses
import math
import re

import msgspec
import pytest

from engine.launch.resolve.host_facts import HostFacts
from engine.launch.resolve.kernel_checks import ARM_KERNEL_FLAGS, KERNEL_FLAGS
from engine.launch.resolve.memory_budget import MOST_OF_LEFT, RUNTIME_BYTES, capacity_of, plan_memory
from engine.launch.resolve.nvidia_gpus import GpuFacts
from engine.launch.resolve.resolve import resolve
from engine.model_runner.kernels.cpu.compiler import usable_isas
from engine.models.spec.encoder_spec import PoolingSpec
from engine.models.spec.experts_spec import ExpertsSpec, Routing
from engine.models.spec.model_spec import ModelSpec, with_quantization
from engine.models.spec.quantization import QuantizationSpec
from engine.models.spec.sizes import MIB
from engine.models.weight_files.weight_memory import num_parameters
from engine.runtime.config.config_sources import from_arguments, merge
from engine.runtime.config.engine_config import EngineConfig, SchedulerConfig
from engine.runtime.errors import ConfigError

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
MIXTURE = msgspec.structs.replace(
    SPEC,
    model_type="qwen3_moe",
    experts=ExpertsSpec(num_experts=8, intermediate_size=64, routing=Routing(num_active=2, normalize=True)),
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


def length_of(config: EngineConfig) -> int:
    assert isinstance(config.model.max_model_len, int)
    return config.model.max_model_len


def host(**facts) -> HostFacts:
    return dataclasses.replace(HOST, **facts)


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({}, 50.0),
        ({"target_step_ms": 0.0}, 0.0),
        ({"target_step_ms": 80.0}, 80.0),
        ({"chunked_prefill_size": -1}, 0.0),
        ({"phases": "prefill-first"}, 0.0),  # no step has both
    ],
)
def test_steps_have_a_target_on_the_cpu_where_prompts_may_be_cut(asked, expected):
    resolved = resolve(EngineConfig(scheduler=SchedulerConfig(**asked)), SPEC, HOST)
    assert resolved.config.scheduler.target_step_ms == expected
    assert ("target_step_ms" in resolved.notes) == (not asked)


def test_a_target_that_no_step_could_have_is_refused():
    asked = SchedulerConfig(target_step_ms=50.0, phases="prefill-first")
    with pytest.raises(ConfigError, match="target_step_ms is 50, but with phases prefill-first"):
        resolve(EngineConfig(scheduler=asked), SPEC, HOST)


def test_kv_events_without_a_prefix_cache_are_refused():
    settings = config(kv_events="tcp://*:5557", radix_cache=False)
    with pytest.raises(
        ConfigError, match="without the prefix cache there is nothing to publish; omit --no-radix"
    ):
        resolve(settings, SPEC, HOST)


def test_a_gpu_has_no_target_for_its_steps_unless_asked():
    resolved = resolve(EngineConfig(), SPEC, GPU_HOST)
    assert resolved.config.scheduler.target_step_ms == 0.0 and "target_step_ms" not in resolved.notes


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({}, 40.0),
        ({"multi_step_ms": 0.0}, 0.0),
        ({"multi_step_ms": 15.0}, 15.0),
        ({"overlap": True}, 0.0),
    ],
)
def test_decodes_come_in_bursts_on_the_cpu(asked, expected):
    resolved = resolve(EngineConfig(scheduler=SchedulerConfig(**asked)), SPEC, HOST)
    assert resolved.config.scheduler.multi_step_ms == expected
    assert ("multi_step_ms" in resolved.notes) == (not asked)


@pytest.mark.parametrize(
    ("settings", "machine", "reason"),
    [
        ({"overlap": True}, HOST, "but overlap is on"),
        ({}, GPU_HOST, "but on cuda the host plans the next step"),
        ({"tp": 3}, HOST, "but tp is 3, and the other ranks"),
        (
            {"phases": "prefill-first", "prefill_decode_interval": 4},
            HOST,
            "but prefill_decode_interval counts decode steps",
        ),
    ],
)
def test_bursts_that_could_not_be_made_are_refused(settings, machine, reason):
    asked = config(multi_step_ms=20.0, **settings)
    with pytest.raises(ConfigError, match=f"multi_step_ms is 20, {reason}.*omit --multi-step-ms"):
        resolve(asked, SPEC, machine)
    elsewhere = config(**settings)
    assert resolve(elsewhere, SPEC, machine).config.scheduler.multi_step_ms == 0.0


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
        "task",
        "device",
        "dtype",
        "num_threads",
        "swap_space",
        "max_model_len",
        "mem_fraction",
        "max_total_tokens",
        "max_running_requests",
        "chunked_prefill_size",
        "target_step_ms",
        "multi_step_ms",
        "overlap",
        "model_impl",
        "record_steps",
    }
    assert all(note and "\n" not in note for note in resolved.notes.values())


def test_the_task_is_that_of_the_model_s_files():
    pooling = PoolingSpec(task="embed", pooling="mean", size=8, reason="it has modules.json")
    embedder = msgspec.structs.replace(SPEC, pooling=pooling)

    resolved = resolve(config(matryoshka=True), embedder, HOST)

    assert (resolved.config.model.task, resolved.notes["task"]) == ("embed", "it has modules.json")
    assert resolve(resolved.config, embedder, HOST).config == resolved.config
    assert resolve(EngineConfig(), SPEC, HOST).config.model.task == "generate"
    with pytest.raises(ConfigError, match="matryoshka is true, but the task is generate"):
        resolve(config(matryoshka=True), SPEC, HOST)


GGUF = QuantizationSpec(
    method="gguf",
    types={f"model.layers.{n}.mlp.{part}_proj": "Q4_1" for n in range(30) for part in ("gate", "up", "down")}
    | {"model.embed_tokens": "Q8_0"},
)
BLOCK_HOST = dataclasses.replace(HOST, cpu_flags=HOST.cpu_flags | KERNEL_FLAGS)
WITHOUT_COMPILER = dataclasses.replace(BLOCK_HOST, has_cpu_kernels=False)


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text"])
def test_a_gguf_file_keeps_its_weights_on_a_cpu_that_multiplies_with_them(model_type):
    plain = msgspec.structs.replace(SPEC, model_type=model_type)
    spec = msgspec.structs.replace(plain, quantization=GGUF)

    kept = resolve(EngineConfig(), spec, BLOCK_HOST)
    dequantized = resolve(config(quantization="none"), spec, BLOCK_HOST)

    assert kept.config.model.quantization == "gguf" and "quantization" in kept.notes
    assert dequantized.config.model.quantization == "none" and "quantization" not in dequantized.notes
    assert resolve(kept.config, spec, BLOCK_HOST).config == kept.config
    mlp, head = 30 * 3 * 576 * 1536, 49152 * 576
    saved = mlp * (2 - 20 / 32) + head * (2 + 2 - 34 / 32)  # the embedding has no table of its own
    budgets = [
        plan_memory(
            model,
            usable_bytes=16 * GIB,
            dtype="bfloat16",
            fraction=0.4,
            step_tokens=512,
            max_model_len=8192,
            max_running_requests=64,
            on_cpu=True,
        )
        for model in (spec, plain)
    ]
    assert budgets[1].weights_bytes - budgets[0].weights_bytes == saved
    assert pool_of(kept.config) == budgets[0].tokens // 16 * 16
    assert pool_of(dequantized.config) == budgets[1].tokens // 16 * 16


@pytest.mark.parametrize(
    ("settings", "machine", "reason"),
    [
        ({"device": "cuda"}, GPU_HOST, "by the CPU only, not by cuda"),
        ({"dtype": "float32"}, BLOCK_HOST, "with bfloat16 only, not with float32"),
        ({}, HOST, "with AVX2 and FMA, which this CPU lacks"),
        ({}, WITHOUT_COMPILER, "by the engine's own kernels, for which there is no compiler"),
        ({"model_impl": "transformers"}, BLOCK_HOST, "transformers computes with plain weights only"),
        ({"load_format": "dummy"}, BLOCK_HOST, "random weights have no blocks from a file"),
    ],
)
def test_where_blocks_cannot_be_multiplied_a_file_is_dequantized_and_a_wish_refused(
    settings, machine, reason
):
    spec = msgspec.structs.replace(SPEC, quantization=GGUF)

    resolved = resolve(config(**settings), spec, machine)

    assert resolved.config.model.quantization == "none"
    assert reason in resolved.notes["quantization"]
    for wish in ("gguf", "int8", "int4"):
        if wish != "gguf" and "load_format" in settings:
            continue  # random weights are rounded like others
        with pytest.raises(
            ConfigError, match=f"quantization is {wish}, but .*{re.escape(reason)}; (use|install) "
        ):
            resolve(config(**settings, quantization=wish), with_quantization(spec, wish), machine)


def test_the_flags_for_blocks_are_those_of_the_kernels():
    assert usable_isas(KERNEL_FLAGS)[0] == "avx2"
    assert usable_isas(ARM_KERNEL_FLAGS)[0] == "neon"
    assert all(usable_isas(KERNEL_FLAGS - {flag})[0] == "portable" for flag in KERNEL_FLAGS)


def test_made_weights_are_counted_in_the_form_they_get():
    made = resolve(config(quantization="int4"), with_quantization(SPEC, "int4"), BLOCK_HOST).config
    plain = resolve(EngineConfig(), SPEC, BLOCK_HOST).config

    assert made.model.quantization == "int4" and plain.model.quantization is None
    assert pool_of(made) > pool_of(plain)


def test_the_pool_is_what_the_sums_say():
    resolved = resolve(config(page_size=16), SPEC, HOST).config
    budget = plan_memory(
        SPEC,
        usable_bytes=16 * GIB,
        dtype="bfloat16",
        fraction=0.4,
        step_tokens=512,
        max_model_len=8192,
        max_running_requests=64,
        on_cpu=True,
    )
    head = SPEC.vocab_size * SPEC.hidden_size
    by_hand = (
        (16 * GIB - 2 * (num_parameters(SPEC) + head) - budget.workspace_bytes)
        * 0.4
        / (2 * 30 * 3 * 64 * 2 + 2 * (2 * 3 * 64 * 2))
    )  # KV of 30 layers, and two copies of one
    assert budget.workspace_bytes > RUNTIME_BYTES
    assert resolved.cache.max_total_tokens == int(by_hand) // 16 * 16


@pytest.mark.parametrize(
    ("settings", "facts", "step_tokens", "running"),
    [
        pytest.param({}, {}, 512, 64, id="full of prompts, with or without decodes"),
        pytest.param({"max_running_requests": 600}, {}, 600 + 16, 600, id="decodes leave a page for prompts"),
        pytest.param({}, {"num_cpus": 32, "num_cores": 16}, 512, 256, id="many cores run many requests"),
        pytest.param({"max_model_len": 256}, {}, 512, 64, id="several prompts share a step"),
        pytest.param(
            {"max_model_len": 64, "max_running_requests": 2}, {}, 2 * 64, 2, id="no more than all prompts"
        ),
        pytest.param({"max_prefill_tokens": 100}, {}, 100, 64, id="the smaller limit holds"),
        pytest.param(
            {"max_prefill_tokens": 4, "chunked_prefill_size": 16}, {}, 64 + 16, 64, id="but a page at least"
        ),
        pytest.param(
            {"chunked_prefill_size": -1, "max_prefill_tokens": 1000},
            {},
            8192 + 64,
            64,
            id="a prompt that is never cut beside decodes",
        ),
        pytest.param(
            {"chunked_prefill_size": -1, "max_prefill_tokens": 9000}, {}, 9000, 64, id="uncut prompts"
        ),
        pytest.param({"phases": "prefill-first"}, {}, 512, 64, id="prompts share no step with decodes"),
        pytest.param(
            {"phases": "prefill-first", "max_running_requests": 600},
            {},
            600,
            600,
            id="more decodes than that",
        ),
        pytest.param(
            {"phases": "prefill-first", "chunked_prefill_size": -1, "max_prefill_tokens": 1000},
            {},
            8192,
            64,
            id="an uncut prompt alone",
        ),
        pytest.param({"max_num_batched_tokens": 200}, {}, 200, 64, id="a limit on all tokens"),
        pytest.param({"max_num_batched_tokens": 20}, {}, 64 + 16, 64, id="which leaves a page for prompts"),
        pytest.param({"max_num_batched_tokens": 9000}, {}, 512, 64, id="and is no aim"),
        pytest.param(
            {"max_num_batched_tokens": 200, "chunked_prefill_size": -1},
            {},
            8192 + 64,
            64,
            id="nor holds for uncut prompts",
        ),
        pytest.param({"phases": "decode-first"}, {}, 512, 64, id="chunks bound one budget, too"),
        pytest.param(
            {"phases": "decode-first", "max_num_batched_tokens": 2048}, {}, 2048, 64, id="one budget"
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
        on_cpu=True,
    )
    most = dataclasses.replace(budget, fraction=MOST_OF_LEFT).tokens

    with pytest.raises(ConfigError, match=f"memory holds {most} tokens:"):
        resolve(config(max_total_tokens=most + 16, **settings), SPEC, host(**facts))
    resolve(config(max_total_tokens=most, **settings), SPEC, host(**facts))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"preemption_mode": "swap"},
        {"preemption_mode": "swap", "mem_fraction": 1.0, "max_running_requests": 4096},
        {"preemption_mode": "recompute", "swap_space": 2.0},
        {"phases": "decode-first", "max_num_partial_prefills": 4},
        {"phases": "decode-first", "max_num_batched_tokens": 32, "chunked_prefill_size": -1},
        {"phases": "prefill-first", "max_num_batched_tokens": 100, "device": "cuda"},
    ],
)
def test_resolving_twice_changes_nothing(settings):
    once = resolve(config(**settings), SPEC, GPU_HOST if settings.get("device") else HOST).config
    again = resolve(once, SPEC, GPU_HOST if settings.get("device") else HOST)
    assert again.config == once
    assert again.notes == {}


@pytest.mark.parametrize(
    ("facts", "dtype", "word"),
    [
        ({"cpu_flags": frozenset({"amx_bf16", "avx512_bf16"})}, "bfloat16", "amx_bf16"),
        ({"cpu_flags": frozenset({"avx512f"})}, "float32", "no bfloat16"),
        ({"cpu_flags": frozenset({"asimd", "bf16"})}, "bfloat16", "bf16"),
        ({"cpu_flags": KERNEL_FLAGS}, "bfloat16", "in float32"),
        ({"cpu_flags": ARM_KERNEL_FLAGS | {"asimddp"}}, "bfloat16", "in float32"),
        ({"cpu_flags": ARM_KERNEL_FLAGS | {"bf16"}}, "bfloat16", "multiplies bfloat16 (bf16)"),
        ({"cpu_flags": KERNEL_FLAGS, "has_cpu_kernels": False}, "float32", "no bfloat16"),
    ],
)
def test_dtype_follows_the_instructions_of_the_cpu(facts, dtype, word):
    resolved = resolve(EngineConfig(), SPEC, host(**facts))
    assert resolved.config.model.dtype == dtype
    assert word in resolved.notes["dtype"]


@pytest.mark.parametrize(
    ("settings", "spec", "dtype"),
    [({}, SPEC, "bfloat16"), ({}, MIXTURE, "bfloat16"), ({"model_impl": "transformers"}, SPEC, "float32")],
)
def test_bfloat16_without_instructions_is_taken_only_where_our_kernels_multiply(settings, spec, dtype):
    resolved = resolve(config(**settings), spec, host(cpu_flags=KERNEL_FLAGS))
    assert resolved.config.model.dtype == dtype


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


def test_a_pool_of_8_bits_holds_nearly_twice_as_many_tokens():
    """Not quite: what attention gathers of a layer is in the model's dtype."""
    settings = {"page_size": 16, "max_model_len": 2048, "max_running_requests": 2000}
    plain, small = (config(**settings, kv_cache_dtype=dtype) for dtype in ("auto", "fp8"))
    machine = host(mem_available_bytes=4 * GIB)
    pools = [resolve(each, SPEC, machine).config for each in (plain, small)]

    assert pools[1].cache.kv_cache_dtype == "fp8"
    assert 1.8 < pool_of(pools[1]) / pool_of(pools[0]) < 2.0
    capacities = [capacity_of(each, SPEC) for each in pools]
    assert capacities[0].kv_token_bytes == 2 * capacities[1].kv_token_bytes


def test_an_int8_pool_counts_its_scales():
    capacity = capacity_of(resolve(config(kv_cache_dtype="int8"), SPEC, HOST).config, SPEC)
    assert capacity.kv_token_bytes == 2 * SPEC.num_layers * SPEC.num_kv_heads * (SPEC.head_dim + 4)


def test_an_int8_pool_is_for_the_cpu():
    with pytest.raises(
        ConfigError, match="only the CPU supports it, not cuda; use --kv-cache-dtype fp8 or auto"
    ):
        resolve(config(kv_cache_dtype="int8", device="cuda"), SPEC, GPU_HOST)


@pytest.mark.parametrize(("asked", "is_estimate"), [("auto", True), (4096, False)])
def test_a_pool_that_nobody_asked_for_is_known_as_an_estimate(asked, is_estimate):
    first = resolve(config(max_total_tokens=asked), SPEC, HOST).config
    again = resolve(first, SPEC, HOST).config
    assert first.cache.pool_is_estimate == again.cache.pool_is_estimate == is_estimate


@pytest.mark.parametrize(("asked", "is_estimate"), [("auto", True), (512, False)])
def test_a_context_that_nobody_asked_for_is_known_as_an_estimate(asked, is_estimate):
    first = resolve(config(max_model_len=asked), SPEC, HOST).config
    again = resolve(first, SPEC, HOST).config
    assert first.model.len_is_estimate == again.model.len_is_estimate == is_estimate


def test_the_pool_is_no_larger_than_what_may_run_at_once():
    resolved = resolve(config(max_running_requests=1, max_model_len=100), SPEC, HOST)
    assert resolved.config.cache.max_total_tokens == 112  # one context of 100 in pages of 16
    assert "1 requests x 100 tokens" in resolved.notes["max_total_tokens"]


LLAMA_8B = ModelSpec(
    model_type="llama",
    vocab_size=128_256,
    hidden_size=4096,
    intermediate_size=14_336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    rms_norm_eps=1e-5,
    rope_theta=5e5,
    max_position_embeddings=131_072,
    tie_word_embeddings=False,
    torch_dtype="bfloat16",
)


class TestLongContexts:
    @pytest.mark.parametrize(("total_gib", "free_gib", "chunk"), [(80, 78, 8192), (141, 139, 16_384)])
    def test_of_128k_fit_on_a_large_gpu(self, total_gib, free_gib, chunk):
        """Counting the scores of whole chunks, 128 GiB and more, the engine refused to start."""
        gpu = GpuFacts("GPU", total_gib * GIB, free_gib * GIB, (9, 0))
        resolved = resolve(EngineConfig(), LLAMA_8B, dataclasses.replace(GPU_HOST, gpus=(gpu,))).config
        assert resolved.model.max_model_len == 131_072
        assert resolved.scheduler.chunked_prefill_size == chunk

        weights, kv = 2 * num_parameters(LLAMA_8B), pool_of(resolved) * 128 * 1024
        block = 256 * 32 * 131_072 * 4  # scores of one block of queries in float32, every head
        gathered = pool_of(resolved) * 4096  # one layer of everybody, all decoding
        activations = chunk * (3 * 14_336 + 6 * 4096) * 2
        assert weights + kv + block + gathered + activations < 0.95 * free_gib * GIB
        assert kv > 0.55 * (free_gib * GIB - weights)

    def test_that_memory_bounds_need_the_workspace_of_the_bounded_length_only(self):
        """24 GB: what the scores of 131,072 positions would take goes to the pool."""
        gpu = GpuFacts("NVIDIA GeForce RTX 4090", 24 * GIB, 23 * GIB, (8, 9))
        resolved = resolve(EngineConfig(), LLAMA_8B, dataclasses.replace(GPU_HOST, gpus=(gpu,)))
        length, pool = length_of(resolved.config), pool_of(resolved.config)
        assert 16_384 < length < 131_072
        assert pool - length < 32  # the longest that fits: the pool holds it and hardly more
        assert "bounded by memory" in resolved.notes["max_model_len"]
        longer = config(max_model_len=length + 64)
        with pytest.raises(ConfigError, match="lower --max-model-len"):
            resolve(longer, LLAMA_8B, dataclasses.replace(GPU_HOST, gpus=(gpu,)))
        again = resolve(resolved.config, LLAMA_8B, dataclasses.replace(GPU_HOST, gpus=(gpu,)))
        assert again.config == resolved.config

    def test_that_a_given_pool_bounds_need_that_workspace_only_too(self):
        gpu = GpuFacts("NVIDIA GeForce RTX 4090", 24 * GIB, 21 * GIB, (8, 9))
        facts = dataclasses.replace(GPU_HOST, gpus=(gpu,))
        resolved = resolve(config(max_total_tokens=16_384), LLAMA_8B, facts).config
        assert resolved.model.max_model_len == 16_384
        with pytest.raises(ConfigError, match="lower --max-total-tokens or --max-model-len"):
            resolve(config(max_total_tokens=16_384, max_model_len=131_072), LLAMA_8B, facts)

    @pytest.mark.parametrize(
        ("free_gib", "flag", "at_least"),
        [
            (1.25, "avx512_bf16", 2048),
            (2, "avx512_bf16", 8192),
            (16, "avx512_bf16", 8192),
            (2, "avx2", 4096),
            (4, "avx2", 8192),
        ],
    )
    def test_of_the_default_model_on_small_machines(self, free_gib, flag, at_least):
        facts = host(mem_available_bytes=int(free_gib * GIB), cpu_flags=frozenset({flag}))
        resolved = resolve(EngineConfig(), SPEC, facts).config
        assert at_least <= length_of(resolved) <= pool_of(resolved)


def test_a_pool_of_the_users_size_leaves_the_allocator_some_slack():
    budget = plan_memory(
        SPEC,
        usable_bytes=16 * GIB,
        dtype="bfloat16",
        fraction=1.0,
        step_tokens=512,
        max_model_len=8192,
        max_running_requests=64,
        on_cpu=True,
    )
    with pytest.raises(ConfigError, match=r"memory holds \d+ tokens: .* x 0\.95 / "):
        resolve(config(max_total_tokens=int(budget.tokens * 0.96)), SPEC, HOST)


def test_the_pages_on_their_way_to_the_host_are_in_the_sums():
    swaps = resolve(config(max_running_requests=4096), SPEC, GPU_HOST).config
    never = resolve(config(max_running_requests=4096, preemption_mode="recompute"), SPEC, GPU_HOST).config
    missing = (pool_of(never) - pool_of(swaps)) * (2 * 30 + 2 * 2) * 3 * 64 * 2
    assert missing == pytest.approx(0.88 * 64 * MIB, abs=MIB)


@pytest.mark.parametrize(
    ("name", "capability", "dtype"),
    [
        ("Tesla T4", (7, 5), "float32"),
        ("Tesla V100", (7, 0), "float32"),
        ("NVIDIA A100", (8, 0), "bfloat16"),
        ("unknown", None, "bfloat16"),
    ],
)
def test_dtype_follows_what_the_gpu_can_do(name, capability, dtype):
    gpu = GpuFacts(name, 16 * GIB, 15 * GIB, capability)
    resolved = resolve(EngineConfig(), SPEC, dataclasses.replace(GPU_HOST, gpus=(gpu,)))
    assert resolved.config.model.dtype == dtype
    assert ("has no bfloat16" in resolved.notes["dtype"]) == (dtype == "float32")


def test_a_gpus_pool_takes_nearly_all_that_was_measured_and_less_of_an_estimate():
    """The step is subtracted already; 12 % of the rest were 7 GB of an H100 with a model of 8B."""
    auto = resolve(EngineConfig(), LLAMA_8B, GPU_HOST)
    assert auto.config.cache.mem_fraction == 0.94
    assert " x 0.88 / " in auto.notes["max_total_tokens"]
    given = resolve(config(mem_fraction=0.9), LLAMA_8B, GPU_HOST)
    assert given.config.cache.mem_fraction == 0.9 and " x 0.9 / " in given.notes["max_total_tokens"]
    assert resolve(auto.config, LLAMA_8B, GPU_HOST).config == auto.config


def test_little_memory_shortens_the_context_and_says_so():
    resolved = resolve(EngineConfig(), SPEC, host(mem_available_bytes=int(1.25 * GIB)))
    length = pool_of(resolved.config)
    assert 256 <= length < 8192
    assert resolved.config.model.max_model_len == length
    assert resolved.notes["max_model_len"].startswith("bounded by memory, (1.2 GiB free - ")
    assert resolved.config.scheduler.max_running_requests == length // 256


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
        ConfigError, match=r"max_total_tokens is 10000000, which takes 228\.\d GiB, but memory holds"
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


@pytest.mark.parametrize(("machine", "by_itself"), [(HOST, False), (GPU_HOST, True)], ids=["cpu", "cuda"])
def test_steps_overlap_where_the_device_is_not_the_host(machine, by_itself):
    resolved = resolve(EngineConfig(), SPEC, machine)
    assert resolved.config.scheduler.overlap is by_itself
    assert "overlap" in resolved.notes
    for asked in (True, False):
        resolved = resolve(config(overlap=asked), SPEC, machine)
        assert resolved.config.scheduler.overlap is asked
        assert "overlap" not in resolved.notes
    for overlap, expected in (("auto", by_itself), (True, True), (False, False)):
        resolved = resolve(config(speculative="ngram", overlap=overlap), SPEC, machine)
        assert resolved.config.scheduler.overlap is expected
        assert resolve(resolved.config, SPEC, machine).config == resolved.config


def test_drafts_come_from_texts_where_nothing_speaks_against_them():
    resolved = resolve(config(speculative="auto"), SPEC, HOST)
    assert resolved.config.scheduler.speculative == "suffix" and "speculative" in resolved.notes
    resolved = resolve(config(speculative="auto", pp=2), SPEC, HOST)
    assert resolved.config.scheduler.speculative == "off" and "pp is 2" in resolved.notes["speculative"]


def test_a_gpu_is_taken_where_torch_can_use_it():
    resolved = resolve(EngineConfig(), SPEC, GPU_HOST)
    assert (resolved.config.model.device, resolved.config.cache.mem_fraction) == ("cuda", 0.94)
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


def pool_bytes_of(config: EngineConfig) -> int:
    return pool_of(config) * 2 * 30 * 3 * 64 * 2


class TestHostSize:
    def test_is_refused_on_the_cpu_whose_pool_is_host_memory(self):
        with pytest.raises(ConfigError) as caught:
            resolve(config(kv_host_size=4.0), SPEC, HOST)
        assert str(caught.value) == (
            "kv_host_size is 4 GiB, but on a CPU it must be 0: the KV pool is in host memory itself; leave "
            "--kv-host-size out, and give the pool more with --max-total-tokens, or keep KV on disk with --kv-disk DIR"
        )
        assert resolve(config(kv_host_size=0.0), SPEC, HOST).config.cache.kv_host_size == 0.0

    def test_beside_a_gpu_adds_pages_to_the_swap_space(self):
        without = resolve(config(swap_space=1.0), SPEC, GPU_HOST).config
        both = resolve(config(swap_space=1.0, kv_host_size=2.0), SPEC, GPU_HOST).config
        alone = resolve(
            config(preemption_mode="recompute", kv_host_size=2.0), SPEC, GPU_HOST
        ).config  # swaps nothing
        pages = [capacity_of(each, SPEC).num_host_pages for each in (without, both, alone)]
        assert pages == [int(gib * GIB) // (16 * 23040) for gib in (1, 3, 2)]
        assert both.cache.max_total_tokens == without.cache.max_total_tokens

    def test_leaves_less_to_swap_space(self):
        some = resolve(
            config(kv_host_size=4.0), SPEC, dataclasses.replace(GPU_HOST, mem_available_bytes=8 * GIB)
        )
        assert some.config.cache.swap_space == (8 - 0.5 - 4) / 4
        sums = "(8.0 GiB free on the host - 512 MiB runtime - 4.0 GiB --kv-host-size)"
        assert some.notes["swap_space"] == f"a quarter of {sums}"

    @pytest.mark.parametrize(
        ("size", "words"),
        [
            (
                20.0,
                r"kv_host_size is 20 GiB, but \(16\.0 GiB free on the host - 512 MiB runtime\) leaves 15\.5 GiB; lower "
                "--kv-host-size",
            ),
            (
                0.0003,
                r"kv_host_size is 0\.0003 GiB, less than one page of 360\.0 KiB; raise --kv-host-size, or",
            ),
            (-1.0, "kv_host_size is -1.0, but it must be 0 or more GiB"),
            (math.inf, "kv_host_size is inf, but it must be 0 or more GiB"),
        ],
    )
    def test_that_cannot_be_is_an_error(self, size, words):
        with pytest.raises(ConfigError, match=words):
            resolve(config(kv_host_size=size), SPEC, GPU_HOST)

    def test_needs_the_prefix_cache(self):
        with pytest.raises(
            ConfigError, match=r"kv_host_size is 1 without the prefix cache, .* or --kv-host-size"
        ):
            config(kv_host_size=1.0, radix_cache=False)


class TestSwapSpace:
    def test_is_nothing_where_lost_kv_is_computed_again(self):
        for settings in ({}, {"swap_space": 4.0}):
            resolved = resolve(config(preemption_mode="recompute", **settings), SPEC, GPU_HOST)
            assert resolved.config.cache.swap_space == 0.0
            assert resolved.notes["swap_space"] == "lost KV is recomputed"

    def test_on_the_cpu_is_kept_only_for_those_who_ask(self):
        by_default = resolve(EngineConfig(), SPEC, HOST)
        assert by_default.config.cache.swap_space == 0.0
        assert by_default.notes["swap_space"] == "the KV pool is in host memory already"
        assert resolve(config(swap_space=0.0), SPEC, HOST).config.cache.swap_space == 0.0

    @pytest.mark.parametrize("fraction", [0.1, 0.4, 1.0])
    @pytest.mark.parametrize("settings", [{}, {"max_running_requests": 2}, {"max_total_tokens": 6000}])
    def test_on_the_cpu_is_a_quarter_of_the_kv_pool_in_whole_pages(self, fraction, settings):
        asked = config(preemption_mode="swap", mem_fraction=fraction, **settings)
        resolved = resolve(asked, SPEC, host(mem_available_bytes=4 * GIB))
        capacity = capacity_of(resolved.config, SPEC)
        assert capacity.num_host_pages == capacity.num_pages // 4 > 0
        assert (
            resolved.config.cache.swap_space * GIB == capacity.num_host_pages * 16 * capacity.kv_token_bytes
        )
        assert resolved.notes["swap_space"].startswith("a quarter of the KV pool, ")

    def test_on_the_cpu_comes_out_of_the_pools_memory(self):
        """Both together stay within what is free beside the model."""
        tight = host(mem_available_bytes=3 * GIB)
        settings = {"mem_fraction": 1.0, "max_running_requests": 256}
        without = resolve(config(**settings), SPEC, tight)
        auto = resolve(config(preemption_mode="swap", **settings), SPEC, tight)
        asked = resolve(config(swap_space=0.125, **settings), SPEC, tight)

        # A layer's copies come to 2 / 30 of the pool; a quarter of it and 64 MiB on their way are for swapping.
        taken = pool_bytes_of(without.config) - pool_bytes_of(auto.config)
        assert isinstance(auto.config.cache.swap_space, float)
        swapped = auto.config.cache.swap_space * GIB + 64 * MIB
        assert taken * 32 / 30 == pytest.approx(swapped, abs=MIB)
        taken = pool_bytes_of(without.config) - pool_bytes_of(asked.config)
        assert taken * 32 / 30 == pytest.approx((128 + 64) * MIB, abs=MIB)
        assert "workspace - 128 MiB swap space) x 1 /" in asked.notes["max_total_tokens"]
        assert "swap_space" not in asked.notes

    def test_of_a_tiny_pool_is_a_page(self):
        resolved = resolve(config(preemption_mode="swap", max_total_tokens=32), SPEC, HOST)
        assert capacity_of(resolved.config, SPEC).num_host_pages == 1

    def test_beside_a_gpu_is_the_usual_or_a_quarter_of_the_free_memory(self):
        usual = resolve(EngineConfig(), SPEC, dataclasses.replace(GPU_HOST, mem_available_bytes=64 * GIB))
        assert usual.config.cache.swap_space == 4.0
        assert "a few preempted requests" in usual.notes["swap_space"]
        some = resolve(EngineConfig(), SPEC, dataclasses.replace(GPU_HOST, mem_available_bytes=8 * GIB))
        assert some.config.cache.swap_space == (8 - 0.5) / 4
        assert some.notes["swap_space"] == "a quarter of (8.0 GiB free on the host - 512 MiB runtime)"
        limited = dataclasses.replace(GPU_HOST, mem_available_bytes=64 * GIB, cgroup_free_bytes=8 * GIB)
        assert resolve(EngineConfig(), SPEC, limited).config.cache.swap_space == (8 - 0.5) / 4
        assert usual.config.cache.max_total_tokens == some.config.cache.max_total_tokens

    def test_beside_a_gpu_without_host_memory_is_nothing_or_an_error(self):
        full = dataclasses.replace(GPU_HOST, mem_available_bytes=GIB // 2)
        resolved = resolve(EngineConfig(), SPEC, full)
        assert resolved.config.cache.swap_space == 0.0
        assert "holds no page" in resolved.notes["swap_space"]
        with pytest.raises(ConfigError, match=r"preemption_mode is swap, but .* holds no page of 360\.0 KiB"):
            resolve(config(preemption_mode="swap"), SPEC, full)

    @pytest.mark.parametrize("facts", [HOST, GPU_HOST])
    def test_that_does_not_fit_is_an_error_with_the_sums(self, facts):
        with pytest.raises(ConfigError) as caught:
            resolve(config(swap_space=20.0), SPEC, facts)
        if facts.gpus:
            sums = r"\(16\.0 GiB free on the host - 512 MiB runtime\) leaves 15\.5 GiB"
        else:
            sums = r"\(16\.0 GiB free - .* weights - .* workspace\) leaves 15\.1 GiB, which it shares with the KV pool"
        assert re.fullmatch(f"swap_space is 20 GiB, but {sums}; lower --swap-space", str(caught.value))
        assert resolve(config(swap_space=10.0), SPEC, facts).config.cache.swap_space == 10.0

    def test_that_leaves_too_little_for_the_pool_is_named_as_a_way_out(self):
        budget = plan_memory(
            SPEC,
            usable_bytes=2 * GIB,
            dtype="bfloat16",
            fraction=0.4,
            step_tokens=512,
            max_model_len=256,
            max_running_requests=64,
            on_cpu=True,
        )
        all_but_a_mib = (budget.left_bytes - 65 * MIB) / GIB  # 64 are for pages on their way
        with pytest.raises(ConfigError, match=r"of 16 tokens only: .* swap space\) .*\(or --swap-space\)"):
            resolve(config(swap_space=all_but_a_mib), SPEC, host(mem_available_bytes=2 * GIB))

    def test_below_one_page_is_an_error(self):
        with pytest.raises(ConfigError, match=r"less than one page of 360\.0 KiB \(16 tokens x 22\.5 KiB\)"):
            resolve(config(swap_space=0.0003), SPEC, HOST)

    @pytest.mark.parametrize("facts", [HOST, GPU_HOST])
    def test_of_nothing_cannot_be_swapped_to(self, facts):
        with pytest.raises(
            ConfigError, match="preemption_mode is swap, but swap_space is 0, so there is no memory"
        ):
            resolve(config(swap_space=0.0, preemption_mode="swap"), SPEC, facts)


class TestStepBudget:
    def test_is_left_open_where_only_prompts_are_bounded(self):
        for phases in ("mixed", "prefill-first"):
            assert resolve(config(phases=phases), SPEC, HOST).config.scheduler.max_num_batched_tokens is None

    @pytest.mark.parametrize(("chunk", "prompts"), [("auto", 512), (100, 96), (-1, 3000), (8192, 3000)])
    def test_with_decodes_first_is_a_full_step_of_prompts(self, chunk, prompts):
        """One budget, which decodes take of: with them on top it would never bind."""
        settings = {"phases": "decode-first", "chunked_prefill_size": chunk, "max_prefill_tokens": 3000}
        resolved = resolve(config(**settings), SPEC, HOST)
        assert resolved.config.scheduler.max_num_batched_tokens == prompts
        assert resolved.notes["max_num_batched_tokens"].startswith("one budget: ")

    @pytest.mark.parametrize(("chunk", "budget"), [(80, 80), (64, 64 + 64), (16, 16 + 64)])
    def test_with_decodes_first_leaves_prompts_a_page_beside_all_decodes(self, chunk, budget):
        resolved = resolve(config(phases="decode-first", chunked_prefill_size=chunk), SPEC, HOST)
        assert resolved.config.scheduler.max_num_batched_tokens == budget

    def test_that_is_asked_for_sizes_chunks_and_running_requests(self):
        resolved = resolve(config(phases="decode-first", max_num_batched_tokens=40), SPEC, HOST)
        scheduler = resolved.config.scheduler
        assert (scheduler.chunked_prefill_size, scheduler.max_running_requests) == (32, 40)
        assert "--max-num-batched-tokens 40" in resolved.notes["max_running_requests"]
        assert resolved.notes["chunked_prefill_size"].startswith("40 in whole pages of 16; one budget")

    def test_below_the_running_requests_is_an_error_where_all_must_fit(self):
        settings = {"max_num_batched_tokens": 63, "max_running_requests": 64}
        with pytest.raises(
            ConfigError, match="63, but with phases decode-first .* each of 64 running requests"
        ):
            resolve(config(phases="decode-first", **settings), SPEC, HOST)
        assert resolve(config(**settings), SPEC, HOST).config.scheduler.max_num_batched_tokens == 63

    def test_below_a_page_is_an_error(self):
        with pytest.raises(
            ConfigError, match="max_num_batched_tokens is 15, less than one page of 16 tokens"
        ):
            resolve(config(max_num_batched_tokens=15), SPEC, HOST)
        resolve(config(max_num_batched_tokens=16), SPEC, HOST)


@pytest.mark.parametrize(
    ("settings", "threshold"),
    [
        ({}, 0),
        ({"long_prefill_token_threshold": 7}, 7),
        ({"max_num_partial_prefills": 4}, 327),
        ({"max_num_partial_prefills": 4, "max_model_len": 20}, 1),
        ({"max_num_partial_prefills": 4, "long_prefill_token_threshold": 7}, 7),
    ],
)
def test_what_counts_as_long_follows_the_context_where_several_prompts_may_be_cut(settings, threshold):
    resolved = resolve(config(**settings), SPEC, HOST)
    assert resolved.config.scheduler.long_prefill_token_threshold == threshold
    note = resolved.notes.get("long_prefill_token_threshold", "")
    assert ("4 % of the context" in note) == (threshold in (327, 1))


def test_who_computes_follows_the_architecture():
    unknown = msgspec.structs.replace(SPEC, model_type="gpt_neox")
    ours, theirs = resolve(EngineConfig(), SPEC, HOST), resolve(EngineConfig(), unknown, HOST)

    assert (ours.config.model.model_impl, theirs.config.model.model_impl) == ("engine", "transformers")
    assert theirs.notes["model_impl"] == "the engine has no model for gpt_neox of its own"
    assert resolve(config(model_impl="transformers"), SPEC, HOST).config.model.model_impl == "transformers"
    with pytest.raises(
        ConfigError, match="no model for gpt_neox, only for .*, llama, .*; use --model-impl transformers"
    ):
        resolve(config(model_impl="engine"), unknown, HOST)


def test_what_transformers_cannot_do_is_refused_or_off():
    unknown = msgspec.structs.replace(SPEC, model_type="gpt_neox")
    resolved = resolve(EngineConfig(), unknown, GPU_HOST)

    assert resolved.config.kernels.record_steps is False
    assert "may wait for the device" in resolved.notes["record_steps"]
    assert resolve(EngineConfig(), SPEC, GPU_HOST).config.kernels.record_steps is True
    with pytest.raises(ConfigError, match="record_steps is on, but gpt_neox is computed by transformers"):
        resolve(config(record_steps=True), unknown, GPU_HOST)
    with pytest.raises(ConfigError, match="tp is 2, but gpt_neox is computed by transformers.*; use --tp 1$"):
        resolve(config(tp=2), unknown, HOST)
    with pytest.raises(ConfigError, match="use --tp 1 or --model-impl engine$"):
        resolve(config(tp=2, model_impl="transformers"), SPEC, HOST)


class TestRanks:
    EIGHT_HEADS = msgspec.structs.replace(SPEC, num_heads=8, num_kv_heads=4)

    def test_share_the_cores_and_the_memory_of_their_machine(self):
        alone = resolve(config(max_model_len=256), self.EIGHT_HEADS, HOST).config
        shared = resolve(config(max_model_len=256, tp=2), self.EIGHT_HEADS, HOST)

        assert shared.config.model.num_threads == 2
        assert shared.notes["num_threads"].endswith("shared by 2 ranks")
        # Half the memory, half of each token, and a little less than half of everything else.
        assert 0.85 * pool_of(alone) < pool_of(shared.config) <= pool_of(alone)

    def test_of_gpus_have_each_their_own_memory(self):
        two_gpus = dataclasses.replace(GPU_HOST, gpus=(GPU, GPU))
        settings = {"max_model_len": 8192, "max_running_requests": 2000}
        alone = resolve(config(**settings), self.EIGHT_HEADS, GPU_HOST).config
        shared = resolve(config(tp=2, **settings), self.EIGHT_HEADS, two_gpus).config

        assert pool_of(shared) > 1.5 * pool_of(alone)

    def test_need_a_gpu_each(self):
        with pytest.raises(
            ConfigError, match="tp is 2, so 2 GPUs are needed on each machine, but this one has 1"
        ):
            resolve(config(tp=2), self.EIGHT_HEADS, GPU_HOST)

    def test_of_replicas_share_the_machine_too(self):
        settings = {"max_model_len": 8192, "max_running_requests": 2000}
        alone = resolve(config(**settings), self.EIGHT_HEADS, HOST).config
        shared = resolve(config(dp=2, **settings), self.EIGHT_HEADS, HOST)
        assert shared.config.model.num_threads == 2
        assert shared.notes["num_threads"].endswith("shared by 2 replicas")
        assert 0.3 * pool_of(alone) < pool_of(shared.config) < 0.5 * pool_of(alone)

        four_gpus = dataclasses.replace(GPU_HOST, gpus=(GPU,) * 4)
        assert resolve(config(tp=2, dp=2), self.EIGHT_HEADS, four_gpus).config.parallel.dp == 2
        with pytest.raises(
            ConfigError, match="dp is 3 and tp is 2, so 6 GPUs are needed, but this machine has 4"
        ):
            resolve(config(tp=2, dp=3), self.EIGHT_HEADS, four_gpus)
        with pytest.raises(
            ConfigError, match="disaggregation_mode is both and tp is 4, so 8 GPUs are needed"
        ):
            resolve(config(tp=4, dp=2, disaggregation_mode="both"), self.EIGHT_HEADS, four_gpus)

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"dp": 0}, "dp is 0, but it must be at least 1"),
            ({"dp": 65}, "dp is 65, but one server has at most 64 replicas"),
            (
                {"dp": 2, "tp": 2, "executor": "ray"},
                "dp is 2 with executor ray, but the replicas of a server",
            ),
            (
                {"dp": 2, "tp": 2, "nnodes": 2, "dist_init_addr": "10.0.0.1:5000"},
                "dp is 2 with nnodes 2, but the replicas of a server are on one machine; start a server for each",
            ),
        ],
    )
    def test_of_replicas_are_on_one_machine(self, settings, message):
        with pytest.raises(ConfigError, match=message):
            config(**settings)

    def test_that_ray_places_may_all_land_here_and_need_one_gpu_here(self):
        alone = resolve(config(max_model_len=256, tp=2), self.EIGHT_HEADS, HOST).config
        on_ray = resolve(config(max_model_len=256, tp=2, executor="ray"), self.EIGHT_HEADS, HOST).config
        assert on_ray.model.num_threads == alone.model.num_threads == 2
        assert pool_of(on_ray) == pool_of(alone)

        assert resolve(config(tp=2, executor="ray"), self.EIGHT_HEADS, GPU_HOST).config.parallel.tp == 2

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"tp": 1}, "executor is ray, but tp is 1, .*; raise --tp, or use --executor local$"),
            ({"tp": 2, "nnodes": 2, "dist_init_addr": "10.0.0.1:5000"}, "omit --nnodes, --node-rank"),
            ({"tp": 2, "cluster_key_file": "a.key"}, "makes their key itself; omit"),
        ],
    )
    def test_that_ray_shall_start_take_nothing_that_ray_decides(self, settings, message):
        with pytest.raises(ConfigError, match=message):
            resolve(config(executor="ray", **settings), self.EIGHT_HEADS, HOST)

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"tp": 2}, "one_shot_all_reduce_kib is 512, but the device is cpu, not cuda; leave it out"),
            ({"device": "cpu"}, "one_shot_all_reduce_kib is 512, but tp is 1, so there are no sums"),
            (
                {"tp": 2, "nnodes": 2, "dist_init_addr": "10.0.0.1:5000"},
                "with nnodes 2, but only GPUs of one machine share memory",
            ),
        ],
    )
    def test_that_share_no_memory_have_no_one_shot_sums(self, settings, message):
        with pytest.raises(ConfigError, match=message):
            resolve(config(one_shot_all_reduce_kib=512, **settings), self.EIGHT_HEADS, HOST)

    def test_that_cannot_share_the_heads_are_refused(self):
        with pytest.raises(ConfigError, match="9 attention heads cannot be divided by it; .* 1, 3$"):
            resolve(config(tp=2), SPEC, HOST)


class TestDeterministic:
    def test_is_bfloat16_wherever_it_runs(self):
        resolved = resolve(config(deterministic=True), SPEC, host(cpu_flags=frozenset({"avx512f"})))
        assert resolved.config.model.dtype == "bfloat16"
        assert "deterministic" in resolved.notes["dtype"]

    @pytest.mark.parametrize(
        ("settings", "spec", "word"),
        [
            ({"dtype": "float32"}, SPEC, "dtype is float32, .* use --dtype bfloat16"),
            ({"attention_backend": "torch_native"}, SPEC, "attention_backend is torch_native"),
            ({"avoid_kernels": ("fa3,native:sample",)}, SPEC, "avoid_kernels has native:sample, and only"),
            ({"tp": 3}, SPEC, "tp is 3, .* use --tp 1"),
            ({"model_impl": "transformers"}, SPEC, "computed by transformers"),
        ],
    )
    def test_what_cannot_be_is_refused(self, settings, spec, word):
        with pytest.raises(ConfigError, match=f"deterministic is on, but .*{word}.*omit --deterministic"):
            resolve(config(deterministic=True, **settings), spec, HOST)
        resolve(config(**settings), spec, HOST)

    def test_a_gpu_is_refused_and_all_reasons_are_named(self):
        with pytest.raises(ConfigError, match="device is cuda.* and dtype is float32"):
            resolve(config(deterministic=True, device="cuda", dtype="float32"), SPEC, GPU_HOST)
