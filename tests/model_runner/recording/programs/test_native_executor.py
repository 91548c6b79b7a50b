"""Recorded decode steps on the CPU against eager ones: the same logits to the last bit, whoever joins and leaves."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from engine.model_runner.attention.backend import AttentionBackend, BatchLayout
from engine.model_runner.input_batch import InputBatch
from engine.model_runner.kernels.cpu.library import reasons_against_library
from engine.model_runner.op_selection import PROVIDERS
from engine.model_runner.recording.eager_executor import EagerExecutor
from engine.model_runner.recording.programs import native_executor, native_program
from engine.model_runner.sampling.sampling_batch import SamplingBatch
from engine.runtime.config.device_config import KernelConfig
from tests.model_runner.conftest import LATENT_MIXTURE, MIXTURE, Driver, Request, SeeingExecutor, TinyModel
from tests.model_runner.test_multi_step import step

SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"num_attention_heads": 4, "num_key_value_heads": 2},
    "mistral": {"sliding_window": 9},
    "qwen2": {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    "qwen3": {},
    "qwen3_moe": MIXTURE,
    "deepseek_v3": {"hidden_size": 64, **LATENT_MIXTURE},
    "phi3": {"num_attention_heads": 3, "num_key_value_heads": 1},
    "gemma2": {"sliding_window": 9, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0},
    "gemma3_text": {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]},
}
WITH_HEAD_DIM = ("mistral", "qwen3", "qwen3_moe", "gemma2", "gemma3_text")


@pytest.fixture(autouse=True)
def compiled():
    if reasons := reasons_against_library():
        pytest.skip("; ".join(reasons))


Make = Callable[..., tuple[Driver, Driver]]


@pytest.fixture
def make_pair(make_tiny_model: Callable[..., TinyModel], make_driver: Callable[..., Driver]) -> Make:
    """One model behind two drivers that do the same: with recordings, and without."""

    def make(
        model_type: str,
        dtype: str = "bfloat16",
        rows: int = 12,
        kv_cache_dtype: str = "auto",
        quantization: str | None = None,
        max_recorded_bs: int | Literal["auto"] = "auto",
        **options: Any,
    ) -> tuple[Driver, Driver]:
        shape = {**SHAPES[model_type], **options}
        if model_type in WITH_HEAD_DIM:
            shape |= {"head_dim": 16}
        elif "num_attention_heads" not in shape:
            shape |= {"num_attention_heads": 3, "num_key_value_heads": 1}
        if model_type == "llama":
            shape |= {"hidden_size": 64}
        tiny = make_tiny_model(model_type, dtype=dtype, **shape)
        recorded, eager = (
            make_driver(
                tiny.spec,
                tiny.folder,
                dtype=dtype,
                rows=rows,
                kv_cache_dtype=kv_cache_dtype,
                quantization=quantization,
                max_recorded_bs=max_recorded_bs,
            )
            for _ in range(2)
        )
        eager.run_eagerly()
        return recorded, eager

    return make


@pytest.fixture
def two_threads() -> Iterator[None]:
    """A program run by one thread has no team."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def live(driver: Driver, seed: int) -> None:
    """Requests join and leave, alone or with a prefix of another one; most steps are decodes."""
    source = random.Random(seed)
    running: list[Request] = []
    donor = driver.start([source.randrange(3, 96) for _ in range(90)])
    driver.step([(donor, 90)])
    running.append(donor)
    for _ in range(26):
        for _ in range(source.choice([0, 0, 0, 1, 3])):
            if len(running) == 9:
                break
            length = source.choice([0, 0, 68, 80])
            tokens = donor.tokens[:length] + [source.randrange(3, 96) for _ in range(source.randint(1, 12))]
            running.append(driver.start(tokens, prefix=(donor, length) if length else None))
        if len(running) > 2 and source.random() < 0.3:
            driver.finish(running.pop(source.randrange(1, len(running))))
        who = running if source.random() < 0.5 else source.sample(running, source.randint(1, len(running)))
        work = [(req, len(req.tokens) - req.computed) for req in who]
        driver.step(sorted(work, key=lambda item: item[1] == 1))


