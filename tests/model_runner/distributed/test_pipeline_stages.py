"""Pipeline stages against the whole model, in one process: the same bits in bfloat16."""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from engine.model_runner import assembly, load
from engine.model_runner.kernels.cpu.library import reasons_against_library
from engine.model_runner.layers.decoder import Decoder
from engine.model_runner.model_runner import NOT_FINITE
from engine.model_runner.op_selection import PROVIDERS, select_ops
from engine.model_runner.recording.graphs.graph_sizes import sizes_to_record
from engine.model_runner.recording.programs.forward_program import ProgrammedForward
from engine.model_runner.recording.programs.native_executor import NativeExecutor
from engine.runtime.config.device_config import ParallelConfig
from engine.runtime.feasibility import Capacity
from engine.runtime.sampling_params import SamplingParams
from engine.runtime.step_plan import RowUpdate, TokenMasks
from tests.model_runner.conftest import Driver
from tests.model_runner.distributed.test_tensor_parallel import GREEDY, MOE, PROMPTS, SEEDED, load_rank
from tests.model_runner.distributed.thread_group import on_ranks
from tests.model_runner.distributed.thread_wire import StageThreads, load_stages
from tests.model_runner.recording.recording_device import DeviceAttention, RecordingDevice

RECORDABLE = {"num_hidden_layers": 4, "head_dim": 16, "hidden_size": 96, "intermediate_size": 96}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "tied": ("llama", {**RECORDABLE, "tie_word_embeddings": True}),
    "norms of heads, experts, dense layers": (
        "qwen3_moe",
        {**MOE, "num_hidden_layers": 4, "mlp_only_layers": [2], "dtype": "bfloat16"},
    ),
    "windows, two rotary tables": (
        "gemma3_text",
        {"head_dim": 16, "num_hidden_layers": 6, "sliding_window": 16, "tie_word_embeddings": True},
    ),
    "norms after blocks": ("olmo2", {"num_hidden_layers": 3}),
    "blocks in parallel": ("cohere2", {"num_hidden_layers": 3, "sliding_window": 9}),
}


def driver_of(staged: StageThreads) -> Driver:
    return Driver(staged.runner, staged.runners[0].capacity)


def models_of(staged: StageThreads) -> list[Decoder]:
    models = [runner.model for runner in staged.runners]
    return [model for model in models if isinstance(model, Decoder)]


def generate(staged: StageThreads, params: SamplingParams, num: int = 6) -> tuple[list[list[int]], list[Any]]:
    """What the prompts are continued with, in chunks, and the log-probabilities of all steps."""
    driver, logprobs = driver_of(staged), []

    def step(*args: Any, **options: Any) -> Any:
        result = Driver.step(driver, *args, **options)
        logprobs.append((result.logprobs, result.prompt_logprobs))
        return result

    driver.step = step  # type: ignore[method-assign]
    wanted = msgspec.structs.replace(params, logprobs=3, prompt_logprobs=2)
    try:
        return driver.generate(PROMPTS, wanted, num=num, chunk=7), logprobs
    finally:
        staged.close()


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("pp", [2, 3])
def test_recorded_stages_say_what_the_whole_model_says(make_tiny_model, pp):
    tiny = make_tiny_model("llama", dtype="bfloat16", **RECORDABLE)
    for params in (GREEDY, SEEDED):
        staged = load_stages(tiny, ParallelConfig(pp=pp))
        assert generate(staged, params) == generate(load_stages(tiny, ParallelConfig()), params)
        if not reasons_against_library():
            for runner in staged.runners:
                assert isinstance(runner.executor, NativeExecutor) and runner.executor.num_replayed
                assert isinstance(runner.executor.eager.forward, ProgrammedForward)


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize(("model_type", "options"), MODELS.values(), ids=MODELS.keys())
def test_models_of_all_kinds(make_tiny_model, model_type, options):
    tiny = make_tiny_model(model_type, **options)
    whole = generate(load_stages(tiny, ParallelConfig()), SEEDED)

    assert generate(load_stages(tiny, ParallelConfig(pp=3)), SEEDED) == whole


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantized_while_loading(make_tiny_model, quantization):
    if reasons := reasons_against_library():
        pytest.skip("; ".join(reasons))
    tiny = make_tiny_model("llama", **RECORDABLE, tie_word_embeddings=True)
    whole = generate(load_stages(tiny, ParallelConfig(), quantization=quantization), GREEDY)

    assert generate(load_stages(tiny, ParallelConfig(pp=2), quantization=quantization), GREEDY) == whole


