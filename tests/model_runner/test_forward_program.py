"""Steps with prompts as one native call against the model's own calls: the same hidden states to the last bit."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from engine.model_runner import forward_program
from engine.model_runner.forward_program import MAX_TOKENS, ProgrammedForward, programmed_forward
from engine.model_runner.kernels.cpu.library import reasons_against_library
from engine.model_runner.kernels.native_blocks import TILES_FROM
from engine.model_runner.recorded_step import NoRecordings
from engine.runtime.device_config import KernelConfig
from engine.runtime.sampling_params import SamplingParams
from engine.runtime.step_plan import MAX_DRAFT_STEP_TOKENS, StepResult

from .conftest import GREEDY, Driver, TinyModel
from .test_native_recordings import SHAPES, WITH_HEAD_DIM


@pytest.fixture(autouse=True)
def compiled():
    if reasons := reasons_against_library():
        pytest.skip("; ".join(reasons))


@pytest.fixture
def make(
    make_tiny_model: Callable[..., TinyModel], make_driver: Callable[..., Driver]
) -> Callable[..., Driver]:
    """A driver of a tiny model, none of whose decodes is recorded: all its steps run the layers in this way."""

    def make_one(model_type: str, dtype: str = "bfloat16", **settings: Any) -> Driver:
        shape = dict(SHAPES[model_type])
        if model_type in WITH_HEAD_DIM:
            shape |= {"head_dim": 16}
        elif "num_attention_heads" not in shape:
            shape |= {"num_attention_heads": 3, "num_key_value_heads": 1}
        if model_type == "llama":
            shape |= {"hidden_size": 64, "intermediate_size": 96}
        tiny = make_tiny_model(model_type, dtype=dtype, **shape)
        driver = make_driver(tiny.spec, tiny.folder, dtype=dtype, rows=12, **settings)
        driver.runner._builder._recordings = NoRecordings()
        return driver

    return make_one


class Compared:
    """In the place of a runner's `forward`: runs the program, poisons its arena, and compares with the model.

    Attributes:
        sizes: tokens of the steps that were compared.
        others: tokens of those that the program left to the model.
    """

    def __init__(self, driver: Driver) -> None:
        forward = driver.runner.forward
        assert isinstance(forward, ProgrammedForward)
        self.forward, self.model = forward, driver.runner.model
        self.sizes: list[int] = []
        self.others: list[int] = []
        driver.runner.forward = self

    def __call__(self, batch: Any) -> Tensor:
        num_tokens = len(batch.input_ids)
        arena = self.forward.program.arena
        arena.fill(0xFF)  # NaN
        ours = self.forward(batch).clone()
        untouched = all(bool((chunk.memory == 0xFF).all()) for chunk in arena._chunks)
        (self.others if untouched else self.sizes).append(num_tokens)
        theirs = self.model.forward(batch)
        assert ours.shape == theirs.shape and ours.isfinite().all()
        assert torch.equal(ours, theirs), num_tokens
        return ours


def live(driver: Driver, seed: int, samplings: Sequence[SamplingParams] = (GREEDY,)) -> list[StepResult]:
    """Requests come, alone or with a prefix of another one, in chunks of any length, beside others that decode."""
    source = random.Random(seed)
    donor = driver.start([source.randrange(3, 96) for _ in range(90)], samplings[0])
    results = [driver.step([(donor, 41)]), driver.step([(donor, 49)])]
    running = [donor]
    for _ in range(14):
        for _ in range(source.choice([0, 1, 2])):
            if len(running) < 9:
                length = source.choice([0, 0, 68, 80])
                tokens = [source.randrange(3, 96) for _ in range(source.randint(1, 60))]
                prefix = (donor, length) if length else None
                sampling = source.choice(samplings)
                running.append(driver.start(donor.tokens[:length] + tokens, sampling, prefix=prefix))
        who = running if source.random() < 0.5 else source.sample(running, source.randint(1, len(running)))
        lacking = [(req, len(req.tokens) - req.computed) for req in who]
        work = [(req, source.randint(1, lack) if lack > 1 else 1) for req, lack in lacking]
        results.append(driver.step(sorted(work, key=lambda item: item[1] == 1)))
    for req in running:
        driver.finish(req)
    return results


@pytest.mark.parametrize("model_type", SHAPES)
def test_a_program_gives_what_the_model_gives(make, model_type):
    driver = make(model_type)
    compared = Compared(driver)
    live(driver, seed=3)
    assert len(set(compared.sizes)) >= 8, compared.sizes
    assert set(compared.others) <= {1}


@pytest.mark.parametrize(
    "settings",
    [
        {"kv_cache_dtype": "int8"},
        {"deterministic": True},
        {"quantization": "int8"},
        {"quantization": "int8", "speculative": "ngram"},
    ],
    ids=str,
)
def test_so_it_does_with_other_memory_orders_and_weights(make, settings):
    driver = make("llama", **settings)
    compared = Compared(driver)
    live(driver, seed=6)
    if "quantization" not in settings:  # with AMX a program of weights in blocks begins at more tokens
        assert set(compared.others) <= {1}
    assert len(set(compared.sizes)) >= 4, compared.sizes


def test_steps_answer_the_same_whatever_is_asked_of_them(make):
    """Hidden states lie in the program's memory until the next step; whoever uses them must be done by then."""
    samplings = [
        SamplingParams(temperature=0.0, max_new_tokens=64, logprobs=3, prompt_logprobs=2),
        GREEDY,
        SamplingParams(temperature=0.9, top_p=0.8, seed=3, max_new_tokens=64, repetition_penalty=1.3),
    ]
    answers = []
    for programmed in (True, False):
        driver = make("llama")
        if not programmed:
            driver.runner.forward = driver.runner.model.forward
        results = live(driver, 7, samplings)
        answers.append([replace(result, forward_s=0.0) for result in results])
    assert any(result.prompt_logprobs for result in answers[0])
    assert answers[0] == answers[1]


