"""Steps with prompts as one native call against the model's own calls: the same hidden states to the last bit."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace as replaced
from functools import partial
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from engine.model_runner.attention.backend import AttentionBackend
from engine.model_runner.kernels.blocks.native_blocks import TILES_FROM
from engine.model_runner.kernels.cpu.library import reasons_against_library
from engine.model_runner.recording.programs import forward_program, program_planes
from engine.model_runner.recording.programs.forward_program import ProgrammedForward, programmed_forward
from engine.model_runner.recording.programs.program_planes import MAX_TOKENS
from engine.runtime.config.device_config import KernelConfig
from engine.runtime.sampling_params import SamplingParams
from engine.runtime.step_plan import MAX_DRAFT_STEP_TOKENS, StepResult
from tests.model_runner.conftest import GREEDY, Driver, TinyModel
from tests.model_runner.recording.programs.test_native_executor import SHAPES, WITH_HEAD_DIM


def set_constants(monkeypatch: pytest.MonkeyPatch, **values: object) -> None:
    """Of programs and their sizes, in both modules that go by them."""
    for name, value in values.items():
        modules = [module for module in (forward_program, program_planes) if hasattr(module, name)]
        assert modules, name
        for module in modules:
            monkeypatch.setattr(module, name, value)


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
        driver.run_eagerly()
        return driver

    return make_one


class Compared:
    """In the place of an executor's `forward`: runs the program, poisons its arena, and compares with the model.

    Attributes:
        sizes: tokens of the steps that were compared.
        others: tokens of those that the program left to the model.
        wanted: how many of each step's tokens were wanted.
    """

    def __init__(self, driver: Driver, *, with_all_rows: bool = True) -> None:
        """`with_all_rows`: the model's bits are to be those that it has where all its tokens are wanted."""
        forward = driver.runner.executor.forward
        assert isinstance(forward, ProgrammedForward)
        self.forward, self.model = forward, driver.runner.model
        self.sizes: list[int] = []
        self.others: list[int] = []
        self.wanted: list[int] = []
        self.with_all_rows = with_all_rows
        driver.runner.executor.forward = self

    def __call__(self, batch: Any) -> Tensor:
        num_tokens = len(batch.input_ids)
        arena = self.forward.arena
        arena.fill(0xFF)  # NaN
        result = self.forward(batch)
        assert isinstance(result, Tensor)
        ours = result.clone()
        untouched = all(bool((chunk.memory == 0xFF).all()) for chunk in arena._chunks)
        (self.others if untouched else self.sizes).append(num_tokens)
        theirs = self.model.forward(batch)
        assert ours.shape == theirs.shape and ours.isfinite().all()
        assert torch.equal(ours, theirs), num_tokens
        self.wanted.append(len(ours))
        if self.with_all_rows and batch.logits_indices is not None:
            all_rows = self.model.forward(replaced(batch, logits_indices=None))
            assert len(all_rows) == num_tokens > len(ours) == len(batch.logits_indices)
            assert torch.equal(all_rows[batch.logits_indices], ours), num_tokens
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


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("model_type", SHAPES)
def test_a_program_gives_what_the_model_gives(make, model_type):
    driver = make(model_type)
    compared = Compared(driver)
    live(driver, seed=3)
    assert len(set(compared.sizes)) >= 8, compared.sizes
    assert set(compared.others) <= {1}
    assert max(compared.wanted) < max(compared.sizes)


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize(
    "settings",
    [
        {"kv_cache_dtype": "int8"},
        {"deterministic": True},
        {"quantization": "int8"},
        {"quantization": "int8", "speculative": "ngram"},
        {"quantization": "int8", "deterministic": True},
    ],
    ids=str,
)
def test_so_it_does_with_other_memory_orders_and_weights(make, settings):
    driver = make("llama", **settings)
    # With AMX blocks have other bits from a number of rows on.
    compared = Compared(
        driver, with_all_rows="quantization" not in settings or settings.get("deterministic", False)
    )
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
            driver.runner.executor.forward = driver.runner.model.forward
        results = live(driver, 7, samplings)
        answers.append([replace(result, forward_s=0.0) for result in results])
    assert any(result.prompt_logprobs for result in answers[0])
    assert answers[0] == answers[1]


