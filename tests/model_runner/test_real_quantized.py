"""The default model with quantized weights: what that does to its perplexity on a fixed text is bounded."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from engine.model_runner.kernels.quantized import reasons_against_blocks
from engine.model_runner.weights.format_selection import quant_target
from engine.models.hub.built_in.fetch import ensure_model
from engine.models.load_spec import load_spec
from engine.models.source import ModelSource
from engine.models.spec.model_spec import with_quantization
from engine.models.tokenizer.tokenizer import load_tokenizer
from engine.runtime.config.engine_config import KVCacheDType
from engine.runtime.config.model_choice import Quantization
from engine.runtime.errors import ConfigError
from engine.runtime.sampling_params import SamplingParams

pytestmark = [
    pytest.mark.model,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        bool(reasons_against_blocks(quant_target(torch.device("cpu"), torch.bfloat16))),
        reason="no kernel for weights in blocks here",
    ),
]
CHUNK, NUM_CHUNKS = 512, 4


@pytest.fixture(scope="module")
def perplexity() -> Iterator[ModuleType]:
    path = Path(__file__).parents[2] / "benchmarks" / "perplexity.py"
    spec = importlib.util.spec_from_file_location("perplexity", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "perplexity", module)  # its dataclass looks itself up
        spec.loader.exec_module(module)
        yield module


@pytest.fixture(scope="module")
def source() -> ModelSource:
    return ModelSource("gguf", str(ensure_model()), "SmolLM2-135M-Instruct")


@pytest.fixture
def loss_of(make_driver: Any, unpack: Any, source: ModelSource, perplexity: ModuleType) -> Any:
    """The mean of -log p on the text; `noise`: of a model whose weights lie on no grid."""
    tokens = load_tokenizer(source).encode(perplexity.fixed_text())

    def measure(quantization: Quantization, *, noise: bool = False, kv: KVCacheDType = "auto") -> float:
        spec = with_quantization(load_spec(source), quantization)
        with ExitStack() as stack:
            if noise:
                stack.enter_context(perplexity.noisy_weights())
            driver = make_driver(
                spec,
                Path(source.path),
                kind="gguf",
                dtype="bfloat16",
                page_size=16,
                num_pages=128,
                max_model_len=1024,
                kv_cache_dtype=kv,
            )
        losses = []
        for start in range(0, CHUNK * NUM_CHUNKS, CHUNK):
            req = driver.start(
                tokens[start : start + CHUNK], SamplingParams(temperature=0.0, prompt_logprobs=0)
            )
            logprobs, _, _ = unpack(driver.step([(req, CHUNK)]).prompt_logprobs[0])
            losses.append(-logprobs.mean())
            driver.finish(req)
        return float(np.mean(losses))

    return measure


@torch.inference_mode()
def test_the_files_own_4_bits_and_8_bits_cost_one_percent_at_most(loss_of: Any) -> None:
    plain = loss_of("none")

    assert abs(np.exp(loss_of("gguf") - plain) - 1) < 0.01
    assert abs(np.exp(loss_of("int8") - plain) - 1) < 0.01
    assert abs(np.exp(loss_of("none", kv="int8") - plain) - 1) < 0.01


@torch.inference_mode()
def test_4_bits_made_of_weights_on_no_grid_cost_less_than_those_of_the_file(loss_of: Any) -> None:
    """A model this small has none to spare: noise as large as the rounding to whole ranges costs 26 %, int4 7.5 %."""
    plain = loss_of("none", noise=True)

    assert -0.01 < np.exp(loss_of("int4", noise=True) - plain) - 1 < 0.10


def test_a_file_with_noise_is_not_kept_as_it_is(loss_of: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"model.layers.0.self_attn.q_proj.weight has noise and cannot be kept"
    ):
        loss_of("gguf", noise=True)


@torch.inference_mode()
def test_the_kept_file_knows_what_it_knew(make_driver: Any, source: ModelSource) -> None:
    tokenizer = load_tokenizer(source)
    driver = make_driver(
        load_spec(source), Path(source.path), kind="gguf", dtype="bfloat16", page_size=16, max_model_len=256
    )

    prompts = [tokenizer.encode("The capital of France is"), tokenizer.encode("1, 2, 3, 4, 5, 6,")]
    outputs = driver.generate(prompts, SamplingParams(temperature=0.0), num=8)

    assert tokenizer.decode(outputs[0]).startswith(" Paris")
    assert tokenizer.decode(outputs[1]).startswith(" 7, 8, 9")
