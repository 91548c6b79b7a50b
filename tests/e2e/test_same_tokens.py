"""One promise: the same request gives the same tokens, whatever else goes on in the engine. In fp32, on CPU.

The reference is each request alone, without cache and without chunks. Greedy requests show wrong logits, seeded ones
also that the noise belongs to the request and not to the batch.
"""

from __future__ import annotations

import itertools
import random
from functools import partial

import msgspec
import pytest

from engine import LLM, SamplingParams
from engine.models.tokenizer.tokenizer import Tokenizer

NUM_NEW = 32
PROMPT_LENS = (1, 16, 33, 130)
PARAMS = (
    SamplingParams(temperature=0),
    SamplingParams(temperature=1, seed=11),
    SamplingParams(temperature=0.8, top_k=40, top_p=0.9, min_p=0.02, seed=12),
    SamplingParams(temperature=0, repetition_penalty=1.3, frequency_penalty=0.5, presence_penalty=0.5),
    SamplingParams(temperature=1.2, repetition_penalty=1.1, logit_bias={40: 4.0, 41: -100.0}, seed=13),
)
TINY_POOL = {"max_total_tokens": 400, "schedule_conservativeness": 0.1}
"""What holds a few of the requests below when they are admitted, and not when they have grown."""


class Probe(msgspec.Struct, frozen=True):
    """One of the requests that are compared."""

    prompt: list[int]
    params: SamplingParams


def with_length(params: SamplingParams, num_new: int) -> SamplingParams:
    """Exactly so many tokens. Not by `ignore_eos`: the scheduler sets all memory aside for such requests, and never
    has to retract them."""
    return msgspec.structs.replace(params, max_new_tokens=num_new, min_new_tokens=num_new)


def make_probes(vocab_size: int, num_new: int = NUM_NEW) -> list[Probe]:
    """Every kind of sampling with prompts of several lengths, none a multiple of another's beginning."""
    source = random.Random(0)
    return [
        Probe(
            [source.randrange(3, vocab_size) for _ in range(prompt_len)],
            with_length(params, num_new),
        )
        for params, prompt_len in itertools.product(PARAMS, PROMPT_LENS)
    ]


def make_others(vocab_size: int, count: int) -> list[Probe]:
    """Requests that only disturb: random lengths, all kinds of sampling, half of them with one common beginning."""
    source = random.Random(1)
    common = [source.randrange(3, vocab_size) for _ in range(48)]
    others = []
    for i in range(count):
        own = [source.randrange(3, vocab_size) for _ in range(source.randrange(1, 60))]
        params = with_length(PARAMS[i % len(PARAMS)], source.randrange(1, 60))
        others.append(Probe((common if i % 2 else []) + own, params))
    return others


def generate(llm, probes):
    return llm.generate([probe.prompt for probe in probes], [probe.params for probe in probes])


def tokens(outputs):
    return [output.token_ids for output in outputs]


@pytest.fixture(scope="module")
def open_llm(model):
    """An engine with the small model in fp32; one thread, so that machines do not differ."""
    return lambda **settings: LLM(str(model), dtype="float32", num_threads=1, **settings)


@pytest.fixture(scope="module")
def probes(model):
    return make_probes(Tokenizer.from_folder(model).vocab_size)


@pytest.fixture(scope="module")
def others(model):
    return make_others(Tokenizer.from_folder(model).vocab_size, 32)


@pytest.fixture(scope="module")
def reference(open_llm, probes):
    """Each request alone."""
    with open_llm(radix_cache=False, chunked_prefill_size=-1, max_total_tokens=2048) as llm:
        outputs = [generate(llm, [probe])[0] for probe in probes]
    assert {len(output.token_ids) for output in outputs} == {NUM_NEW}
    return tokens(outputs)


@pytest.mark.slow
def test_the_model_is_sensitive_enough_for_these_tests(open_llm, probes, reference):
    """Another first token of the longest prompt, another seed, a change at a page's border: another answer."""
    index = max(range(len(probes)), key=lambda i: (len(probes[i].prompt), -i))
    prompt, greedy = probes[index].prompt, probes[index].params
    seeded = msgspec.structs.replace(greedy, temperature=1.0, seed=11)
    with open_llm() as llm:
        for place in (0, 15, 16, 64, len(prompt) - 1):
            changed = [*prompt[:place], (prompt[place] + 1) % 300 + 3, *prompt[place + 1 :]]
            assert llm.generate(changed, greedy).token_ids[:8] != reference[index][:8], place
        first = llm.generate(prompt, seeded).token_ids
        assert first != llm.generate(prompt, msgspec.structs.replace(seeded, seed=12)).token_ids
    assert len(set(map(tuple, reference))) == len(reference)


def test_in_one_batch(open_llm, probes, reference):
    with open_llm(radix_cache=False) as llm:
        assert tokens(generate(llm, probes)) == reference


@pytest.mark.slow
def test_among_32_others(open_llm, probes, others, reference):
    with open_llm() as llm:
        for start in range(0, len(probes), 4):
            outputs = generate(llm, [*others[:16], *probes[start : start + 4], *others[16:]])
            assert tokens(outputs[16:-16]) == reference[start : start + 4]


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("chunk", [16, 48])
def test_chunked(open_llm, probes, reference, chunk):
    with open_llm(chunked_prefill_size=chunk, radix_cache=False) as llm:
        for probe, alone in zip(probes, reference, strict=True):
            if len(probe.prompt) > chunk:
                assert generate(llm, [probe])[0].token_ids == alone
        assert tokens(generate(llm, probes)) == reference