def test_prompts_whose_tokens_are_all_wanted_are_a_program_too(make):
    driver = make("llama")
    compared = Compared(driver)
    driver.generate([list(range(3, 40))], SamplingParams(temperature=0.0, prompt_logprobs=1), num=1)
    assert (compared.sizes, compared.wanted) == ([37], [37])


def test_few_and_many_wanted_tokens_may_be_two_programs(make, monkeypatch):
    """As with quantized weights on CPUs with AMX; they work in the same memory."""
    set_constants(monkeypatch, BORDERS=(TILES_FROM,))
    driver = make("llama")
    compared = Compared(driver)
    few, many = compared.forward.programs
    runs: list[Any] = []

    def counting(program: Any, run: Any, *args: Any) -> Any:
        runs.append(program)
        return run(*args)

    for program in (few, many):
        monkeypatch.setattr(program, "run", partial(counting, program, program.run))
    asking = SamplingParams(temperature=0.0, max_new_tokens=64, prompt_logprobs=2)
    for seed in (8, 9):
        live(driver, seed, [asking, GREEDY, GREEDY])
    num_many = sum(wanted >= TILES_FROM for wanted in compared.wanted)
    assert runs.count(few) > 3 and runs.count(many) == num_many > 3
    assert min(compared.sizes) >= TILES_FROM > min(compared.others)


def test_plans_that_take_turns_are_told_apart(make):
    """A plan belongs to its step as long as somebody holds that."""
    driver = make("gemma3_text")
    compared = Compared(driver)
    held = []

    def holding_forward(batch: Any) -> Tensor:
        held.append(batch.attention)
        return compared(batch)

    driver.runner.executor.forward = holding_forward
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
    set_constants(monkeypatch, MAX_TOKENS=34, _MIDDLE=33, BORDERS=(1,))
    driver = make("llama")
    compared = Compared(driver)
    req = driver.start(list(range(3, 80)))
    for length in (35, 34, 7):
        driver.step([(req, length)])
    assert (compared.others, compared.sizes) == ([35], [34, 7])


def test_it_is_said_once_what_there_is(make, caplog):
    with caplog.at_level("DEBUG"):
        make("llama")
    assert caplog.text.count("forward_program=native calls=") == 1


def test_what_is_no_native_call_is_a_reason(make, caplog):
    with caplog.at_level("DEBUG"):
        driver = make("llama", dtype="float32")  # products are oneDNN's or torch's
    assert not isinstance(driver.runner.executor.forward, ProgrammedForward)
    assert "forward_program=none: " in caplog.text
    assert driver.generate([[3, 4, 5]], num=2)


class Odd:
    """The driver's model, and behind it a call whose arguments are as `change` makes them.

    It is given `add`, the result and the number of the step's tokens.
    """

    def __init__(self, driver: Driver, change: Callable[[Any, Tensor, int], object]) -> None:
        self.model: Any = driver.runner.model
        self.change = change

    def forward(self, batch: Any) -> Tensor:
        hidden: Tensor = self.model.forward(batch)
        self.change(self.model.add, hidden, len(batch.input_ids))
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.model.logits(hidden)
        return logits


