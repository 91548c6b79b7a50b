"""Prompts and mixed steps that are replayed in pieces, against steps that are launched kernel by kernel."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from engine.model_runner import load
from engine.model_runner.adapters.adapter_store import SlotSizes
from engine.model_runner.attention.triton_paged import TritonAttention
from engine.model_runner.recording.eager_executor import EagerExecutor
from engine.model_runner.recording.graphs.graph_sizes import sizes_to_record, token_sizes
from engine.model_runner.recording.graphs.prompt_graph_executor import PromptGraphExecutor
from engine.runtime.config.device_config import KernelConfig
from engine.runtime.pooling import PoolingParams
from engine.runtime.step_plan import StepResult, TokenMasks
from tests.model_runner.conftest import LATENT_MIXTURE, MIXTURE, Driver, Request, SeeingExecutor, TinyModel
from tests.model_runner.distributed.test_tensor_parallel import PROMPTS
from tests.model_runner.distributed.thread_group import ThreadGroup, on_ranks
from tests.model_runner.drafted_steps import step_with_drafts
from tests.model_runner.structures.families import GEMMA3N, GEMMA4, GPT_OSS, SHARING
from tests.scheduler.grammar.toy_matcher import FixedMasks
from tests.selection import examples
from tests.triton_interpreter import repair_interpreter

from ..recording_device import DeviceAttention, RecordingDevice, RerunningDevice
from .test_cuda_graph_executor import KINDS, ROWS, Life, load_driver, make, on_gpu, pretended_gpu

repair_interpreter()

POOLED = PoolingParams(all_tokens=True)
HEADS = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "experts": ("qwen3_moe", MIXTURE),
    "heads of two kinds, shared keys": ("gemma4_text", {**GEMMA4, **SHARING, **HEADS}),
    "latents": ("deepseek_v3", {"hidden_size": 64, **LATENT_MIXTURE}),
    "tied, one layer": ("llama", {"tie_word_embeddings": True, "num_hidden_layers": 1}),
    "windows, two rotary tables, capped": ("gemma2", {**HEADS, "head_dim": 16, "sliding_window": 9}),
    "norms over all heads, after blocks": ("olmo2", {"num_hidden_layers": 3}),
    "blocks in parallel": ("cohere2", {"num_hidden_layers": 3, "sliding_window": 9}),
    "sinks": ("gpt_oss", {**GPT_OSS, **HEADS, "sliding_window": 9}),
    "several streams": ("gemma3n_text", {**GEMMA3N, **HEADS}),
}


@pytest.fixture
def tiny(make_tiny_llama: Callable[..., TinyModel]) -> TinyModel:
    return make_tiny_llama()


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed * 1000 + length).integers(3, 96, length)]


def pair(tiny: TinyModel, **options: Any) -> tuple[Driver, Driver, RecordingDevice]:
    """A driver with recordings, one without, and the first one's device."""
    device = RecordingDevice()
    return make(tiny, device, prompts=True, **options), make(tiny, None, **options), device


def prompts_of(driver: Driver) -> PromptGraphExecutor:
    executor = driver.runner.executor
    others = getattr(executor, "others", executor)
    assert isinstance(others, PromptGraphExecutor)
    return others


@torch.inference_mode()
def poison(driver: Driver, value: float = torch.nan) -> None:
    """What a step leaves in the memory that recordings share."""
    executor = prompts_of(driver)
    for buffers in executor._memory.buffers.values():
        for buffer in buffers:
            buffer.fill_(value)
    for recording in executor._recordings.values():
        if isinstance(recording.result, torch.Tensor):
            recording.result.fill_(value)