def test_with_overlapped_steps(open_llm, probes, reference):
    with open_llm(
        overlap=True, **TINY_POOL, page_size=4, max_running_requests=12, chunked_prefill_size=32
    ) as llm:
        outputs = generate(llm, probes)
        done = llm.flush_cache()
    assert sum(output.usage.num_retractions for output in outputs) > 0
    assert tokens(outputs) == reference
    assert done.kept_tokens == 0


def test_with_a_prefix_hit(open_llm, probes, reference):
    with open_llm(page_size=4) as llm:
        generate(llm, probes)
        again = generate(llm, probes)
        assert [output.usage.cached_tokens for output in again] == [
            (len(probe.prompt) - 1) // 4 * 4 for probe in probes
        ]
        assert tokens(again) == reference
        # The pages of answers are cached, too: a longer prompt that begins with prompt and answer.
        for probe, ids in zip(probes, reference, strict=True):
            if probe.params == with_length(PARAMS[0], NUM_NEW):
                output = llm.generate(probe.prompt + ids[:-8], with_length(PARAMS[0], 8))
                assert output.usage.cached_tokens > len(probe.prompt)
                assert output.token_ids == ids[-8:]


def test_after_retractions(open_llm, probes, reference):
    with open_llm(**TINY_POOL, page_size=4, max_running_requests=12) as llm:
        outputs = generate(llm, probes)
    retracted = [output for output in outputs if output.usage.num_retractions]
    assert len(retracted) >= 5, "the pool is too large for this test"
    assert any(
        probe.params.seed for probe, output in zip(probes, outputs, strict=True) if output in retracted
    )
    assert tokens(outputs) == reference
    assert {output.usage.completion_tokens for output in outputs} == {NUM_NEW}


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    ("page_size", "phases", "radix_cache"),
    [
        (1, "mixed", True),
        (1, "prefill-first", False),
        (4, "mixed", False),
        (4, "prefill-first", True),
        (16, "mixed", True),
        (16, "prefill-first", False),
        pytest.param(1, "mixed", False, marks=pytest.mark.slow),
        pytest.param(1, "prefill-first", True, marks=pytest.mark.slow),
        pytest.param(4, "mixed", True, marks=pytest.mark.slow),
        pytest.param(4, "prefill-first", False, marks=pytest.mark.slow),
        pytest.param(16, "mixed", False, marks=pytest.mark.slow),
        pytest.param(16, "prefill-first", True, marks=pytest.mark.slow),
    ],
)
def test_with_all_of_it_at_once(open_llm, probes, others, reference, page_size, phases, radix_cache):
    settings = TINY_POOL | {
        "page_size": page_size,
        "phases": phases,
        "radix_cache": radix_cache,
        "chunked_prefill_size": 32,
        "max_running_requests": 12,
        "schedule_policy": "lpm" if page_size == 4 else "fcfs",
    }
    mingled = [request for pair in itertools.zip_longest(probes, others) for request in pair if request]
    with open_llm(**settings) as llm:
        outputs = generate(llm, mingled)
        done = llm.flush_cache()
    assert sum(output.usage.num_retractions for output in outputs) > 0
    found = {id(request): output.token_ids for request, output in zip(mingled, outputs, strict=True)}
    assert [found[id(probe)] for probe in probes] == reference
    assert done.kept_tokens == 0


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.timeout(600)
def test_on_the_default_model():
    """Eight prompts of the model's own kind: alone, together, chunked, from the cache, and after retractions."""
    prompts = [
        "The capital of France is",
        "def fibonacci(n):\n",
        "Once upon a time, in a land far away,",
        "Water boils at",
        "List three colors:",
        "The quick brown fox jumps over the lazy dog. " * 8,
        "In 1969, Neil Armstrong",
        "To make a good cup of tea, first",
    ]
    params = [
        SamplingParams(temperature=0 if i % 2 else 1.0, seed=100 + i, max_new_tokens=48, min_new_tokens=48)
        for i in range(len(prompts))
    ]
    # One thread: two would wait for each other all the time where other processes have the cores.
    open_llm = partial(LLM, "default", dtype="float32", num_threads=1, max_model_len=512)
    with open_llm(radix_cache=False, max_total_tokens=1024) as llm:
        alone = [llm.generate(prompt, own).token_ids for prompt, own in zip(prompts, params, strict=True)]
        assert tokens(llm.generate(prompts, params)) == alone
    with open_llm(chunked_prefill_size=16, page_size=4) as llm:
        assert tokens(llm.generate(prompts, params)) == alone
        again = llm.generate(prompts, params)
        assert tokens(again) == alone
        assert sum(output.usage.cached_tokens for output in again) > 80
    with open_llm(
        page_size=4,
        max_total_tokens=320,
        max_running_requests=8,
        schedule_conservativeness=0.1,
    ) as llm:
        outputs = llm.generate(prompts, params)
        assert sum(output.usage.num_retractions for output in outputs) > 0
        assert tokens(outputs) == alone
