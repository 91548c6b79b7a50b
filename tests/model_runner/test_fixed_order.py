"""`--deterministic`: the same tokens and log-probabilities, to the last bit, whatever else is in the batch."""

from __future__ import annotations

import functools
import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from engine import LLM
from engine.model_runner.attention.cpu_native import CpuNativeAttention
from engine.model_runner.fixed_order import check_fixed_order, pack_linear
from engine.model_runner.kernels import native
from engine.model_runner.kernels.cpu.library import reasons_against_library
from engine.model_runner.kernels.native_linear import NativeLinear
from engine.model_runner.model_runner import PendingStep
from engine.runtime.errors import ConfigError
from engine.runtime.sampling_params import SamplingParams
from engine.runtime.step_plan import StepResult
from tests.model_runner.attention.paged_batches import Pages, assert_close, spec_of
from tests.model_runner.conftest import LATENT_MIXTURE, MIXTURE, Driver, Request
from tests.model_runner.kernels.cpu.conftest import best_library
from tests.scheduler.speculation.proposers import proposing
from tests.selection import examples

__all__ = ["best_library"]  # a fixture

CPU, BF16 = torch.device("cpu"), torch.bfloat16
NUM_TOKENS = 6
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 16, "hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3},
    "qwen3": {"head_dim": 32},
    "llama in 8 bits": {"head_dim": 16, "hidden_size": 96, "intermediate_size": 160},
    "qwen3_moe": {"head_dim": 16, **MIXTURE},
    "qwen3_moe in 8 bits": {"head_dim": 16, **MIXTURE},
    "deepseek_v3": {"hidden_size": 64, **LATENT_MIXTURE},
    "gemma2": {
        "head_dim": 16,
        "sliding_window": 40,
        "attn_logit_softcapping": 3.0,
        "final_logit_softcapping": 5.0,
    },
    "gemma3_text": {
        "head_dim": 16,
        "sliding_window": 40,
        "layer_types": ["sliding_attention", "full_attention"],
    },
}


@pytest.fixture(autouse=True)
def compiled():
    if reasons := reasons_against_library():
        pytest.skip("; ".join(reasons))


@pytest.fixture
def make(make_tiny_model: Any, make_driver: Any) -> Callable[..., Driver]:
    def make_one(shape: str, **options: Any) -> Driver:
        tiny = make_tiny_model(shape.split(maxsplit=1)[0], dtype="bfloat16", **SHAPES[shape])
        if "8 bits" in shape:
            options["quantization"] = "int8"
        options = {"page_size": 16, "num_pages": 1500, "max_model_len": 512, "deterministic": True} | options
        driver: Driver = make_driver(tiny.spec, tiny.folder, dtype="bfloat16", **options)
        return driver

    return make_one


def tokens_of(length: int, seed: int) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(3, 96) for _ in range(length)]


def params(seed: int) -> SamplingParams:
    """Of greedy requests and of those that draw, all with log-probabilities."""
    drawing: dict[str, Any] = [{"temperature": 0.0}, {"temperature": 1.2}, {"top_p": 0.9, "top_k": 40}][
        seed % 3
    ]
    return SamplingParams(seed=seed + 1, logprobs=3, ignore_eos=True, **drawing)


@dataclass
class Seen:
    """What came out of one request: tokens, and the bytes of their log-probabilities."""

    tokens: list[int] = field(default_factory=list)
    bits: list[tuple[bytes, ...]] = field(default_factory=list)


def step(driver: Driver, work: Sequence[tuple[Request, int]], seen: dict[int, Seen]) -> None:
    """One step, with what it says of each request."""
    samples = [req for req, count in work if req.computed + count == len(req.tokens)]
    result = driver.step(work)
    assert not result.errors
    for req, packed in zip(samples, result.logprobs, strict=True):
        assert packed is not None
        one = seen.setdefault(req.row, Seen())
        one.tokens.append(req.tokens[-1])
        one.bits.append((packed.token_logprobs, packed.top_ids, packed.top_logprobs))


def alone(driver: Driver, prompt: list[int], sampling: SamplingParams) -> Seen:
    """In one piece, without company."""
    seen: dict[int, Seen] = {}
    req = driver.start(prompt, sampling)
    while len(req.output) < NUM_TOKENS:
        step(driver, [(req, len(req.tokens) - req.computed)], seen)
    driver.finish(req)
    return seen[req.row]