def test_plans_that_take_turns_are_told_apart(make):
    """A plan belongs to its step as long as somebody holds that."""
    driver = make("gemma3_text")
    compared = Compared(driver)
    held, build = [], driver.runner._builder.build

    def holding_build(plan: Any) -> Any:
        batch = build(plan)
        held.append(batch.attention)
        return batch

    driver.runner._builder.build = holding_build
    live(driver, seed=4)
    assert len({address for step in held for address in step.plan_addresses}) >= 2 * 10, "two windows each"
    assert len(compared.sizes) >= 10


def test_other_weights_are_read_anew(make):
    driver = make("llama")
    compared = Compared(driver)
    live(driver, seed=5)
    with torch.inference_mode():
        driver.runner.model.layers[1].mlp_norm.weight.mul_(-2.0)
    live(driver, seed=5)
    assert len(compared.sizes) >= 16


def test_a_larger_step_is_the_models(make, monkeypatch):
    monkeypatch.setattr(forward_program, "MAX_TOKENS", 34)
    monkeypatch.setattr(forward_program, "_TRIED", (2, 3, 33))
    monkeypatch.setattr(forward_program, "_LEAST_TOKENS", (2,))
    driver = make("llama")
    compared = Compared(driver)
    req = driver.start(list(range(3, 80)))
    for length in (35, 34, 7):
        driver.step([(req, length)])
    assert (compared.others, compared.sizes) == ([35], [34, 7])


def test_it_is_said_once_what_there_is(make, caplog):
    with caplog.at_level("INFO"):
        make("llama")
    assert caplog.text.count("forward_program=native calls=") == 1


def test_what_is_no_native_call_is_a_reason(make, caplog):
    with caplog.at_level("INFO"):
        driver = make("llama", dtype="float32")  # products are oneDNN's or torch's
    assert not isinstance(driver.runner.forward, ProgrammedForward)
    assert "forward_program=none: " in caplog.text
    assert driver.generate([[3, 4, 5]], num=2)