class Played:
    """Plays the same steps with each of two drivers, and compares logits and results.

    The memory that recordings share holds NaN before each step.
    """

    def __init__(self, recorded: Driver, eager: Driver) -> None:
        self.recorded, self.eager = recorded, eager
        self.seen = [SeeingExecutor(driver) for driver in (recorded, eager)]
        self.inner = self.seen[0].inner

    def start(self, *args: Any, prefix: tuple[Any, int] | None = None, **options: Any) -> list[Request]:
        return [
            driver.start(*args, prefix=None if prefix is None else (prefix[0][n], prefix[1]), **options)
            for n, driver in enumerate((self.recorded, self.eager))
        ]

    def step(self, *work: tuple[list[Request], int]) -> StepResult:
        self.recorded.runner.executor = self.inner
        poison(self.recorded)
        self.recorded.runner.executor = self.seen[0]
        results = [
            driver.step([(reqs[n], count) for reqs, count in work])
            for n, driver in enumerate((self.recorded, self.eager))
        ]
        one, other = results
        assert one.next_token_ids == other.next_token_ids
        assert one.errors == other.errors == {}
        for mine, theirs in zip(
            [*one.logprobs, *one.prompt_logprobs.values()],
            [*other.logprobs, *other.prompt_logprobs.values()],
            strict=True,
        ):
            assert (mine is None) == (theirs is None)
            if mine is not None and theirs is not None:
                for part in ("token_logprobs", "top_logprobs"):
                    a, b = (np.frombuffer(getattr(each, part), dtype=np.float32) for each in (mine, theirs))
                    np.testing.assert_allclose(a, b, atol=2e-4)
        ours, expected = (seen.logits for seen in self.seen)
        assert len(ours) == len(expected)
        if ours:
            torch.testing.assert_close(ours[-1], expected[-1], atol=2e-4, rtol=2e-4)
        return one


# ------------------------------------------------------------ sizes


def test_sizes_double_and_then_grow_by_a_quarter():
    assert token_sizes(2048)[:9] == [16, 32, 64, 128, 256, 320, 384, 448, 512]
    assert token_sizes(2048)[9:] == [640, 768, 896, 1024, 1280, 1536, 1792, 2048]
    assert (token_sizes(7), token_sizes(100)) == ([7], [16, 32, 64, 100])


def test_large_models_record_fewer_tokens(tiny):
    """The device takes longer for the others than the host would need to launch them."""

    def largest(step_tokens: int = 8192, **options: Any) -> int:
        spec = replace(tiny.spec, **{"num_layers": 32, **options})
        found = sizes_to_record(
            KernelConfig(), 4, torch.device("cuda"), spec=spec, step_tokens=lambda: step_tokens
        )
        return found.prompts[-1]

    of_8b = {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_heads": 32,
        "num_kv_heads": 8,
        "head_dim": 128,
    }
    assert largest() == 2048
    assert largest(step_tokens=512) == 512, "no step is larger"
    assert largest(**of_8b) == 256
    assert largest(**{**of_8b, "hidden_size": 8192, "intermediate_size": 28672, "num_heads": 64}) == 64


# ------------------------------------------------------------ the same results


def test_prompts_of_all_sizes_chunks_and_mixed_steps(tiny):
    """Buckets of 16, 32 and 64 tokens; with and without padding; with cached prefixes and all kinds of sampling."""
    recorded, eager, device = pair(tiny)
    played = Played(recorded, eager)
    num_launches = tiny.spec.num_layers + 1

    def launches() -> int:
        counted, device.num_replayed = device.num_replayed, 0
        return counted

    lengths = (1, 15, 16, 17, 64)
    reqs = [played.start(prompt_of(length), KINDS[n % 4]) for n, length in enumerate(lengths)]
    for req, length in zip(reqs, lengths, strict=True):
        played.step((req, length))
        assert launches() == (1 if length == 1 else num_launches), "a single token is a decode"
    long = played.start(prompt_of(90), KINDS[3])
    played.step((long, 40), (reqs[0], 1), (reqs[1], 1))
    played.step((long, 1))  # samples nothing
    played.step((long, 20), (reqs[2], 1))
    assert launches() == 3 * num_launches
    hit = played.start([*prompt_of(90)[:60], 7, 8], prefix=(long, 60))
    played.step((hit, 2), (reqs[0], 1), (reqs[3], 1), (reqs[4], 1))
    played.step((long, 29), (hit, 1))
    several = [played.start(prompt_of(3 + n), KINDS[n % 4]) for n in range(5)]
    played.step(*((req, len(req[0].tokens)) for req in several))
    assert launches() == 3 * num_launches
    for _ in range(2):
        played.step(*((req, 1) for req in (*several, long, hit)))
    assert launches() == 2