# ------------------------------------------------------------ the same to the last bit


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("model_type", SHAPES)
def test_recorded_steps_have_the_logits_of_eager_ones(make_pair, model_type):
    pair = make_pair(model_type)
    seen = [SeeingExecutor(driver) for driver in pair]
    for driver in pair:
        live(driver, seed=5)

    assert len(seen[0].logits) == len(seen[1].logits)
    for recorded, eager in zip(seen[0].logits, seen[1].logits, strict=True):
        assert eager.isfinite().all() and torch.equal(recorded, eager)
    assert seen[0].num_recorded >= 10 and seen[1].num_recorded == 0
    assert len(seen[0].recorded_sizes) >= 4, "of several sizes, which took turns"


@pytest.mark.fast_cases(1)
@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize(
    ("model_type", "kv_cache_dtype"), [("llama", "auto"), ("gemma3_text", "auto"), ("llama", "int8")]
)
def test_recorded_steps_of_many_requests_have_the_logits_of_eager_ones(make_pair, model_type, kv_cache_dtype):
    """Steps of more tokens than a tile has rows, by a team of two threads; one request joins."""
    pair = make_pair(model_type, rows=40, kv_cache_dtype=kv_cache_dtype)
    seen = [SeeingExecutor(driver) for driver in pair]
    for driver in pair:
        source = random.Random(3)
        requests = [
            driver.start([source.randrange(3, 96) for _ in range(source.randint(1, 20))]) for _ in range(24)
        ]
        driver.step([(req, len(req.tokens)) for req in requests])
        for _ in range(4):
            driver.step([(req, 1) for req in requests])
        joining = driver.start(list(range(10, 40)))
        driver.step([(joining, 30), *((req, 1) for req in requests)])
        for _ in range(4):
            driver.step([(req, 1) for req in (*requests, joining)])

    for recorded, eager in zip(seen[0].logits, seen[1].logits, strict=True):
        assert eager.isfinite().all() and torch.equal(recorded, eager)
    assert seen[0].num_recorded == 8


def test_weights_and_keys_are_read_anew_by_each_replay(make_pair):
    pair = make_pair("llama", tie_word_embeddings=True)  # the embedding's rows come from the packed head
    seen = [SeeingExecutor(driver) for driver in pair]
    for driver in pair:
        req = driver.start(list(range(10, 30)))
        driver.step([(req, 20)])
        for change in ("nothing", "weights", "keys", "nothing"):
            model, pool = driver.runner.model, driver.runner.kv_pool
            if change == "weights":
                model.norm.weight.mul_(-2.0)
            elif change == "keys":
                pool.k[1].copy_(torch.where(pool.k[1].isnan(), pool.k[1], pool.k[1].flip(-1)))
            driver.step([(req, 1)])
            req.tokens[-1] = 5  # the same input for all

    for recorded, eager in zip(seen[0].logits, seen[1].logits, strict=True):
        assert torch.equal(recorded, eager)
    assert seen[0].num_recorded == 4
    assert len({tuple(logits.flatten().tolist()) for logits in seen[0].logits}) == 5


def test_building_a_batch_computes_nothing(make_pair):
    """A step that is built and not run, because something fails in between, leaves nothing."""
    recorded, eager = make_pair("llama")
    outputs = []
    for driver in (recorded, eager):
        req = driver.start(list(range(10, 30)))
        driver.step([(req, 20)])
        if driver is recorded:
            keys = [pool.clone() for pool in driver.runner.kv_pool.k]
            driver.runner.builder.build(driver.plan([(req, 1)]))
            assert driver.native.recorded_sizes == []
            for pool, before in zip(driver.runner.kv_pool.k, keys, strict=True):
                assert torch.equal(pool.view(torch.int16), before.view(torch.int16))
        for _ in range(3):
            driver.step([(req, 1)])
        outputs.append(req.output)
    assert outputs[0] == outputs[1]


