"""`Player`: plays the scheduler for one model runner, in the shape of SmolLM2-135M, so that steps are timed alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import torch

    from engine.model_runner.memory.kv_pool import KVPool
    from engine.model_runner.model_runner import ModelRunner
    from engine.models.spec.model_spec import ModelSpec
    from engine.runtime.feasibility import Capacity
    from engine.runtime.step_plan import StepPlan

HIDDEN: Final = 576
INNER: Final = 1536
HEADS: Final = 9
KV_HEADS: Final = 3
HEAD_DIM: Final = 64
LAYERS: Final = 30
VOCAB: Final = 49_152
PAGE_SIZE: Final = 16
MAX_LEN: Final = 2048
MAX_REQUESTS: Final = 64


class Player:
    """Requests of random tokens, pages in sequence."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.step_id = 0
        self.finished: list[int] = []

    def step(
        self, lens: Sequence[int], new: int, tokens: Sequence[Sequence[int]] | None, shared: int = 0
    ) -> None:
        """Compute the last `new` tokens of requests with these lengths; see `plan`."""
        self.runner.launch(self.plan(lens, new, tokens, shared)).wait()

    def plan(
        self,
        lens: Sequence[int],
        new: int,
        tokens: Sequence[Sequence[int]] | None,
        shared: int = 0,
        first_row: int = 0,
        adapters: Sequence[int] | None = None,
    ) -> StepPlan:
        """The plan of a step that computes the last `new` tokens of requests with these lengths, in adjacent rows.

        Args:
            tokens: of each, if they start with this step.
            shared: tokens at the beginning that are in the pages of row 0.
            adapters: the adapter slot of each that starts, 0 for none; the adapter of that number is loaded into it.
        """
        import numpy as np

        from engine.runtime.sampling_params import SamplingParams
        from engine.runtime.step_plan import ForwardMode, NewReq, StepPlan

        def int32(values: Any) -> bytes:
            return np.asarray(values, dtype=np.int32).tobytes()

        def slots(row: int, start: int, stop: int) -> Any:
            at = np.arange(start, stop)
            return np.where(at < shared, at, row * MAX_LEN + at) + PAGE_SIZE

        self.step_id += 1
        sampling = SamplingParams(temperature=0.0, seed=0, max_new_tokens=MAX_LEN, ignore_eos=True)
        rows = range(first_row, first_row + len(lens))
        slot_of = dict(zip(rows, adapters or [0] * len(rows), strict=True))
        new_reqs = [
            NewReq(
                f"r{row}",
                row,
                int32(mine),
                len(mine),
                int32(slots(row, 0, len(mine) - new)),
                sampling,
                adapter_slot=slot_of[row],
            )
            for row, mine in zip(rows, tokens or (), strict=False)
        ]
        plan = StepPlan(
            step_id=self.step_id,
            mode=ForwardMode.DECODE if new == 1 else ForwardMode.EXTEND,
            rows=int32(rows),
            num_computed_tokens=int32([length - new for length in lens]),
            num_scheduled_tokens=int32([new] * len(lens)),
            out_cache_loc=int32(
                np.concatenate(
                    [slots(row, length - new, length) for row, length in zip(rows, lens, strict=True)]
                )
            ),
            samples=bytes([1] * len(lens)),
            total_num_scheduled_tokens=new * len(lens),
            new_reqs=tuple(new_reqs),
            finished_rows=int32(self.finished),
            adapter_loads=b"".join(int32([slot, slot]) for slot in dict.fromkeys(slot_of.values()) if slot)
            if new_reqs
            else b"",
        )
        self.finished = []
        return plan


def make_player(num_threads: int, recorded: bool = True) -> Player:
    """A runner with random weights; `recorded`: it records and replays steps if it can."""
    from engine.model_runner.load import load_model_runner
    from engine.models.source import ModelSource
    from engine.runtime.config.device_config import KernelConfig
    from engine.runtime.config.engine_config import CacheConfig, EngineConfig, ModelConfig

    config = EngineConfig(
        model=ModelConfig(
            dtype="bfloat16", device="cpu", num_threads=num_threads, load_format="dummy", seed=1
        ),
        cache=CacheConfig(page_size=PAGE_SIZE),
        kernels=KernelConfig(record_steps="auto" if recorded else False),
    )
    source = ModelSource("hf", "dummy", "benchmark")
    return Player(load_model_runner(config, source, model_spec(LAYERS), capacity(VOCAB)))


def capacity(vocab_size: int) -> Capacity:
    """Room for all requests of a player."""
    from engine.runtime.feasibility import Capacity

    return Capacity(MAX_LEN, MAX_REQUESTS * MAX_LEN // PAGE_SIZE, PAGE_SIZE, MAX_REQUESTS, vocab_size, 0)


def model_spec(num_layers: int) -> ModelSpec:
    """The spec of SmolLM2-135M, with so many layers."""
    from engine.models.spec.model_spec import ModelSpec

    return ModelSpec(
        model_type="llama",
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_layers=num_layers,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        rms_norm_eps=1e-5,
        rope_theta=1e5,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        torch_dtype="bfloat16",
    )


def make_kv_pool(num_layers: int, num_pages: int, dtype: torch.dtype) -> KVPool:
    """A KV pool with random keys and values in all pages."""
    import torch

    from engine.model_runner.memory.kv_pool import KVPool

    pool = KVPool(
        num_layers=num_layers,
        num_pages=num_pages,
        page_size=PAGE_SIZE,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        dtype=dtype,
        device=torch.device("cpu"),
    )
    for numbers in (*pool.k, *pool.v):
        numbers.normal_() if dtype.is_floating_point else numbers.random_(-127, 128)
    for scales in (*pool.k_scale, *pool.v_scale):
        scales.fill_(1 / 127)
    return pool
