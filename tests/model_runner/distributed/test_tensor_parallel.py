"""Several ranks against one, in one process: all architectures, heads held twice, odd vocabularies, experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, cast

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from msgspec.structs import replace

from engine.launch.resolve.rank_spec import check_tp, rank_spec, reason_against_tp
from engine.model_runner.assembly import LoadedModel
from engine.model_runner.distributed.join_group import Place
from engine.model_runner.distributed.tp_group import SINGLE_RANK, TPGroup
from engine.model_runner.kernels.cpu.library import reasons_against_library
from engine.model_runner.layers.spans import equal_span, kv_head_span, padded_span
from engine.model_runner.load import load_model_runner
from engine.model_runner.memory.kv_pool import KVPool
from engine.models.source import ModelSource
from engine.models.spec.model_spec import ModelSpec
from engine.models.weight_files.weight_memory import num_parameters
from engine.runtime.config.device_config import KernelConfig
from engine.runtime.config.engine_config import ModelConfig
from engine.runtime.errors import ConfigError
from engine.runtime.feasibility import Capacity
from engine.runtime.sampling_params import SamplingParams
from engine.runtime.step_plan import RowUpdate
from tests.model_runner.conftest import LATENT_MIXTURE, Driver, TinyModel, engine_config, int32
from tests.model_runner.distributed.thread_group import ThreadGroup, on_ranks
from tests.model_runner.structures.families import GEMMA3N, GEMMA4, SHARING

SEEDED = SamplingParams(
    temperature=0.9, top_p=0.95, seed=11, max_new_tokens=64, frequency_penalty=0.4, repetition_penalty=1.2
)
GREEDY = SamplingParams(temperature=0.0, seed=0, max_new_tokens=64)
PROMPTS = [[5, 17, 80, 3] * 6, [9, 1, 44], list(range(2, 40))]

MOE = {
    "head_dim": 8,
    "moe_intermediate_size": 24,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "norm_topk_prob": True,
}
STREAMS: dict[str, dict[str, Any]] = {
    "gemma4_text": {**GEMMA4, **SHARING},
    "gemma3n_text": {**GEMMA3N, "tie_word_embeddings": False},
}
ARCHITECTURES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "llama": ("llama", 2, {}),
    "llama tied": ("llama", 2, {"tie_word_embeddings": True}),
    "llama with all biases": ("llama", 2, {"attention_bias": True, "mlp_bias": True}),
    "mistral window": ("mistral", 2, {"sliding_window": 9}),
    "qwen2 biases of q, k and v": ("qwen2", 2, {}),
    "qwen3 norms of heads": ("qwen3", 2, {"head_dim": 8}),
    "qwen3_moe": ("qwen3_moe", 2, MOE),
    "qwen3_moe dense layers": ("qwen3_moe", 2, {**MOE, "num_hidden_layers": 4, "mlp_only_layers": [1]}),
    "gemma3 tied": (
        "gemma3_text",
        2,
        {"head_dim": 16, "num_hidden_layers": 6, "sliding_window": 16, "tie_word_embeddings": True},
    ),
    "phi3 fused matrices": ("phi3", 2, {}),
    "phi3 biases, KV heads held twice": (
        "phi3",
        4,
        {"num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 64},
    ),
    "groups of three": ("llama", 3, {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 72,
                                     "intermediate_size": 81}),
    "one KV head for all": ("llama", 3, {"num_key_value_heads": 1, "intermediate_size": 81}),
    "KV heads held twice": ("qwen2", 4, {"num_attention_heads": 8, "hidden_size": 64}),
    "gemma4, KV heads held twice": (
        "gemma4_text",
        4,
        {**STREAMS["gemma4_text"], "attention_k_eq_v": True, "num_global_key_value_heads": 1},
    ),
    "gemma3n, sparse gates": ("gemma3n_text", 2, STREAMS["gemma3n_text"]),
    "latent attention and shared experts": ("deepseek_v3", 2, LATENT_MIXTURE),
    "vocabulary that does not divide": ("llama", 2, {"vocab_size": 97}),
    "vocabulary that does not divide, tied": ("llama", 2, {"vocab_size": 101, "tie_word_embeddings": True}),
    "a rank without vocabulary": (
        "llama",
        6,
        {"vocab_size": 25, "intermediate_size": 84, "num_key_value_heads": 6},
    ),
}  # fmt: skip


def load_rank(
    tiny: Any,
    group: TPGroup | None,
    *,
    dtype: Literal["bfloat16", "float32"] = "float32",
    num_encoder_rows: int = 0,
) -> Any:
    vision = tiny.spec.vision
    capacity = Capacity(
        256,
        128,
        4,
        8,
        tiny.spec.vocab_size,
        num_encoder_rows=num_encoder_rows,
        images_are_whole=vision is not None and vision.sees_whole,
    )
    config = ModelConfig(dtype=dtype, device="cpu", num_threads=1, load_format="auto", model_impl="engine")
    source = ModelSource("hf", str(tiny.folder), "test")
    place = Place(group or SINGLE_RANK, None)
    return load_model_runner(engine_config(config), source, tiny.spec, capacity, place), capacity


def generate(
    tiny: TinyModel,
    params: SamplingParams,
    group: TPGroup | None = None,
    num: int = 8,
    *,
    dtype: Literal["bfloat16", "float32"] = "float32",
) -> tuple[list[list[int]], list[Any]]:
    """Tokens of all prompts in one batch, cut into chunks; and what the steps' results say of them."""
    runner, capacity = load_rank(tiny, group, dtype=dtype)
    driver = Driver(runner, capacity)
    limit = tiny.spec.vocab_size
    prompts = [[token % limit for token in prompt] for prompt in PROMPTS]
    return driver.generate(prompts, params, num=num, chunk=7), runner


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(("model_type", "size", "options"), ARCHITECTURES.values(), ids=ARCHITECTURES.keys())
def test_ranks_together_say_what_one_says(make_tiny_model, model_type, size, options):
    tiny = make_tiny_model(model_type, **options)
    check_tp(tiny.spec, size)

    for params in (GREEDY, SEEDED):
        expected, _ = generate(tiny, params)

        def tokens(group: ThreadGroup, params: SamplingParams = params) -> list[list[int]]:
            return generate(tiny, params, group)[0]

        assert on_ranks(size, tokens) == [expected] * size