def in_company(driver: Driver, reqs: list[Request], chunks: random.Random | None) -> dict[int, Seen]:
    """All together; prompts in pieces of any lengths, so that steps hold pieces, ends of prompts and decodes."""
    seen: dict[int, Seen] = {}
    while any(len(req.output) < NUM_TOKENS for req in reqs):
        work = []
        for req in reqs:
            if len(req.output) < NUM_TOKENS:
                left = len(req.tokens) - req.computed
                work.append(
                    (req, left if chunks is None else min(left, chunks.choice([1, 2, 16, 33, 64, 200])))
                )
        step(driver, sorted(work, key=lambda item: item[1] == 1), seen)
    for req in reqs:
        driver.finish(req, free=False)
    return seen


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("shape", SHAPES)
def test_alone_is_as_among_32(make, shape):
    """With prompts of any lengths, a part of them with a beginning in common, cut anywhere."""
    driver = make(shape)
    common = tokens_of(160, 0)
    prompts = [common * (n % 2) + tokens_of(1 + 7 * n, n) for n in range(32)]
    expected = [alone(driver, prompt, params(n)) for n, prompt in enumerate(prompts)]
    for chunks in (None, random.Random(5)):
        reqs = [driver.start(prompt, params(n)) for n, prompt in enumerate(prompts)]
        seen = in_company(driver, reqs, chunks)
        assert [seen[req.row] for req in reqs] == expected


@pytest.mark.fast_cases(3)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_cached_prefix_changes_nothing(make, shape):
    """Its pages are shared by several that run together; one has nothing but its last token left to compute."""
    driver = make(shape)
    common = tokens_of(192, 1)
    prompts = [common + tokens_of(n, 50 + n) for n in (1, 2, 17, 64)]
    expected = [alone(driver, prompt, params(n)) for n, prompt in enumerate(prompts)]
    donor = driver.start(common)
    driver.step([(donor, len(common))])
    reqs = [driver.start(prompt, params(n), prefix=(donor, 192)) for n, prompt in enumerate(prompts)]
    seen = in_company(driver, reqs, None)
    assert [seen[req.row] for req in reqs] == expected


def test_computing_again_after_a_retraction_changes_nothing(make):
    """What was decoded comes back as prompt."""
    driver = make("llama")
    prompt = tokens_of(100, 3)
    expected = alone(driver, prompt, params(1))
    for kept in range(1, NUM_TOKENS):
        again = driver.start(prompt + expected.tokens[:kept], params(1), prompt_len=len(prompt))
        seen = in_company(driver, [again], None)[again.row]
        assert seen.tokens == expected.tokens[kept:]
        assert seen.bits == expected.bits[kept:]


def test_threads_change_nothing(make):
    threads = torch.get_num_threads()
    try:
        prompt = tokens_of(150, 4)
        found = [alone(make("llama", num_threads=num), prompt, params(1)) for num in (1, 2, 3)]
    finally:
        torch.set_num_threads(threads)
    assert found[0] == found[1] == found[2]


def test_a_verified_draft_has_the_bits_of_decodes(make):
    """Several tokens at once and one after the other: what speculation rests on."""
    driver = make("llama")
    prompt = tokens_of(70, 8)
    expected = alone(driver, prompt, params(0))
    req = driver.start(prompt, params(0))
    seen: dict[int, Seen] = {}
    step(driver, [(req, len(prompt))], seen)
    drafted = driver.start(prompt + expected.tokens[:4], params(0), prompt_len=len(prompt))
    step(driver, [(drafted, len(prompt) + 1)], seen)
    step(driver, [(drafted, 3)], seen)
    assert seen[drafted.row].bits == [expected.bits[4]]