@pytest.mark.fast_cases(3)
@pytest.mark.parametrize(("model_type", "options"), MODELS.values(), ids=MODELS.keys())
def test_models_of_all_kinds(make_tiny_model, monkeypatch, model_type, options):
    monkeypatch.delattr(DeviceAttention, "capturable")  # decodes are of plain models only
    tiny = make_tiny_model(model_type, **options)
    recorded, eager, device = pair(tiny)
    executor = prompts_of(recorded)
    assert executor._sizes == [16, 32, 64]
    assert device.num_captured == 3 * (tiny.spec.num_layers + 1)
    played = Played(recorded, eager)
    first, second = played.start(prompt_of(37)), played.start(prompt_of(12))
    played.step((first, 20), (second, 12))
    played.step((first, 17), (second, 1))
    played.step((first, 1), (second, 1))

    assert executor.num_replayed == 3
    assert device.num_replayed == 3 * (tiny.spec.num_layers + 1)


def test_in_bfloat16(tiny):
    outputs = []
    for device in (RecordingDevice(), None):
        driver = make(tiny, device, prompts=True, dtype="bfloat16")
        prompts = [prompt_of(5 + 3 * n) for n in range(5)]
        outputs.append(driver.generate(prompts, KINDS[:3] + KINDS[:2], num=3, chunk=13))
    assert outputs[0] == outputs[1]


