"""`Eagle3Head` against the same arithmetic in plain torch, in float32."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from msgspec import structs
from torch import Tensor

from engine.launch.resolve.drafter import _memory
from engine.model_runner.attention.backend import BatchLayout
from engine.model_runner.attention.torch_native import TorchNativeAttention
from engine.model_runner.drafting.eagle3 import Eagle3Head, load_eagle3_head
from engine.model_runner.forward_batch import ForwardBatch
from engine.model_runner.kernels.avoided import NOTHING_AVOIDED
from engine.model_runner.load import load_model_runner
from engine.model_runner.memory.io_buffers import InputBuffers
from engine.model_runner.memory.kv_pool import KVPool
from engine.models.eagle3_head import Eagle3Spec, needed_tensors, read_eagle3_head
from engine.models.source import ModelSource
from engine.models.spec.model_spec import ModelSpec
from engine.runtime.config.engine_config import EngineConfig, ModelConfig, SchedulerConfig
from engine.runtime.errors import ConfigError
from engine.runtime.feasibility import Capacity
from tests.model_runner.conftest import Driver, TinyModel, engine_config
from tests.model_runner.drafted_steps import drafted

from .drafters import check_two_ranks, draft, recorded_and_not, share
from .eagle3_files import DRAFTED, HEAD_DIM, HEADS, HIDDEN, KV_HEADS, write_head

CPU = torch.device("cpu")
NUM_TOKENS = 11


def load(folder: Path, driver: Driver, model: TinyModel) -> tuple[Eagle3Head, Eagle3Spec]:
    spec = read_eagle3_head(folder, model.spec)
    head = load_eagle3_head(
        folder,
        spec,
        driver.runner.model,
        max_model_len=64,
        dtype=torch.float32,
        device=CPU,
        avoid=NOTHING_AVOIDED,
    )
    return head, spec


@pytest.fixture
def target(
    make_driver: Callable[..., Driver], make_tiny_llama: Callable[..., TinyModel]
) -> tuple[Driver, TinyModel]:
    model = make_tiny_llama(hidden_size=HIDDEN, num_hidden_layers=4, num_attention_heads=4)
    return make_driver(model.spec, model.folder), model


class Paged:
    """The keys and values of one request of the head, whose tokens are given in parts."""

    def __init__(self, spec: Eagle3Spec) -> None:
        layer = spec.layer
        self.pool = KVPool(
            num_layers=1,
            num_pages=8,
            page_size=4,
            num_kv_heads=layer.num_kv_heads,
            head_dim=layer.head_dim,
            dtype=torch.float32,
            device=CPU,
        )
        self.slots = 4 + torch.randperm(32, generator=torch.Generator().manual_seed(1))
        self.table = torch.zeros((2, 64), dtype=torch.int32)
        self.table[0, :32] = self.slots
        self.backend = TorchNativeAttention(layer, self.pool, self.table, InputBuffers(CPU))

    def batch(self, start: int, stop: int, wanted: Tensor | None = None) -> ForwardBatch:
        count = stop - start
        layout = BatchLayout(np.array([0]), np.array([start]), np.array([count]), int(count > 1))
        return ForwardBatch(
            input_ids=torch.zeros(count, dtype=torch.int64),
            positions=torch.arange(start, stop),
            kv_pool=self.pool,
            out_cache_loc=self.slots[start:stop],
            attention=self.backend.plan_step(layout),
            logits_indices=wanted,
        )


def reference(folder: Path, spec: Eagle3Spec, embedded: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
    """States and logits after each of T tokens, from [T, K] embeddings and states before them."""
    from safetensors.torch import load_file

    weights = load_file(folder / "model.safetensors")

    def norm(name: str, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], weights[f"{name}.weight"], 1e-5)

    def part(name: str, x: Tensor) -> Tensor:
        return x @ weights[f"{layer}.{name}.weight"].T

    layer = spec.layer_name.removeprefix("model.")
    entered = norm(f"{layer}.hidden_norm", states)
    residual = entered if spec.norm_before_residual else states
    x = torch.cat([norm(f"{layer}.input_layernorm", embedded), entered], dim=-1)
    num = len(x)
    frequencies = 10000.0 ** -(torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    angles = torch.outer(torch.arange(num, dtype=torch.float32), frequencies).repeat(1, 2)[:, None]

    def rotated(y: Tensor) -> Tensor:
        first, second = y.chunk(2, dim=-1)
        return y * angles.cos() + torch.cat([-second, first], dim=-1) * angles.sin()

    q = rotated(part("self_attn.q_proj", x).view(num, HEADS, HEAD_DIM)).transpose(0, 1)
    k = rotated(part("self_attn.k_proj", x).view(num, KV_HEADS, HEAD_DIM)).transpose(0, 1)
    v = part("self_attn.v_proj", x).view(num, KV_HEADS, HEAD_DIM).transpose(0, 1)
    groups = HEADS // KV_HEADS
    k, v = k.repeat_interleave(groups, 0), v.repeat_interleave(groups, 0)
    attended = F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0]
    y = residual + part("self_attn.o_proj", attended.transpose(0, 1).flatten(1))
    x = norm(f"{layer}.post_attention_layernorm", y)
    x = F.silu(part("mlp.gate_proj", x)) * part("mlp.up_proj", x)
    y = y + part("mlp.down_proj", x)
    return y, norm("norm", y) @ weights["lm_head.weight"].T


@pytest.mark.parametrize("before_residual", [False, True])
@pytest.mark.parametrize(("layer", "embedding"), [("midlayer", False), ("layers.0", True)])
def test_head_equals_plain_torch(
    tmp_path: Path, target: tuple[Driver, TinyModel], layer: str, embedding: bool, before_residual: bool
) -> None:
    driver, model = target
    folder = write_head(
        tmp_path / "head",
        model.spec.vocab_size,
        layer=layer,
        embedding=embedding,
        norm_before_residual=before_residual,
    )
    head, spec = load(folder, driver, model)
    generator = torch.Generator().manual_seed(3)
    features = torch.randn(NUM_TOKENS, 3 * HIDDEN, generator=generator)
    token_ids = torch.randint(model.spec.vocab_size, (NUM_TOKENS,), generator=generator)
    from safetensors.torch import load_file

    weights = load_file(folder / "model.safetensors")
    states = features @ weights["fc.weight"].T
    table = weights.get("embed_tokens.weight", model.reference.get_input_embeddings().weight.detach())
    expected, logits = reference(folder, spec, table[token_ids], states)

    with torch.inference_mode():
        torch.testing.assert_close(
            head.state([part.contiguous() for part in features.split(HIDDEN, dim=1)]),
            states,
            rtol=1e-4,
            atol=1e-4,
        )
        paged = Paged(spec)
        wanted = torch.tensor([2, 6])
        first, first_logits = head.predict(token_ids[:7], states[:7].clone(), paged.batch(0, 7, wanted))
        torch.testing.assert_close(first, expected[wanted], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(first_logits, logits[wanted], rtol=1e-4, atol=1e-4)
        for idx in range(7, NUM_TOKENS):
            one, _ = head.predict(
                token_ids[idx : idx + 1], states[idx : idx + 1].clone(), paged.batch(idx, idx + 1)
            )
            torch.testing.assert_close(one, expected[idx : idx + 1], rtol=1e-4, atol=1e-4)


def test_token_ids_are_those_of_the_target(tmp_path: Path, target: tuple[Driver, TinyModel]) -> None:
    driver, model = target
    head, spec = load(write_head(tmp_path / "head", model.spec.vocab_size), driver, model)
    assert head.token_ids is not None
    assert head.token_ids.tolist() == [4 * n + 2 for n in range(DRAFTED)]
    assert len(needed_tensors(spec)) == 14


def test_a_table_beyond_the_vocabulary_is_refused(tmp_path: Path, target: tuple[Driver, TinyModel]) -> None:
    driver, model = target
    size = model.spec.vocab_size
    folder = write_head(tmp_path / "head", size, draft_ids=torch.arange(DRAFTED) + size - 5)
    with pytest.raises(
        ConfigError, match=f"d2t names the tokens {size - 5} to {size + 14}, but the target has 0 to"
    ):
        load(folder, driver, model)


def with_head(
    folder: Path, model: TinyModel, dtype: Literal["float32", "bfloat16"] = "float32"
) -> tuple[EngineConfig, ModelSpec, Capacity]:
    """The target with a head that drafts; pages of four tokens."""
    write_head(folder, model.spec.vocab_size)
    config = dataclasses.replace(
        engine_config(ModelConfig(dtype=dtype, device="cpu", num_threads=1)),
        scheduler=SchedulerConfig(speculative="eagle3", speculative_model=str(folder)),
    )
    spec = structs.replace(model.spec, drafter=_memory(config, read_eagle3_head(folder, model.spec)))
    return config, spec, Capacity(64, 64, 4, 4, spec.vocab_size)


@pytest.fixture
def drafting(tmp_path: Path, target: tuple[Driver, TinyModel]) -> Driver:
    _, model = target
    config, spec, capacity = with_head(tmp_path / "head", model)
    runner = load_model_runner(config, ModelSource("hf", str(model.folder), "test"), spec, capacity)
    assert runner.kv_pool.page_bytes <= 4 * spec.kv_bytes_per_token(4) < 1.1 * runner.kv_pool.page_bytes
    return Driver(runner, capacity)


def test_a_copy_of_a_page_keeps_the_keys_that_came_with_it(drafting: Driver) -> None:
    """A sample starts before the last token of the prompt, in a copy of the page of another one that has gone on.

    The page has the features of a later token, which are not those before the sample's first token.
    """
    driver, text = drafting, [5, 17, 40, 23, 8, 61, 33]
    first = driver.start(text)
    for count in (7, 1, 1):
        driver.step([(first, count)])
    sample = driver.start(text)
    sample.pages = [first.pages[0], driver.pages.pop()]
    sample.computed = sample.prefix_len = 6
    driver.step([(sample, 1)], page_copies=[(first.pages[1], sample.pages[1])])
    driver.step([(sample, 1)])
    share(driver, first, sample)
    pool = driver.runner.kv_pool.beyond(4, (0,))
    for kept in (pool.k[0], pool.v[0]):
        ours, theirs = (kept[driver.slots(req.pages, 0, 8)] for req in (sample, first))
        torch.testing.assert_close(ours, theirs)


def test_a_wrong_draft_at_the_end_of_a_page_leaves_no_features(drafting: Driver) -> None:
    driver = drafting
    req = driver.start([5, 17, 40, 23, 8, 61])
    driver.step([(req, 6)])
    wrong = (req.tokens[-1] + 1) % 90
    result = driver.runner.launch(drafted(driver, [(req, [wrong, wrong])])).wait()
    assert np.frombuffer(result.num_next_tokens, dtype=np.int32).tolist() == [1]
    ends = driver.runner.kv_pool.page_ends
    assert ends is not None and ends[req.pages[:2]].flatten().tolist() == [3, 6]


def test_features_are_the_residual_streams_after_the_layers_that_the_head_names(
    drafting: Driver, target: tuple[Driver, TinyModel], tmp_path: Path
) -> None:
    """SpecForge's list [0, 1, 2] names the outputs of these layers; a page has those of its last token."""
    from safetensors.torch import load_file

    driver, text = drafting, [5, 17, 40, 23, 8, 61, 33]
    req = driver.start(text)
    for count in (5, 2):
        driver.step([(req, count)])
    with torch.inference_mode():
        streams = target[1].reference(torch.tensor([text]), output_hidden_states=True).hidden_states
    weight = load_file(tmp_path / "head" / "model.safetensors")["fc.weight"]
    expected = torch.cat([each[0, [3, 6]] for each in streams[1:4]], dim=1) @ weight.T
    states = driver.runner.kv_pool.page_states
    assert states is not None
    torch.testing.assert_close(states[req.pages[:2]], expected, atol=1e-3, rtol=1e-3)


@pytest.mark.slow
def test_recorded_drafts_have_the_bits_of_others(tmp_path: Path, target: tuple[Driver, TinyModel]) -> None:
    _, model = target
    config, spec, capacity = with_head(tmp_path / "head", model, "bfloat16")
    runner = load_model_runner(config, ModelSource("hf", str(model.folder), "test"), spec, capacity)
    driver = Driver(runner, capacity)
    reqs = [driver.start([5, 17, 40, 23, 8, 61, 33][n:]) for n in range(3)]
    driver.step([(req, len(req.tokens)) for req in reqs])
    with recorded_and_not(driver) as programs:
        for counts in ((2, 3, 1), (0, 0, 0), (2, 0, 2), (1, 1, 1), (3, 2, 4), (2, 2, 2)):
            draft(driver, list(zip(reqs, counts, strict=True)))
    assert programs.num_replayed >= 5


@pytest.mark.slow
def test_two_ranks_make_the_drafts_of_one(tmp_path: Path, target: tuple[Driver, TinyModel]) -> None:
    """Each has the whole head, and a part of the model."""
    config, spec, capacity = with_head(tmp_path / "head", target[1])
    check_two_ranks(config, target[1].folder, spec, capacity)