@settings(
    max_examples=examples(25),
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(lens=st.lists(st.integers(1, 130), min_size=1, max_size=8), seed=st.integers(0, 99))
def test_any_batch(fast_driver, lens, seed):
    prompts = [tokens_of(length, seed + n % 3) for n, length in enumerate(lens)]  # some begin alike
    expected = [alone(fast_driver, prompt, params(n)) for n, prompt in enumerate(prompts)]
    reqs = [fast_driver.start(prompt, params(n)) for n, prompt in enumerate(prompts)]
    seen = in_company(fast_driver, reqs, random.Random(seed))
    for req in reqs:
        fast_driver.pages += req.pages
    assert [seen[req.row] for req in reqs] == expected


@pytest.fixture
def fast_driver(make: Callable[..., Driver]) -> Driver:
    return make("llama")


def test_the_default_may_differ_by_what_is_shared(make):
    """The tests above can fail: without the flag attention adds up a shared prefix in another order."""
    driver = make("llama", deterministic=False)
    common = tokens_of(192, 1)
    prompts = [common + tokens_of(n, 50 + n) for n in (1, 2, 17, 64)]
    expected = [alone(driver, prompt, params(n)) for n, prompt in enumerate(prompts)]
    donor = driver.start(common)
    driver.step([(donor, len(common))])
    reqs = [driver.start(prompt, params(n), prefix=(donor, 192)) for n, prompt in enumerate(prompts)]
    seen = in_company(driver, reqs, None)
    assert [seen[req.row] for req in reqs] != expected


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
@pytest.mark.parametrize("window", [None, 100])
def test_decodes_are_dense_attention(best_library, dtype, window):
    backend: Any = functools.partial(CpuNativeAttention, library=best_library, fixed_order=True)
    pages = Pages(spec_of(9, 3, 64, window=window), 16, [1, 2, 64, 65, 300, 301], dtype, 0, backend=backend)
    ours, expected = pages.run([1] * 6)
    assert_close(ours, expected, dtype)


class TestWhatCannot:
    def test_names_all_reasons(self, make_tiny_llama, monkeypatch):
        spec = make_tiny_llama(head_dim=8).spec
        with pytest.raises(ConfigError, match="deterministic is on") as caught:
            check_fixed_order(spec, CPU, torch.float16, torch.float16)
        for reason in ("not in torch.float16", "head_dim 8", "omit --deterministic"):
            assert reason in str(caught.value)

    def test_without_our_kernels_the_engine_does_not_start(self, make, monkeypatch):
        monkeypatch.setattr(native, "reasons_against_library", lambda: ["no compiler"])
        monkeypatch.setattr("engine.model_runner.attention.cpu_native.reasons_against_library", list)
        with pytest.raises(ConfigError, match="no compiler; omit --deterministic"):
            make("llama")

    def test_a_weight_for_another_product_is_refused(self):
        with pytest.raises(ConfigError, match="4 x 7 .* even number of inputs"):
            pack_linear(torch.zeros(4, 7, dtype=BF16))
        assert isinstance(pack_linear(torch.zeros(4, 8, dtype=BF16)), NativeLinear)

    def test_our_attention_is_taken_whatever_else_there_is(self, make):
        attention = make("llama").native.eager.attention
        assert isinstance(attention, CpuNativeAttention)
        assert attention._fixed_order


def test_log_probabilities_of_a_prompt_do_not_depend_on_where_it_is_cut(make):
    driver = make("llama")
    prompt = tokens_of(100, 6)

    def asked(chunk: int) -> tuple[bytes, ...]:
        req = driver.start(prompt, SamplingParams(temperature=0.0, prompt_logprobs=2))
        parts = []
        while req.computed < len(prompt):
            result = driver.step([(req, min(chunk, len(prompt) - req.computed))])
            parts += result.prompt_logprobs.values()
        driver.finish(req)
        return tuple(
            b"".join(getattr(part, name) for part in parts)
            for name in ("token_logprobs", "top_ids", "top_logprobs")
        )

    whole = asked(100)
    assert len(whole[0]) == 99 * np.dtype(np.float32).itemsize
    assert asked(1) == asked(7) == asked(64) == whole


class TestThroughTheWholeEngine:
    """The scheduler cuts, caches, shares and retracts as it does when it serves."""

    PROMPTS: ClassVar = [[5, 6, 7] * (n % 4) * 20 + tokens_of(1 + 9 * n, n) for n in range(32)]
    PARAMS: ClassVar = [replace(params(n), max_new_tokens=8) for n in range(32)]

    @pytest.fixture
    def outputs(self, tiny_model: Path, make_tiny_llama: Any) -> Callable[..., Any]:
        """Tokens and log-probabilities of each prompt, all together or one by one."""
        tiny = make_tiny_llama(dtype="bfloat16", head_dim=16, vocab_size=272)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(tiny_model / name, tiny.folder)

        def generate(
            work: Sequence[SamplingParams] = self.PARAMS, *, together: bool = True, **settings: Any
        ) -> Any:
            options = {
                "num_threads": 1,
                "max_running_requests": 32,
                "max_total_tokens": 16384,
                "swap_space": 0.0,
            }
            with LLM(str(tiny.folder), deterministic=True, **{**options, **settings}) as llm:
                if together:
                    found = llm.generate(self.PROMPTS, work)
                else:
                    found = [llm.generate(*one) for one in zip(self.PROMPTS, work, strict=True)]
            assert not any(one.error for one in found)
            return [(one.token_ids, one.logprobs) for one in found]

        return generate

    @pytest.mark.parametrize("right", [0.7, 1.0])
    def test_drafts_change_nothing(self, outputs, right):
        """To the last bit; the drafts are right, or wrong in between."""
        expected = outputs(together=False, radix_cache=False)
        texts = [[*prompt, *tokens] for prompt, (tokens, _) in zip(self.PROMPTS, expected, strict=True)]

        def next_token(known: Sequence[int]) -> int | None:
            begun = (text for text in texts if text[: len(known)] == known and len(text) > len(known))
            return next((text[len(known)] for text in begun), None)

        with proposing(next_token, right):
            assert outputs(speculative="suffix") == expected

    def test_company_cache_chunks_and_retractions_change_nothing(self, outputs):
        expected = outputs(together=False, radix_cache=False)
        assert expected[3][1] is not None
        assert outputs(chunked_prefill_size=32, chaos="retract=0.5:40") == expected

    @pytest.mark.slow
    def test_neither_do_drafts(self, outputs, monkeypatch):
        """Of answers that are easily guessed, and not always rightly."""
        num_right, wait = 0, PendingStep.wait

        def counting(pending: PendingStep) -> StepResult:
            nonlocal num_right
            result = wait(pending)
            num_right += sum(
                num - 1 for num in np.frombuffer(result.num_next_tokens, dtype=np.int32).tolist()
            )
            return result

        work = [
            SamplingParams(
                seed=n + 1, max_new_tokens=24, logit_bias={17: 30.0, 23: 30.0}, temperature=float(n % 2)
            )
            for n in range(len(self.PROMPTS))
        ]
        expected = outputs(work, together=False, radix_cache=False)
        monkeypatch.setattr(PendingStep, "wait", counting)
        assert outputs(work, speculative="ngram", chaos="retract=0.3:10") == expected
        assert num_right > 50

    @pytest.mark.slow
    def test_neither_do_they_with_rare_samplers_and_masks(self, outputs):
        """Each request with one of them, beside others, also with what a host finds from the tokens before."""
        kinds: list[dict[str, Any]] = [
            {"top_n_sigma": 1.2},
            {"typical_p": 0.7},
            {"dynatemp_range": 0.5, "xtc_probability": 0.6, "xtc_threshold": 0.02},
            {"temperature_last": True, "temperature": 1.6, "top_p": 0.8, "top_k": 20},
            {"dry_multiplier": 2.0, "dry_allowed_length": 0},
            {"bad_words_ids": tuple((a, b) for a in range(3, 90) for b in range(3, 20)), "typical_p": 0.9},
            {"allowed_token_ids": tuple(range(5, 25)), "xtc_probability": 1.0, "xtc_threshold": 0.01},
            {"temperature": 0.8, "top_p": 0.9},
        ]
        work = [
            SamplingParams(
                seed=n + 1, logprobs=2, ignore_eos=True, max_new_tokens=12, **kinds[n % len(kinds)]
            )
            for n in range(len(self.PROMPTS))
        ]
        expected = outputs(work, together=False, radix_cache=False)
        assert outputs(work) == expected
        assert outputs(work, chunked_prefill_size=32, chaos="retract=0.5:40") == expected
        assert outputs(work, speculative="ngram", num_threads=2) == expected

    @pytest.mark.slow
    def test_neither_does_anything_else(self, outputs):
        expected = outputs(together=False, radix_cache=False)
        assert outputs() == expected
        assert outputs(together=False) == expected  # with what the ones before have cached
        assert outputs(page_size=4, phases="prefill-first", num_threads=2) == expected
        assert outputs(swap_space=0.1, preemption_mode="swap", chaos="retract=0.5:40") == expected