def test_tokens_of_requests_with_drafts_take_turns_with_decodes(make_pair):
    """As many tokens as there were, of other requests: what is recorded is the number of tokens."""
    pair = make_pair("gemma3_text")
    seen = [SeeingExecutor(driver) for driver in pair]
    for driver in pair:
        reqs = [driver.start(list(range(10 + n, 40 + 3 * n))) for n in range(3)]
        driver.step([(req, len(req.tokens)) for req in reqs])
        for req in reqs:  # pages for what follows
            driver.step([(req, 1)])
            req.pages += [driver.pages.pop() for _ in range(2)]
        for counts in ((1, 1, 3), (2, 3), (5,), (1, 1, 3), (4, 1), (1, 1)):
            with torch.inference_mode():
                driver.runner.executor.run(checking(driver, reqs[: len(counts)], np.array(counts)))

    for recorded, eager in zip(seen[0].logits, seen[1].logits, strict=True):
        assert torch.equal(recorded, eager)
    assert seen[0].recorded_sizes == [1, 2, 5] and not seen[1].recorded_sizes


def test_a_replay_with_fewer_requests_plans_no_request_of_an_earlier_step(make_pair):
    """Their queries would lie beyond the tokens of the step."""
    driver, _ = make_pair("llama")
    attention: Any = driver.native.eager.attention
    plan, extend_lens = attention.repeatable_step, []

    def noting_step(*columns: Tensor) -> Any:
        extend_lens.append(columns[2])  # the memory from which every replay plans
        return plan(*columns)

    attention.repeatable_step = noting_step
    reqs = [driver.start(list(range(10 + n, 40 + 3 * n))) for n in range(3)]
    driver.step([(req, len(req.tokens)) for req in reqs])
    for req in reqs:
        driver.step([(req, 1)])
        req.pages += [driver.pages.pop() for _ in range(2)]
    extend_lens.clear()
    for counts in ((1, 1, 3), (2, 3), (5,)):
        with torch.inference_mode():
            driver.runner.executor.run(checking(driver, reqs[: len(counts)], np.array(counts)))
        assert extend_lens[0].tolist() == [*counts, *[0] * (5 - len(counts))]
    assert len(extend_lens) == 1


def checking(driver: Driver, reqs: Sequence[Request], counts: npt.NDArray[np.int64]) -> InputBatch:
    """A step in which each of them has so many tokens, all but the first of them drafts."""
    num = len(reqs)
    computed = np.array([req.computed for req in reqs])
    who = np.repeat(np.arange(num), counts)
    positions = np.concatenate([np.arange(n, n + c) for n, c in zip(computed, counts, strict=True)])
    slots = [
        driver.slots(reqs[n].pages, p, p + 1)[0]
        for n, p in zip(who.tolist(), positions.tolist(), strict=True)
    ]
    rows = np.array([req.row for req in reqs])
    return InputBatch(
        layout=BatchLayout(rows, computed, counts, num, counts - 1),
        token_rows=rows[who],
        positions=positions,
        out_cache_loc=np.array(slots),
        input_ids=positions % 7 + 50,
        logits_indices=None,
        sample_indices=None,
        sampled_idx=np.arange(num),
        cut_indices=np.empty(0, dtype=np.int64),
        cut_idx=np.empty(0, dtype=np.int64),
        sampling=SamplingBatch(len(positions)),
        prompt_spans=(),
        drafts=None,
    )


def test_all_sizes_share_one_plan(make_pair):
    """A plan keeps the room of the longest step it was made for; one for each size would be a pool of its own."""
    recorded, _ = make_pair("gemma3_text")
    planned: list[int] = []
    attention: Any = recorded.native.eager.attention
    plan = attention.repeatable_step

    def noting_step(*columns: Tensor) -> Any:
        step = plan(*columns)
        planned.extend(step.plan_addresses)
        return step

    attention.repeatable_step = noting_step
    for num in (1, 2, 3):
        recorded.generate([[3, 4, 5 + n] for n in range(num)], num=3)
    assert recorded.native.recorded_sizes == [1, 2, 3]
    assert sorted(set(planned)) == sorted(planned[:2]) and len(planned) == 6, "one for each window"