def test_with_batch_invariant_kernels(make_tiny_model):
    if reasons := reasons_against_library():
        pytest.skip("; ".join(reasons))
    tiny = make_tiny_model("llama", **RECORDABLE)
    whole = generate(load_stages(tiny, ParallelConfig(), deterministic=True), GREEDY)

    assert generate(load_stages(tiny, ParallelConfig(pp=2), deterministic=True), GREEDY) == whole


def test_two_stages_of_two_ranks_say_what_two_ranks_say(make_tiny_model):
    tiny = make_tiny_model("llama", **RECORDABLE)

    def tokens(group: Any) -> list[list[int]]:
        runner, capacity = load_rank(tiny, group, dtype="bfloat16")
        return Driver(runner, capacity).generate(PROMPTS, SEEDED, num=6, chunk=7)

    expected = on_ranks(2, tokens)[0]
    staged = load_stages(tiny, ParallelConfig(pp=2, tp=2))

    assert driver_of(staged).generate(PROMPTS, SEEDED, num=6, chunk=7) == expected
    staged.close()


def test_a_stage_has_only_its_part(make_tiny_model):
    tiny = make_tiny_model("llama", **RECORDABLE)
    staged = load_stages(tiny, ParallelConfig(pp=3, pp_layers="1,2,1"))
    staged.close()

    models = models_of(staged)
    assert [len(model.layers) for model in models] == [1, 2, 1]
    assert [model.embedding is not None for model in models] == [True, False, False]
    assert [model.norm is not None and model.head is not None for model in models] == [False, False, True]
    assert [len(runner.kv_pool.k) for runner in staged.runners] == [1, 2, 1]
    assert len({runner.kv_pool.k[0].shape for runner in staged.runners}) == 1


def test_a_tied_table_is_on_both_ends(make_tiny_model):
    tiny = make_tiny_model("llama", **RECORDABLE, tie_word_embeddings=True)
    staged = load_stages(tiny, ParallelConfig(pp=2))
    staged.close()

    first, last = models_of(staged)
    assert first.head is None and last.embedding is None and last.head is not None


def test_pages_move_on_every_stage(make_tiny_model):
    """Copies of pages, and pages swapped to the host and back."""
    tiny = make_tiny_model("llama", **RECORDABLE)
    capacity = Capacity(256, 32, 4, 4, tiny.spec.vocab_size, num_host_pages=8)

    def run(parallel: ParallelConfig) -> list[int]:
        staged = load_stages(tiny, parallel, capacity=capacity)
        driver = driver_of(staged)
        req = driver.start(PROMPTS[0], GREEDY)
        driver.step([(req, len(req.tokens))])
        host_pages = range(len(req.pages))
        driver.step([], swap_outs=list(zip(req.pages, host_pages, strict=True)))
        for runner in staged.runners:
            for pool in (*runner.kv_pool.k, *runner.kv_pool.v):
                pool.fill_(torch.nan)
        moved, copied = ([driver.pages.pop() for _ in host_pages] for _ in range(2))
        driver.step([], swap_ins=list(zip(host_pages, moved, strict=True)))
        driver.step([], page_copies=list(zip(moved, copied, strict=True)))
        req.pages[:] = copied
        slots = np.array(driver.slots(copied, 0, req.computed), dtype=np.int32).tobytes()
        driver.step([(req, 1)], row_updates=(RowUpdate(req.row, 0, slots),))
        while len(req.output) < 8:
            driver.step([(req, 1)])
        staged.close()
        return req.output

    assert run(ParallelConfig(pp=2)) == run(ParallelConfig())


@pytest.mark.fast_cases(3)
@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("chunk", [7, 1 << 30], ids=["a chunk", "a prompt"])
def test_values_of_any_stage_that_are_not_finite_reach_the_result(make_tiny_model, stage, chunk):
    tiny = make_tiny_model("llama", num_hidden_layers=3)
    staged = load_stages(tiny, ParallelConfig(pp=3))
    driver = driver_of(staged)
    layer: Any = models_of(staged)[stage].layers[0]
    layer.mlp_norm.weight.fill_(torch.nan)
    damaged = driver.start(list(range(2, 40)), GREEDY)

    result = driver.step([(damaged, min(chunk, len(damaged.tokens)))])

    staged.close()
    assert result.errors == {0: NOT_FINITE}