@settings(
    max_examples=examples(6),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(seed=st.integers(0, 1 << 30), largest=st.sampled_from([1, 5]))
def test_replayed_or_not_all_requests_get_the_same_tokens(tiny, seed, largest):
    """Requests join and leave, share pages, compute chunks, and are launched ahead of each other's results."""
    device = RecordingDevice()
    recorded = Life(make(tiny, device, prompts=True, max_recorded_bs=largest), seed).run()
    eager = Life(make(tiny, None), seed).run()

    assert recorded == eager
    assert device.num_replayed


def test_drafts_beside_a_prompt(tiny):
    recorded, eager, _ = pair(tiny)
    text = eager.generate([prompt_of(9)], num=12)[0]
    outputs = []
    for driver in (recorded, eager):
        req, newcomer = driver.start(prompt_of(9)), driver.start(prompt_of(20))
        driver.step([(req, 9)])
        counts = [step_with_drafts(driver, [(req, text[1:4])])]
        driver.step([(newcomer, 20), (req, 1)])
        counts.append(step_with_drafts(driver, [(newcomer, [5, 6]), (req, text[len(req.output) :][:2])]))
        outputs.append((counts, req.output, newcomer.output))
    assert outputs[0] == outputs[1]
    assert outputs[0][1] == text[: len(outputs[0][1])]


def test_masks_of_grammars(tiny):
    recorded, eager, _ = pair(tiny)

    bits = np.zeros((1, 3), dtype=np.int32)
    bits[0, 0] = 1 << 5 | 1 << 7  # two tokens in the second row of logits
    tokens = []
    for driver in (recorded, eager):
        plan = driver.plan([(driver.start(prompt_of(9)), 9), (driver.start(prompt_of(20)), 20)])
        masks: Any = FixedMasks(TokenMasks(np.array([1]), bits), lambda _token_ids: None)
        result = driver.runner.launch(plan, masks=masks).wait()
        tokens.append(np.frombuffer(result.next_token_ids, dtype=np.int32).tolist())
    assert tokens[0] == tokens[1] and tokens[0][1] in (5, 7)


def test_vectors_of_chunked_texts_beside_decodes(tiny):
    """What a text needs of its first chunks outlives the memory of their hidden states."""
    recorded, eager, _ = pair(tiny)
    vectors: list[bytes] = []
    for driver in (recorded, eager):
        for pooling in ("last", "mean", "cls"):
            driver.runner.pooler.pooling = pooling
            req, text = driver.start(prompt_of(9)), driver.start(prompt_of(60), pooling=POOLED)
            driver.step([(req, 9), (text, 20)])
            driver.step([(text, 30), (req, 1)])
            vectors += driver.step([(text, 10), (req, 1)]).vectors.values()
    found = np.frombuffer(b"".join(vectors), dtype=np.float32).reshape(2, 3, -1)
    np.testing.assert_allclose(found[0], found[1], atol=2e-5)


# ------------------------------------------------------------ which steps


def test_larger_steps_are_launched_kernel_by_kernel(tiny):
    recorded, eager, device = pair(tiny)
    played = Played(recorded, eager)
    req = played.start(prompt_of(100))
    played.step((req, 65))
    assert device.num_replayed == 0
    played.step((req, 35))
    assert device.num_replayed == tiny.spec.num_layers + 1


def test_decodes_beyond_the_largest_recording(tiny, caplog):
    recorded, eager, device = pair(tiny, max_recorded_bs=3)
    played = Played(recorded, eager)
    reqs = [played.start(prompt_of(2 + n), KINDS[n % 4]) for n in range(ROWS)]
    played.step(*((req, len(req[0].tokens)) for req in reqs[:8]))
    played.step(*((req, len(req[0].tokens)) for req in reqs[8:]))
    device.num_replayed = 0
    with caplog.at_level("INFO"):
        for _ in range(2):
            played.step(*((req, 1) for req in reqs))
    assert device.num_replayed == 2 * (tiny.spec.num_layers + 1)
    assert "decodes of 14 requests are not replayed as a whole: --max-recorded-bs is 3" in caplog.text


def test_attention_that_needs_the_host_for_decodes(tiny, monkeypatch, caplog):
    monkeypatch.delattr(DeviceAttention, "capturable")
    recorded, eager, device = pair(tiny)
    assert isinstance(recorded.runner.executor, PromptGraphExecutor)
    assert "decode_graphs=0: attention by torch_decode needs the host in each step" in caplog.text
    outputs = [driver.generate([prompt_of(9), prompt_of(5)], num=3) for driver in (recorded, eager)]
    assert outputs[0] == outputs[1]
    assert device.num_replayed == 3 * (tiny.spec.num_layers + 1)


def test_adapters_whose_products_need_the_host(tiny, caplog):
    """Those in torch; the slot is empty, so the tokens are those of the base model."""
    device = RecordingDevice()
    with pretended_gpu(lambda: device, prompts=True), caplog.at_level("INFO"):
        driver = load_driver(tiny, adapter_slots=SlotSizes(1, 4))
    assert caplog.text.count("steps with adapters are launched kernel by kernel") == 1
    for slot, num_replayed in ((1, 0), (0, tiny.spec.num_layers + 1)):
        req = driver.start(prompt_of(20), adapter_slot=slot)
        driver.step([(req, 20)])
        assert req.output == tiny.greedy(prompt_of(20), 1)
        assert device.num_replayed == num_replayed


def test_state_layers_are_launched_kernel_by_kernel(make_tiny_model, caplog):
    tiny = make_tiny_model("lfm2", layer_types=["conv", "full_attention"])
    with caplog.at_level("INFO"):
        driver = make(tiny, RerunningDevice(), prompts=True, max_recorded_bs=1)
    assert isinstance(driver.runner.executor.others, EagerExecutor)
    assert caplog.text.count("prompt_graphs=0: the state layers of lfm2 depend on each step's requests") == 1


def test_what_was_recorded_is_logged(tiny, caplog):
    with caplog.at_level("INFO"):
        make(tiny, RecordingDevice(), prompts=True)
    assert "prompt_graphs=3 tokens=16..64 pieces=3 record_s=" in caplog.text


# ------------------------------------------------------------ memory


def test_padding_writes_nothing_but_the_dummy_page(tiny):
    """A chunk of 20 tokens and 3 decodes run as 32 tokens; other requests keep their KV, and free pages the poison."""
    driver = make(tiny, RecordingDevice(), prompts=True, max_recorded_bs=1)
    reqs = [driver.start(prompt_of(3 + n)) for n in range(5)]
    driver.step([(req, len(req.tokens)) for req in reqs])
    long = driver.start(prompt_of(50))
    pools = [*driver.runner.kv_pool.k, *driver.runner.kv_pool.v]
    table = driver.runner.slot_table.req_to_token
    before, table_before = [pool.clone() for pool in pools], table.clone()
    starts = {id(req): req.computed for req in (long, *reqs[:3])}

    driver.step([(long, 20), *((req, 1) for req in reqs[:3])])

    written = {
        slot for req in (long, *reqs[:3]) for slot in driver.slots(req.pages, starts[id(req)], req.computed)
    }
    assert len(written) == 23
    untouched = sorted(set(range(4, len(pools[0]))) - written)
    for pool, old in zip(pools, before, strict=True):
        assert torch.equal(pool[untouched].nan_to_num(7e7), old[untouched].nan_to_num(7e7))
        assert pool[sorted(written)].isfinite().all()
    changed = (table != table_before).nonzero()[:, 0].unique().tolist()
    assert changed == sorted(req.row for req in (long, *reqs[:3]))
    assert not table[-1].any(), "the dummy row has slots of the dummy page"


@pytest.mark.parametrize("model_type", ["llama", "qwen3_moe"])
def test_padding_does_not_see_what_another_step_left(make_tiny_model, model_type):
    """Not even NaN of a request that failed: the router of a mixture would have to choose experts by it."""
    tiny = make_tiny_model(model_type, **(MIXTURE if model_type == "qwen3_moe" else {}))
    driver = make(tiny, RecordingDevice(), prompts=True, max_recorded_bs=1)
    results = []
    for fill in (torch.nan, 3.0):
        poison(driver, fill)
        req = driver.start(prompt_of(20))
        driver.step([(req, 20)])
        hidden = prompts_of(driver)._recordings[32, False].result
        assert isinstance(hidden, torch.Tensor)
        results.append(hidden.clone())
        assert req.output == tiny.greedy(prompt_of(20), 1)
    assert torch.equal(*results)
    assert results[0].isfinite().all()


def test_recording_touches_only_the_dummy_page(tiny):
    runner = make(tiny, RecordingDevice(), prompts=True).runner
    assert not runner.slot_table.req_to_token.any()
    assert not runner.relay._last.any()


@pytest.mark.parametrize("layer", [0, 1])
def test_a_step_for_which_there_is_no_memory_between_two_pieces_is_dropped(tiny, monkeypatch, layer):
    driver = make(tiny, RecordingDevice(), prompts=True)
    executor, failures = prompts_of(driver), itertools.count()
    plan_step = executor.eager.attention.plan_step

    class Failing:
        def __init__(self, step: Any) -> None:
            self.step = step

        def forward(self, layer_id: int, *args: Any) -> Any:
            if layer_id == layer and next(failures) == 0:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")
            return self.step.forward(layer_id, *args)

    monkeypatch.setattr(executor.eager.attention, "plan_step", lambda layout: Failing(plan_step(layout)))
    req = driver.start(prompt_of(20))
    result = driver.runner.launch(driver.plan([(req, 20)])).wait()
    assert result.out_of_memory == "CUDA out of memory. Tried to allocate 2.00 MiB."
    driver.finish(req)
    again = driver.start(prompt_of(20))
    driver.step([(again, 20)])
    driver.step([(again, 1)])
    assert again.output == tiny.greedy(prompt_of(20), 2)


# ------------------------------------------------------------ ranks, kernels


def test_two_ranks_together_say_what_one_says(tiny):
    """Collectives are within the pieces."""
    expected = make(tiny, None).generate(PROMPTS[:3], KINDS[:3], num=3, chunk=17)

    def tokens(group: ThreadGroup) -> tuple[list[list[int]], int]:
        driver = load_driver(tiny, group=group, max_recorded_bs=1)
        found = driver.generate(PROMPTS[:3], KINDS[:3], num=3, chunk=17)
        return found, prompts_of(driver).num_replayed

    with pretended_gpu(RerunningDevice, prompts=True):
        one, other = on_ranks(2, tokens)
    assert one[0] == other[0] == expected
    assert one[1] == other[1] > 3


class UnevenAttention(DeviceAttention):
    """Decodes of rank 0 alone can be recorded, as if the other one had no compiler."""

    place = threading.local()

    def capturable(self) -> Any:
        return None if self.place.rank else self


def test_ranks_replay_the_same_steps(tiny, caplog):
    """Padding is part of what they add up."""

    def tokens(group: ThreadGroup) -> list[list[int]]:
        UnevenAttention.place.rank = group.rank
        return load_driver(tiny, group=group, max_recorded_bs=4).generate(PROMPTS[:3], KINDS[:3], num=3)

    with pretended_gpu(RerunningDevice, UnevenAttention, prompts=True):
        one, other = on_ranks(2, tokens)
    assert one == other == make(tiny, None).generate(PROMPTS[:3], KINDS[:3], num=3)
    assert "decode_graphs=0: attention by torch_decode needs the host in each step" in caplog.text
    assert "decode_graphs=0: decodes of another rank cannot be recorded" in caplog.text


def test_ranks_record_nothing_where_one_cannot(tiny, caplog, monkeypatch):
    """As if Triton were unusable on the machine of rank 1."""
    expected = make(tiny, None).generate(PROMPTS[:3], KINDS[:3], num=3)
    place = threading.local()
    monkeypatch.setattr(load, "reason_against_graphs", lambda *_args: "as planned" if place.rank else "")

    def tokens(group: ThreadGroup) -> tuple[list[list[int]], Any]:
        place.rank = group.rank
        driver = load_driver(tiny, group=group, max_recorded_bs=4)
        return driver.generate(PROMPTS[:3], KINDS[:3], num=3), driver.runner.executor

    with pretended_gpu(RerunningDevice, prompts=True):
        results = on_ranks(2, tokens)
    assert all(isinstance(executor, EagerExecutor) for _, executor in results)
    assert [found for found, _ in results] == [expected, expected]
    for reason in ("as planned", "steps of another rank cannot be recorded, see its log"):
        assert f"decode_graphs=0 prompt_graphs=0: {reason}" in caplog.messages


@pytest.mark.gpu
def test_on_a_gpu_recorded_prompts_give_the_same_tokens(tiny):
    outputs = []
    for recorded in (True, False):
        driver = on_gpu(tiny, recorded=recorded)
        prompts = [prompt_of(3 + 9 * n) for n in range(9)]
        outputs.append(driver.generate(prompts, [KINDS[n % 4] for n in range(9)], num=6, chunk=7))
        if recorded:
            assert prompts_of(driver).num_replayed > 5
    assert outputs[0] == outputs[1]


@pytest.mark.slow
def test_triton_attention_between_the_pieces(tiny):
    device = RerunningDevice()
    driver = make(tiny, device, TritonAttention, prompts=True, max_recorded_bs=1)
    outputs = driver.generate([prompt_of(7), prompt_of(30)], num=3, chunk=20)
    assert outputs == [tiny.greedy(prompt_of(length), 3) for length in (7, 30)]
    assert device.num_replayed == 3 * 3 + 1, "the last step is a decode of one request"


def test_the_fake_device_overwrites_what_no_later_piece_reads():
    kept: list[torch.Tensor] = []
    source, target = torch.ones(3), torch.zeros(3)

    def run(cut: Callable[[], None]) -> None:
        lost, held = source + 1, source + 2
        kept[:] = [lost, held]
        cut()
        target.copy_(held)

    first, last = RecordingDevice().capture_pieces(run)
    first()
    assert kept[0].isnan().all() and kept[1].tolist() == [3.0] * 3
    last()
    assert target.tolist() == [3.0] * 3