# ------------------------------------------------------------ what is not recorded


def test_what_cannot_be_recorded_is_said_once_and_computed_eagerly(make_pair, caplog):
    with caplog.at_level("DEBUG"):
        recorded, eager = make_pair("llama", dtype="float32")  # linear layers are oneDNN's or torch's
        prompts = [[3, 4, 5], [6, 7, 8, 9]]
        assert recorded.generate(prompts, num=6) == eager.generate(prompts, num=6)

    assert caplog.text.count("decode_recordings=none: not recordable: ") == 1
    reason = recorded.native.reason_against
    assert any(name in reason for name in ("mkldnn", "aten.linear", "aten.mm", "aten.addmm", "aten.t.")), (
        reason
    )


def test_a_burst_whose_first_round_could_not_be_recorded_goes_on_without(make_pair, monkeypatch):
    recorded, eager = make_pair("llama")
    recorded.generate([[3, 4, 5]], num=3)  # one token a step can be
    monkeypatch.setattr(
        native_executor,
        "record",
        lambda library, arena, compute: native_program.RecordedProgram(compute(), None, "for a test"),
    )
    reqs = [recorded.start(tokens) for tokens in ([3, 4, 5], [6, 7, 8, 9])]
    recorded.step([(req, len(req.tokens)) for req in reqs])

    step(recorded, reqs, 5)

    assert recorded.native.reason_against == "for a test"
    assert [req.output for req in reqs] == eager.generate([[3, 4, 5], [6, 7, 8, 9]], num=6)


def test_recordings_are_logged_once(make_pair, caplog):
    with caplog.at_level("DEBUG"):
        recorded, _ = make_pair("llama")
        recorded.generate([[3, 4, 5], [6, 7, 8, 9]], num=3)
        recorded.generate([[3, 4, 5]], num=3)
    assert recorded.native.recorded_sizes == [1, 2]
    assert caplog.text.count("decode_recordings=native calls=") == 1


def test_larger_steps_than_wanted_are_eager(make_pair):
    recorded, eager = make_pair("llama", max_recorded_bs=2)
    prompts = [[3, 4, 5], [6, 7, 8, 9], [10, 11]]
    assert recorded.generate(prompts, num=4) == eager.generate(prompts, num=4)
    assert recorded.native.recorded_sizes == [] and recorded.native.num_replayed == 0
    recorded.generate(prompts[:2], num=4)
    assert recorded.native.recorded_sizes == [2] and recorded.native.num_replayed == 2


@pytest.mark.parametrize(
    ("kernels", "num_ranks", "reason"),
    [
        ({"record_steps": False}, 1, ""),
        ({}, 2, "tensor-parallel ranks wait for each other"),
        ({}, 1, "attention by torch_native is not a native call"),
    ],
)
def test_where_nothing_can_be_recorded_nothing_is_tried(kernels, num_ranks, reason, caplog):
    class TorchAttention(AttentionBackend):
        name = "torch_native"

        def __init__(self) -> None:
            pass

    made: Any = dict.fromkeys(("model", "kv_pool", "relay", "slot_table"))
    attention = TorchAttention()  # type: ignore[abstract]
    eager = EagerExecutor(forward=made, attention=attention, buffers=made, **made)
    with caplog.at_level("DEBUG"):
        executor = native_executor.native_executor(
            KernelConfig(**kernels), eager, num_ranks=num_ranks, **made
        )
    assert executor is eager
    assert reason in caplog.text


def test_every_native_operation_of_a_layer_has_a_torch_twin():
    """What a recording needs beside products and attention is an operation, so that every device has it."""
    for op in ("add", "take_rows", "to_float32"):
        assert [provider.name for provider in PROVIDERS[op]] == ["native", "torch"]