class Odd:
    """The driver's model, and behind it a call whose arguments are as `change` makes them."""

    def __init__(self, driver: Driver, change: Callable[[Any, Tensor], object]) -> None:
        self.model: Any = driver.runner.model
        self.change = change

    def forward(self, batch: Any) -> Tensor:
        hidden: Tensor = self.model.forward(batch)
        self.change(self.model.add, hidden)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.model.logits(hidden)
        return logits


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda add, x: add(x[: len(x) // 2], x[: len(x) // 2]), "for 3 tokens are not on a line"),
        (lambda add, x: add(x[: len(x) % 5 + 1], x[: len(x) % 5 + 1]), "not so much per token"),
        (lambda add, x: add(x[len(x) // 2 :], x[len(x) // 2 :]), "not so much per token"),
        (lambda add, x: add(x, x) if len(x) < 999 else None, "calls other functions for 2 tokens"),
        (lambda add, x: add(x, x) if len(x) % 2 else None, "calls other functions for 3 tokens"),
        (lambda add, x: x.new_empty(99 if len(x) < 1999 else 5), "fewer tokens need more memory"),
        (lambda add, x: x.sum(), "aten.sum"),
        (lambda add, x: x.sum() if len(x) % 2 else None, "aten.sum"),
    ],
    ids=["half", "remainder", "pointer", "few", "odd", "memory", "torch", "torch of odd"],
)
def test_calls_that_are_not_so_much_per_token_are_a_reason(make, change, reason, caplog):
    driver = make("llama")
    builder = driver.runner._builder
    with caplog.at_level("INFO"):
        odd: Any = Odd(driver, change)
        forward = programmed_forward(
            KernelConfig(),
            model=odd,
            kv_pool=driver.runner.kv_pool,
            attention=builder._attention,
            num_ranks=1,
        )
    assert forward == odd.forward
    last = caplog.messages[-1]
    assert last.startswith("forward_program=none: ") and reason in last, last


def test_what_cannot_be_recorded_is_hardly_computed(make):
    """A model of torch's operations would compute a step of the largest size at each start, some for minutes."""
    reached: list[tuple[str, int]] = []

    def change(add: Any, hidden: Tensor) -> None:
        reached.append(("before", len(hidden)))
        hidden.sum()
        reached.append(("behind", len(hidden)))

    driver = make("llama")
    odd: Any = Odd(driver, change)
    pool, attention = driver.runner.kv_pool, driver.runner._builder._attention
    forward = programmed_forward(KernelConfig(), model=odd, kv_pool=pool, attention=attention, num_ranks=1)
    assert forward == odd.forward
    assert reached == [("before", 2)]
    assert driver.generate([[3, 4, 5]], num=2), "calls of the library are made again"


@pytest.mark.parametrize("least", [TILES_FROM, MAX_DRAFT_STEP_TOKENS + 1], ids=["plain", "drafts"])
def test_fewer_tokens_may_be_other_calls(make, least):
    """As those of quantised weights are on CPUs with AMX, where more tokens need no memory beside."""

    def change(add: Any, hidden: Tensor) -> None:
        workspace = hidden.new_empty((len(hidden) if len(hidden) < least else 0, 64))
        add(hidden, workspace if len(workspace) else hidden)

    driver = make("llama")
    odd: Any = Odd(driver, change)
    pool, attention = driver.runner.kv_pool, driver.runner._builder._attention
    forward = programmed_forward(KernelConfig(), model=odd, kv_pool=pool, attention=attention, num_ranks=1)
    assert isinstance(forward, ProgrammedForward)
    fits = [forward.program.fits(num) for num in (2, least - 1, least, MAX_TOKENS, MAX_TOKENS + 1)]
    assert fits == [False, False, True, True, False]


@pytest.mark.parametrize(
    ("kernels", "num_ranks", "reason"),
    [
        ({"cuda_graph": False}, 1, ""),
        ({}, 2, "ranks that share a model wait for each other"),
        ({}, 1, "attention by torch_native is not a native call"),
    ],
)
def test_where_there_can_be_none_nothing_is_tried(kernels, num_ranks, reason, caplog):
    class TorchAttention:
        name = "torch_native"

    class Model:
        def forward(self, batch: Any) -> Tensor:
            raise AssertionError("tried")

    model, attention, pool = Model(), TorchAttention(), None
    with caplog.at_level("INFO"):
        forward = programmed_forward(
            KernelConfig(**kernels),
            model=model,  # type: ignore[arg-type]
            kv_pool=pool,  # type: ignore[arg-type]
            attention=attention,  # type: ignore[arg-type]
            num_ranks=num_ranks,
        )
    assert forward == model.forward
    assert reason in caplog.text


def test_the_largest_step_is_one_of_the_traced():
    assert max(forward_program._TRIED) < MAX_TOKENS