def test_logits_differ_from_those_of_one_rank_by_rounding_only(make_tiny_model):
    tiny = make_tiny_model("qwen3_moe", **MOE, vocab_size=97)
    hidden = torch.randn(5, tiny.spec.hidden_size, generator=torch.Generator().manual_seed(0))
    alone, _ = load_rank(tiny, None)

    shared = on_ranks(2, lambda group: load_rank(tiny, group)[0].model.logits(hidden.clone()))

    expected = alone.model.logits(hidden)
    assert expected.shape == (5, 97)
    for logits in shared:
        assert logits.dtype == torch.float32 and logits.is_contiguous()
        assert torch.equal(logits, shared[0])
        torch.testing.assert_close(logits, expected, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("model_type", ["llama", "phi3"])
def test_each_rank_ends_its_product_of_gates_and_ups_with_the_activation(make_tiny_model, model_type):
    """In bfloat16, where the C++ kernels can; `phi3` has both in one matrix."""
    if reasons := reasons_against_library():
        pytest.skip("; ".join(reasons))
    tiny = make_tiny_model(model_type, hidden_size=96, intermediate_size=96, dtype="bfloat16")
    x = torch.randn(5, 96, generator=torch.Generator().manual_seed(0)).bfloat16()
    alone = load_rank(tiny, None, dtype="bfloat16")[0].model.layers[0].mlp

    def computed(group: ThreadGroup) -> tuple[bool, torch.Tensor]:
        mlp = load_rank(tiny, group, dtype="bfloat16")[0].model.layers[0].mlp
        return mlp.gate_up(x).shape[1] == 48, mlp(x.clone())

    expected = alone(x)
    for is_fused, sums in on_ranks(2, computed):
        assert is_fused
        # Each rank's sum is rounded to 8 bits before they are added up.
        torch.testing.assert_close(sums, expected, atol=2**-6 * float(expected.abs().max()), rtol=0)


def test_a_layer_has_two_sums_over_ranks_and_a_step_four_operations_more(make_tiny_model):
    tiny = make_tiny_model("llama")

    def calls(group: ThreadGroup) -> list[tuple[str, tuple[int, ...]]]:
        generate(tiny, GREEDY, group, num=1)
        return group.calls

    for found in on_ranks(2, calls):
        whole_step = [name for name, _ in found[-7:]]
        assert whole_step == ["all_reduce"] * 5 + [
            "all_gather",
            "broadcast",
        ]  # embedding and 2 layers, 2 each


def test_ranks_have_only_their_part(make_tiny_model):
    tiny = make_tiny_model("llama", num_attention_heads=8, num_key_value_heads=2, hidden_size=64)

    def sizes(group: ThreadGroup) -> tuple[int, ...]:
        runner, _ = load_rank(tiny, group)
        assert isinstance(runner.kv_pool, KVPool)
        layer = runner.model.layers[0]
        x = torch.ones(1, 64)
        return runner.kv_pool.k[0].shape[1], layer.attention.qkv(x).shape[1], layer.mlp.gate_up(x).shape[1]

    assert on_ranks(4, sizes) == [(1, (2 + 2 * 1) * 8, 2 * 20)] * 4


def test_a_page_is_the_ranks_part_of_it(make_tiny_model):
    """What the pool's size is computed with is what the pool then takes."""
    tiny = make_tiny_model("llama")
    taken = on_ranks(2, lambda group: load_rank(tiny, group)[0].kv_pool.page_bytes)
    loaded = LoadedModel(
        model=cast("Any", None),
        spec=tiny.spec,
        own_spec=rank_spec(tiny.spec, 2),
        dtype=torch.float32,
        kv_dtype=torch.float32,
        device=torch.device("cpu"),
        group=SINGLE_RANK,
        kernels=KernelConfig(),
    )
    assert taken == [loaded.page_bytes(4)] * 2


def test_followers_take_the_tokens_of_rank_0_whatever_they_would_have_sampled(make_tiny_model):
    """Seeds that differ stand for libraries that do."""
    tiny = make_tiny_model("llama")

    def tokens(group: ThreadGroup) -> list[list[int]]:
        params = SEEDED if group.rank == 0 else replace(SEEDED, seed=99)
        return generate(tiny, params, group)[0]

    expected, _ = generate(tiny, SEEDED)
    assert on_ranks(2, tokens) == [expected] * 2


def test_swapped_and_copied_pages_move_on_every_rank(make_tiny_model):
    tiny = make_tiny_model("llama")
    capacity = Capacity(256, 32, 4, 4, tiny.spec.vocab_size, num_host_pages=8)
    config = ModelConfig(dtype="float32", device="cpu", num_threads=1, model_impl="engine")
    source = ModelSource("hf", str(tiny.folder), "test")

    def run(group: ThreadGroup) -> list[int]:
        runner = load_model_runner(engine_config(config), source, tiny.spec, capacity, Place(group, None))
        driver = Driver(runner, capacity)
        req = driver.start(PROMPTS[0], GREEDY)
        driver.step([(req, len(req.tokens))])
        host_pages = range(len(req.pages))
        driver.step([], swap_outs=list(zip(req.pages, host_pages, strict=True)))
        for pool in (*runner.kv_pool.k, *runner.kv_pool.v):
            pool.fill_(torch.nan)
        moved, copied = ([driver.pages.pop() for _ in host_pages] for _ in range(2))
        driver.step([], swap_ins=list(zip(host_pages, moved, strict=True)))
        driver.step([], page_copies=list(zip(moved, copied, strict=True)))
        req.pages[:] = copied
        elsewhere = RowUpdate(req.row, 0, int32(driver.slots(copied, 0, req.computed)))
        driver.step([(req, 1)], row_updates=(elsewhere,))
        while len(req.output) < 8:
            driver.step([(req, 1)])
        return req.output

    expected, _ = generate(tiny, GREEDY)
    assert on_ranks(2, run) == [expected[0]] * 2


# ---------------------------------------------------------------- arithmetic

sizes = st.integers(1, 12)


class Rank:
    """Enough of a group for the arithmetic."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def __getattr__(self, name: str) -> Callable[..., Any]:
        raise AssertionError(f"arithmetic needs no {name}")


@given(sizes, st.integers(1, 9))
def test_equal_spans_are_all_of_it_once(size, share):
    spans = [equal_span(size * share, Rank(rank, size)) for rank in range(size)]

    assert [n for span in spans for n in range(*span)] == list(range(size * share))


@given(sizes, st.integers(1, 400))
def test_padded_spans_are_equally_long_and_hold_everything_once(size, total):
    spans = [padded_span(total, Rank(rank, size)) for rank in range(size)]

    held = [n for span in spans for n in range(*span)]
    assert held[:total] == list(range(total))
    assert {len(span) for span in spans} == {-(-total // size)}
    assert len(held) - total < size


@given(st.integers(1, 8), st.integers(1, 8), sizes)
def test_every_query_head_finds_its_kv_head_on_its_rank(num_kv_heads, group_size, size):
    num_heads = num_kv_heads * group_size
    spec = make_spec(num_heads=num_heads, num_kv_heads=num_kv_heads, intermediate_size=27720)
    if reason_against_tp(spec, size):
        return
    own = rank_spec(spec, size)
    for rank in range(size):
        heads, kv_heads = (
            equal_span(num_heads, Rank(rank, size)),
            kv_head_span(num_kv_heads, Rank(rank, size)),
        )
        assert (len(heads), len(kv_heads)) == (own.num_heads, own.num_kv_heads)
        for local, head in enumerate(range(*heads)):
            # Attention on the rank pairs by the rank's own numbers.
            assert kv_heads.start + local // (own.num_heads // own.num_kv_heads) == head // group_size


@given(st.integers(1, 8), sizes, st.integers(1, 300), st.booleans())
def test_memory_of_all_ranks_is_that_of_the_model_and_what_is_held_twice(num_kv_heads, size, vocab, tied):
    spec = make_spec(
        num_heads=num_kv_heads * 12,
        num_kv_heads=num_kv_heads,
        intermediate_size=27720,
        vocab_size=vocab,
        tie_word_embeddings=tied,
    )
    if reason_against_tp(spec, size):
        return
    own = rank_spec(spec, size)
    copies = max(1, size // num_kv_heads)  # of each KV head
    kv_twice = spec.num_layers * spec.hidden_size * 2 * num_kv_heads * spec.head_dim * (copies - 1)
    norms = (size - 1) * (2 * spec.num_layers + 1) * spec.hidden_size
    padding = (own.vocab_size * size - vocab) * spec.hidden_size * (1 if tied else 2)

    assert num_parameters(own) * size == num_parameters(spec) + kv_twice + norms + padding
    assert own.kv_bytes_per_token(2) * size == spec.kv_bytes_per_token(2) * copies


@pytest.mark.parametrize(
    ("tp", "heads", "inner", "reason", "works"),
    [
        (2, (9, 3), 27, "9 attention heads cannot be divided by it", "1, 3, 9"),
        (
            6,
            (24, 4),
            48,
            "4 key/value heads can neither be divided by it nor divide it",
            "1, 2, 4, 8, 12, 24",
        ),
        (4, (8, 4), 90, "intermediate size of 90 cannot be divided by it", "1, 2"),
        (64, (8, 4), 64, "8 attention heads cannot be divided by it", "1, 2, 4, 8"),
    ],
)
def test_what_cannot_be_divided_is_named_with_what_can(tp, heads, inner, reason, works):
    spec = make_spec(num_heads=heads[0], num_kv_heads=heads[1], intermediate_size=inner)

    with pytest.raises(ConfigError) as error:
        check_tp(spec, tp)

    assert str(error.value) == f"tp is {tp}, but the model's {reason}; for this model --tp can be {works}"


def test_the_width_of_mlps_that_no_layer_has_does_not_matter(make_tiny_model):
    spec = make_tiny_model("qwen3_moe", **MOE, intermediate_size=81).spec

    check_tp(spec, 2)
    experts = spec.experts
    assert experts is not None
    with pytest.raises(ConfigError, match="its experts' intermediate size of 25"):
        check_tp(replace(spec, experts=replace(experts, intermediate_size=25)), 2)


def make_spec(**facts: Any) -> ModelSpec:
    defaults: dict[str, Any] = {
        "model_type": "llama",
        "vocab_size": 100,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_layers": 2,
        "num_heads": 8,
        "num_kv_heads": 4,
        "head_dim": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e4,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    return ModelSpec(**{**defaults, **facts})