def test_masks_of_grammars_are_those_of_the_last_stage(make_tiny_model):
    tiny = make_tiny_model("llama", **RECORDABLE)
    staged = load_stages(tiny, ParallelConfig(pp=2))
    driver, told = driver_of(staged), []

    class Masks:
        """Allows two tokens in the second row of logits."""

        def __call__(self) -> TokenMasks:
            bits = np.zeros((1, -(-tiny.spec.vocab_size // 32)), dtype=np.int32)
            bits[0, 0] = 1 << 5 | 1 << 7
            return TokenMasks(np.array([1]), bits)

        def unmasked(self, token_ids: Any) -> None:
            told.extend(token_ids.tolist())

    free, masked = driver.start(PROMPTS[0], GREEDY), driver.start(PROMPTS[1], GREEDY)
    plan = driver.plan([(free, len(free.tokens)), (masked, len(masked.tokens))])
    result = staged.runner.launch(plan, masks=Masks()).wait()  # type: ignore[arg-type]
    staged.close()

    alone = generate(load_stages(tiny, ParallelConfig()), GREEDY, num=1)[0]
    free_token, token = np.frombuffer(result.next_token_ids, dtype=np.int32).tolist()
    assert token in (5, 7)
    assert [[free_token], told] == alone[:2]


def test_tokens_go_to_the_first_stage_with_a_later_plan(make_tiny_model):
    """With two steps in flight the first stage of the second one does not wait for the first one's tokens."""
    tiny = make_tiny_model("llama", **RECORDABLE)
    staged = load_stages(tiny, ParallelConfig(pp=2))
    driver = driver_of(staged)
    one, other = driver.start(PROMPTS[0], GREEDY), driver.start(PROMPTS[1], GREEDY)

    def launch(req: Any, count: int) -> Any:
        pending = staged.runner.launch(driver.plan([(req, count)]))
        req.computed += count
        return pending

    def settle(req: Any, pending: Any) -> None:
        req.tokens += np.frombuffer(pending.wait().next_token_ids, dtype=np.int32).tolist()

    first, second = launch(one, len(one.tokens)), launch(other, len(other.tokens))
    for _ in range(5):
        settle(one, first)
        first = launch(one, 1)
        settle(other, second)
        second = launch(other, 1)
    settle(one, first)
    settle(other, second)
    staged.close()

    assert [one.output, other.output] == generate(load_stages(tiny, ParallelConfig()), GREEDY)[0][:2]
    sent = [(message.sampled.rows, message.sampled.token_ids) for message in staged.launched]
    assert [len(rows) // 4 for rows, _ in sent] == [0, 0, *[1] * 10]


def test_cuda_graphs_of_stages_are_replayed(make_tiny_model):
    """On a device that records operators of torch; also with padding, for which nothing arrives."""
    tiny = make_tiny_model("llama", num_hidden_layers=3)
    devices: list[RecordingDevice] = []

    def make_device(_device: torch.device) -> RecordingDevice:
        devices.append(RecordingDevice())
        return devices[-1]

    def load_all(pp: int) -> Driver:
        capacity = Capacity(128, 200, 4, 12, tiny.spec.vocab_size, num_stages=pp)
        staged = load_stages(tiny, ParallelConfig(pp=pp), dtype="float32", capacity=capacity)
        return driver_of(staged)

    prompts = [[(7 * n + 5 * k) % 96 for k in range(3 + 2 * n)] for n in range(9)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assembly, "select_backend", lambda *_args: DeviceAttention)
        plain = {op: providers[-1:] for op, providers in PROVIDERS.items()}
        patch.setattr(load, "select_ops", lambda target: select_ops(target, plain))
        eager = load_all(1)
        sizes = partial(sizes_to_record, device=torch.device("cuda"))
        patch.setattr(load, "sizes_to_record", lambda kernels, num, _, **more: sizes(kernels, num, **more))
        patch.setattr(assembly, "CudaGraphDevice", make_device)
        staged = load_all(3)

    for num in (1, 9):
        assert staged.generate(prompts[:num], SEEDED, num=4) == eager.generate(prompts[:num], SEEDED, num=4)
    # Six decodes, and one prompt in two pieces: the others are larger than any recording.
    assert [device.num_replayed for device in devices] == [8, 8, 8]