@pytest.mark.fast_cases(4)
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda add, x, num: add(x[: len(x) & -2 or 1], x[: len(x) & -2 or 1]), ": 3 tokens, 3 with logits"),
        (
            lambda add, x, num: add(x[: num * len(x) >> 11 or 1], x[: num * len(x) >> 11 or 1]),
            ": 2 tokens, 2",
        ),
        (
            lambda add, x, num: add(x[: len(x) % 5 + 1], x[: len(x) % 5 + 1]),
            "not linear in the number of tokens",
        ),
        (lambda add, x, num: add(x[len(x) // 2 :], x[len(x) // 2 :]), "not linear in the number of tokens"),
        (
            lambda add, x, num: add(x, x) if len(x) < 999 else None,
            "other functions for 2 tokens, 1 with logits",
        ),
        (lambda add, x, num: add(x, x) if num % 2 else None, "other functions for 3 tokens, 3 with logits"),
        (lambda add, x, num: x.new_empty(99 if len(x) < 1999 else 5), "fewer tokens need more memory"),
        (lambda add, x, num: x.new_empty(99 if num < 1999 else 5), "fewer tokens need more memory"),
        (lambda add, x, num: x.sum(), "aten.sum"),
        (lambda add, x, num: x.sum() if num % 2 else None, "aten.sum"),
    ],
    ids=[
        "even",
        "product",
        "remainder",
        "pointer",
        "few",
        "odd",
        "memory",
        "tokens",
        "torch",
        "torch of odd",
    ],
)
def test_calls_that_are_not_so_much_per_token_are_a_reason(make, change, reason, caplog):
    driver = make("llama")
    with caplog.at_level("DEBUG"):
        odd: Any = Odd(driver, change)
        forward = programmed_forward(
            KernelConfig(),
            model=odd,
            kv_pool=driver.runner.kv_pool,
            attention=driver.runner.executor.attention,
            num_ranks=1,
        )
    assert forward == odd.forward
    last = caplog.messages[-1]
    assert last.startswith("forward_program=none: ") and reason in last, last


def test_what_cannot_be_recorded_is_hardly_computed(make):
    """A model of torch's operations would compute a step of the largest size at each start, some for minutes."""
    reached: list[tuple[str, int]] = []

    def change(add: Any, hidden: Tensor, num_tokens: int) -> None:
        reached.append(("before", len(hidden)))
        hidden.sum()
        reached.append(("behind", len(hidden)))

    driver = make("llama")
    odd: Any = Odd(driver, change)
    pool, attention = driver.runner.kv_pool, driver.runner.executor.attention
    forward = programmed_forward(KernelConfig(), model=odd, kv_pool=pool, attention=attention, num_ranks=1)
    assert forward == odd.forward
    assert reached == [("before", 1)]
    assert driver.generate([[3, 4, 5]], num=2), "calls of the library are made again"


@pytest.mark.parametrize("least", [TILES_FROM, MAX_DRAFT_STEP_TOKENS + 1], ids=["plain", "drafts"])
def test_fewer_tokens_may_be_other_calls(make, least):
    """As those of quantized weights are on CPUs with AMX, where more tokens need no memory beside."""

    def change(add: Any, hidden: Tensor, num_tokens: int) -> None:
        for number in (num_tokens, len(hidden)):
            workspace = hidden.new_empty((number if number < least else 0, 64))
            add(*[workspace if len(workspace) else hidden] * 2)

    driver = make("llama")
    odd: Any = Odd(driver, change)
    pool, attention = driver.runner.kv_pool, driver.runner.executor.attention
    forward = programmed_forward(KernelConfig(), model=odd, kv_pool=pool, attention=attention, num_ranks=1)
    assert isinstance(forward, ProgrammedForward)
    few, many = (program.steps for program in forward.programs)
    assert (few.least_tokens, few.least_logits, few.most_logits) == (least, 1, least - 1)
    assert (many.least_tokens, many.least_logits, many.most_logits) == (least, least, MAX_TOKENS)


@pytest.mark.parametrize(
    ("kernels", "num_ranks", "reason"),
    [
        ({"record_steps": False}, 1, ""),
        ({}, 2, "tensor-parallel ranks wait for each other"),
        ({}, 1, "attention by torch_native is not a native call"),
    ],
)
def test_where_there_can_be_none_nothing_is_tried(kernels, num_ranks, reason, caplog):
    class TorchAttention(AttentionBackend):
        name = "torch_native"

        def __init__(self) -> None:
            pass

    class Model:
        def forward(self, batch: Any) -> Tensor:
            raise AssertionError("tried")

    model, attention, pool = Model(), TorchAttention(), None  # type: ignore[abstract]
    with caplog.at_level("DEBUG"):
        forward = programmed_forward(
            KernelConfig(**kernels),
            model=model,  # type: ignore[arg-type]
            kv_pool=pool,  # type: ignore[arg-type]
            attention=attention,
            num_ranks=num_ranks,
        )
    assert forward == model.forward
    assert reason in caplog.text


@pytest.mark.parametrize("border", program_planes.BORDERS)
def test_every_step_belongs_to_one_program_at_most(border):
    all_steps = program_planes.Steps.beside(border)
    for tokens in (1, 2, 31, 32, 33, 64, 65, MAX_TOKENS, MAX_TOKENS + 1):
        for wanted in {1, 2, 31, 32, 64, 65, tokens}:
            if wanted <= tokens:
                size = program_planes.StepSize(tokens, wanted)
                num = sum(steps.include(size) for steps in all_steps)
                assert num == (max(2, border) <= tokens <= MAX_TOKENS), size
    for steps in all_steps:
        tried = steps.tried()
        assert len(set(tried)) == len(tried) and steps.largest not in tried
        assert {size.num_logits for size in tried} > {steps.least_logits + 1}
