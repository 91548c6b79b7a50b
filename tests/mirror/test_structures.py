"""Each structure of `model_runner/structures` once on the mirror, and each kind of layer: the tokens of the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.model_runner.kernels.probe import Finding, KernelProbe
from engine.model_runner.recording.eager_executor import EagerExecutor
from engine.model_runner.structures import causal_lm
from engine.models.hf.hf_config import read_hf_spec
from engine.models.spec.model_spec import ModelSpec
from engine.runtime.pooling import PoolingParams
from tests.model_runner.conftest import Driver
from tests.model_runner.structures.encoder_texts import SETTINGS
from tests.model_runner.structures.families import FAMILIES, Row

from .mirror import NO_SGL_KERNEL, mirror_device
from .runners import PROMPT, Ahead, load_driver
from .scenarios import DRAWN, Results, assert_same, floats

DECODERS = {
    "llama": ("qwen3_moe", "gpt_oss", "phi3 window", "llama4 as Scout"),
    "gemma": ("gemma2 low caps", "gemma3"),
    "hybrid": ("qwen3_next", "lfm2", "mamba2 experts, groups, rotary, biases"),
    "latent": ("deepseek_v3 experts in groups", "deepseek_v2 yarn"),
    "parallel": ("cohere2",),
    "post_norm": ("olmo2",),
    "sandwich": ("glm4",),
    "single_block": ("nemotron_h",),
    "streams": ("gemma3n", "gemma4, shared keys, wide MLPs"),
}
"""Rows of `families.py` by structure."""
ENCODERS = ("bert", "modernbert")
BASE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def spec_of(row: Row, folder: Path) -> ModelSpec:
    """The facts of a row's model, without weights."""
    from transformers import AutoConfig

    AutoConfig.for_model(row.made_as, **{**BASE, **row.options}).save_pretrained(folder)
    return read_hf_spec(folder)


def life(driver: Driver) -> Results:
    """A prompt in two chunks, the second one beside a decode, then decodes; one is greedy and one draws."""
    ahead = Ahead(driver)
    first, second = ahead.start(PROMPT[:5]), ahead.start(PROMPT[2:11], DRAWN)
    ahead.prompt(first)
    ahead.go([(second, 6), (first, 1)])
    ahead.go([(second, 3), (first, 1)])
    ahead.decode(first, second, num=2)
    return {"tokens": ahead.finish(first, second)}


def encoded(driver: Driver) -> Results:
    """The vectors of two texts in one step."""
    params = PoolingParams(all_tokens=True)
    reqs = [driver.start(PROMPT[n : n + 7 + n], pooling=params) for n in range(2)]
    ahead = Ahead(driver)
    ahead.go([(req, len(req.tokens)) for req in reqs])
    ahead.finish(*reqs)
    return {str(n): floats(vector) for n, vector in ahead.results[0].vectors.items()}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("mode", ["recorded", "without Triton"])
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, id=f"{structure}-{name}") for structure, names in DECODERS.items() for name in names],
)
def test_a_decoder_gives_the_tokens_of_the_cpu(name, mode, tmp_path):
    spec = spec_of(FAMILIES[name], tmp_path)
    expected = life(load_driver(spec, None))
    grouped = spec.experts is not None and mode == "without Triton"
    with mirror_device(triton=mode == "recorded") as mirror:
        assert_same(life(load_driver(spec, mirror, chunk=16)), expected)
        if grouped:  # torch's product of groups waits in each layer in float32, so nothing is recorded
            details = {fault.detail for fault in mirror.faults.take()}
            assert details == {"grouped_mm multiplies group by group"}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_decodes_of_state_layers_compile_nothing_while_serving(tmp_path):
    """The trial at start compiles what they use, also where nothing is recorded."""
    spec = spec_of(FAMILIES["lfm2"], tmp_path)
    expected = life(load_driver(spec, None))
    with mirror_device() as mirror:
        assert_same(life(load_driver(spec, mirror, chunk=16, record=False)), expected)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("capability", "dtype", "recorded"),
    [((9, 0), "bfloat16", True), ((9, 0), "float32", False), ((8, 0), "bfloat16", False)],
)
def test_torch_s_product_of_experts_is_recorded_where_it_is_one_kernel(
    capability, dtype, recorded, tmp_path, caplog
):
    """Elsewhere nothing is recorded, and the log says why."""
    spec = spec_of(FAMILIES["qwen3_moe"], tmp_path)
    expected = life(load_driver(spec, None, dtype=dtype, avoid_kernels=("native,onednn",)))
    kernels = KernelProbe(NO_SGL_KERNEL, Finding(None, "not usable"), capability)
    with mirror_device(triton=False, kernels=kernels) as mirror:
        driver = load_driver(spec, mirror, chunk=16, dtype=dtype)
        assert isinstance(driver.runner.executor, EagerExecutor) != recorded
        assert_same(life(driver), expected)
        waits = {fault.detail for fault in mirror.faults.take()}
    lines = [line for line in caplog.messages if "prompt_graphs=0" in line]
    if recorded:
        assert (waits, lines) == (set(), [])
    else:
        (line,) = lines
        assert waits == {"grouped_mm multiplies group by group"}
        assert f"in {dtype} on this GPU torch needs the host in each layer: pack_experts (" in line
        assert "triton: not usable" in line


@pytest.mark.slow
@pytest.mark.parametrize("triton", [True, False], ids=["triton", "torch"])
@pytest.mark.parametrize("model_type", ENCODERS)
def test_an_encoder_gives_the_vectors_of_the_cpu(model_type, triton, tmp_path):
    from transformers import AutoConfig

    AutoConfig.for_model(model_type, **SETTINGS).save_pretrained(tmp_path)
    spec = read_hf_spec(tmp_path)
    expected = encoded(load_driver(spec, None))
    assert expected
    with mirror_device(triton=triton) as mirror:
        assert_same(encoded(load_driver(spec, mirror)), expected)


def test_every_structure_has_a_row():
    folder = Path(causal_lm.__file__).parent
    others = {"__init__", "causal_lm"}
    assert {path.stem for path in folder.glob("*.py")} - others == {*DECODERS, *ENCODERS}
