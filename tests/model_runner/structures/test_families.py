"""The contract of a family: every row of `families.py` against transformers, through the real runner."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from engine.model_runner.kernels.cpu.library import reasons_against_library
from engine.model_runner.recording.programs.forward_program import ProgrammedForward
from engine.model_runner.recording.programs.native_executor import NativeExecutor
from engine.models.families.registry import FAMILIES as KNOWN
from engine.models.gguf.gguf_file import GGUFFile
from engine.models.gguf_config import read_gguf_spec
from engine.models.hf.hf_config import read_hf_spec
from engine.models.spec.model_spec import with_quantization
from engine.models.weight_files.check_weights import check_folder_weights, check_gguf_weights
from engine.models.weight_files.weight_memory import num_parameters, weight_bytes
from engine.runtime.errors import ConfigError
from engine.runtime.sampling_params import SamplingParams
from tests.model_runner.conftest import Driver, SeeingExecutor, TinyModel

from ..weights import test_gguf_architectures, test_gguf_dense_families, test_gguf_mixtures
from .families import BLOCK_ROWS, BUFFERS, FAMILIES, Row
from .own_code import write_as_published
from .text_checks import check_prefill_and_decode, tokens_of

STORED_AS = {"mistral": "llama", "granitemoeshared": "granitemoe"}
"""Types that are another one's with the same layers in GGUF files."""
CLOSE = {"int8": 0.98, "fp8": 0.96, "int4": 0.8}
"""The least correlation of logits with those of the weights before; random weights have no structure to spare."""


def rows(has: Callable[[Row], Any]) -> pytest.MarkDecorator:
    """Run a test over the rows that have something."""
    return pytest.mark.parametrize(
        "row", [pytest.param(one, id=n) for n, one in FAMILIES.items() if has(one)]
    )


@pytest.fixture
def make_tiny(make_tiny_model: Callable[..., TinyModel]) -> Callable[..., TinyModel]:
    """The tiny model of a row, with further options."""

    def make(row: Row, *, dtype: str = "float32", **options: Any) -> TinyModel:
        tiny = make_tiny_model(row.made_as, dtype=dtype, **(row.options | options))
        if row.made_as != row.model_type:
            path = tiny.folder / "config.json"
            other = {
                "model_type": row.model_type,
                "architectures": [KNOWN[row.model_type].architecture],
            }
            path.write_text(json.dumps(json.loads(path.read_text()) | other))
            write_as_published(tiny.folder, row.model_type)
            tiny = TinyModel(tiny.reference, tiny.folder, read_hf_spec(tiny.folder))
        scaling = tiny.spec.rope_scaling
        if scaling.kind == "longrope" and scaling.original_max_position == 64:
            # Transformers chooses longrope's factors by the text's length, the engine once for all.
            tiny.logprobs([1])
            rotary = tiny.reference.model.rotary_emb
            rotary.original_inv_freq.copy_(rotary.long_inv_freq)
        return tiny

    return make


def prompt_logprobs(driver: Driver, unpack: Any, length: int = 120) -> np.ndarray[Any, Any]:
    """Log-probabilities of the tokens of a prompt after its first, as the engine computes them."""
    req = driver.start(tokens_of(length), SamplingParams(temperature=0.0, prompt_logprobs=0))
    result = driver.step([(req, length)])
    assert result.prompt_logprobs is not None
    return np.asarray(unpack(result.prompt_logprobs[0])[0])


def reference_logprobs(tiny: TinyModel, length: int = 120) -> np.ndarray[Any, Any]:
    """The same as transformers computes them."""
    prompt = tokens_of(length)
    return np.asarray(tiny.logprobs(prompt)[torch.arange(length - 1), prompt[1:]])


def test_every_family_has_a_row_with_sizes_of_whole_blocks():
    assert set(BLOCK_ROWS) == {name for name, family in KNOWN.items() if not family.is_encoder}


@pytest.mark.fast_cases(40)
@rows(lambda row: True)
def test_prefill_and_decode_are_those_of_transformers(make_tiny, make_driver, unpack, row):
    tiny = make_tiny(row)
    assert tiny.spec.model_type == row.model_type
    check_folder_weights(tiny.folder, tiny.spec)
    if row.model_type in ("gemma2", "gemma3_text"):
        # In float32 transformers is as far from float64 as the engine is: up to 7e-5 each for the tokens of a prompt.
        tiny.reference.double()
    # Gemma 2 with its usual caps: one number of 745 is 1.02e-4 away.
    atol = 1.1e-4 if row.model_type == "gemma2" else 1e-4
    check_prefill_and_decode(tiny, make_driver(tiny.spec, tiny.folder), unpack, atol=atol)


@pytest.mark.fast_cases(24)
@rows(lambda row: not row.chunks)
def test_chunks_prefixes_and_mixed_steps_change_nothing(make_tiny, make_driver, unpack, row):
    """A long prompt in chunks beside decodes of many lengths, then a second request behind its cached prefix."""
    tiny = make_tiny(row)
    driver = make_driver(tiny.spec, tiny.folder)
    decoding = [driver.start(tokens_of(length, seed=length)) for length in (1, 9, 40, 90)]
    driver.step([(req, len(req.tokens)) for req in decoding])
    prompt = tokens_of(150, seed=7)
    long = driver.start(prompt, SamplingParams(temperature=0.0, prompt_logprobs=0))
    found: list[float] = []
    for chunk in (37, 1, 80, 32):
        result = driver.step([(long, chunk), *((req, 1) for req in decoding)])
        found += unpack(result.prompt_logprobs[0])[0].tolist()
    behind = driver.start(prompt[:100] + tokens_of(30, seed=8), prefix=(long, 100))
    driver.step([(behind, 30), (long, 1), *((req, 1) for req in decoding)])
    np.testing.assert_allclose(found, tiny.logprobs(prompt)[torch.arange(149), prompt[1:]], atol=2e-4)
    for req in (*decoding, long, behind):
        predicted = tiny.logprobs(req.tokens)[req.prompt_len - 1 : -1].argmax(-1).tolist()
        assert predicted == req.output


@pytest.mark.fast_cases(8)
@pytest.mark.parametrize(
    ("row", "chunks"),
    [
        pytest.param(row, chunks, id=f"{name}-{chunks}")
        for name, row in FAMILIES.items()
        for chunks in row.chunks
    ],
)
def test_chunks_beside_decodes_change_no_states(make_tiny, make_driver, unpack, row, chunks):
    tiny = make_tiny(row)
    driver = make_driver(tiny.spec, tiny.folder)
    decoding = [driver.start(tokens_of(length, seed=length)) for length in (1, 2, 9, 40)]
    driver.step([(req, len(req.tokens)) for req in decoding])
    prompt = tokens_of(64, seed=7)
    long = driver.start(prompt, SamplingParams(temperature=0.0, prompt_logprobs=0))
    found: list[float] = []
    for chunk in chunks:
        result = driver.step([(long, chunk), *((req, 1) for req in decoding)])
        found += unpack(result.prompt_logprobs[0])[0].tolist() if result.prompt_logprobs else []
    for _ in range(4):
        driver.step([(long, 1), *((req, 1) for req in decoding)])
    np.testing.assert_allclose(found, tiny.logprobs(prompt)[torch.arange(63), prompt[1:]], atol=2e-4)
    for req in (*decoding, long):
        predicted = tiny.logprobs(req.tokens)[req.prompt_len - 1 : -1].argmax(-1).tolist()
        assert predicted == req.output


@pytest.mark.fast_cases(3)
@rows(lambda row: row.chunks)
def test_a_row_begins_without_the_state_of_the_request_before(make_tiny, make_driver, row):
    tiny = make_tiny(row)
    driver = make_driver(tiny.spec, tiny.folder, rows=1)
    for seed in range(3):
        prompt = tokens_of(20 + seed, seed=seed)
        assert driver.generate([prompt], num=5) == [tiny.greedy(prompt, 5)]


@pytest.mark.fast_cases(3)
@rows(lambda row: row.chunks and row.wide)
def test_deterministic_bits_do_not_depend_on_chunks(make_tiny, make_driver, unpack, row):
    tiny = make_tiny(row, dtype="bfloat16", **row.wide)
    driver = make_driver(tiny.spec, tiny.folder, dtype="bfloat16", deterministic=True)
    found = []
    for chunks in ((64,), (37, 1, 26), (2, 62)):
        req = driver.start(tokens_of(64), SamplingParams(temperature=0.0, prompt_logprobs=0))
        parts = [driver.step([(req, chunk)]).prompt_logprobs[0] for chunk in chunks]
        found.append(np.concatenate([unpack(part)[0] for part in parts]))
    assert np.array_equal(found[0], found[1]) and np.array_equal(found[0], found[2])


@pytest.mark.fast_cases(30)
@rows(lambda row: True)
def test_memory_is_what_the_checkpoint_has(make_tiny, row):
    tiny = make_tiny(row)
    sizes = {name: one.numel() for name, one in tiny.reference.named_parameters()}
    sizes |= {n: one.numel() for n, one in tiny.reference.named_buffers() if n.endswith(BUFFERS)}
    assert num_parameters(tiny.spec) == sum(sizes.values())
    wider = sum(size for name, size in sizes.items() if any(part in name for part in row.in_float32))
    assert weight_bytes(tiny.spec, 2) == 2 * (num_parameters(tiny.spec) + wider)
    config = tiny.reference.config
    if tiny.spec.streams.layer_heads or tiny.spec.state or tiny.spec.latent:
        return  # their tests say what a token or a state takes
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    shared = getattr(config, "num_kv_shared_layers", 0)
    kv_numbers = 2 * (config.num_hidden_layers - shared) * config.num_key_value_heads * head_dim
    assert tiny.spec.kv_bytes_per_token(2) == 2 * kv_numbers


@pytest.mark.fast_cases(18)
@rows(lambda row: row.bfloat16)
def test_bfloat16_is_as_close_to_float32_as_transformers_is(make_tiny, make_driver, unpack, row):
    tiny = make_tiny(row, dtype="bfloat16")
    theirs = reference_logprobs(tiny)
    tiny.reference.float()
    exact = reference_logprobs(tiny)
    ours = prompt_logprobs(make_driver(tiny.spec, tiny.folder, dtype="bfloat16"), unpack)
    bound = 1.2 if row.model_type == "llama" else 1.25
    assert np.abs(ours - exact).mean() < bound * np.abs(theirs - exact).mean() + 1e-3
    if row.model_type == "llama":
        np.testing.assert_allclose(ours, exact, atol=0.3)


@pytest.mark.fast_cases(9)
@rows(lambda row: row.int8_cache)
def test_keys_and_values_in_8_bits_change_little(make_tiny, make_driver, unpack, row):
    tiny = make_tiny(row)
    ours = prompt_logprobs(make_driver(tiny.spec, tiny.folder, kv_cache_dtype="int8"), unpack)
    assert 0 < np.abs(ours - reference_logprobs(tiny)).mean() < 0.08


@pytest.mark.fast_cases(8)
@rows(lambda row: row.wide is not None)
def test_recorded_steps_have_the_bits_of_others(make_tiny, make_driver, row):
    if reasons := reasons_against_library():
        pytest.skip("; ".join(reasons))
    tiny = make_tiny(row, dtype="bfloat16", **row.wide)
    recorded, eager = (make_driver(tiny.spec, tiny.folder, dtype="bfloat16") for _ in range(2))
    eager.run_eagerly()
    seen = [SeeingExecutor(driver) for driver in (recorded, eager)]
    for driver in (recorded, eager):
        reqs = [driver.start(tokens_of(length, seed=length)) for length in (70, 5)]
        driver.step([(req, len(req.tokens)) for req in reqs])
        for _ in range(3):
            driver.step([(req, 1) for req in reqs])
    for ours, theirs in zip(seen[0].logits, seen[1].logits, strict=True):
        assert theirs.isfinite().all() and torch.equal(ours, theirs)
    assert recorded.runner.executor.recorded_sizes == [2]
    assert isinstance(seen[0].inner, NativeExecutor)
    assert isinstance(seen[0].inner.eager.forward, ProgrammedForward), "steps with prompts are programs, too"


@pytest.mark.fast_cases(3)
@pytest.mark.parametrize("kind", ["int8", "int4", "fp8"])
@pytest.mark.parametrize("model_type", BLOCK_ROWS)
def test_a_family_computes_with_this_kind_of_weights(make_tiny_model, make_driver, unpack, model_type, kind):
    """As docs/models.md says: made while loading, near the logits of weights of 16 bits, and smaller."""
    row = BLOCK_ROWS[model_type]
    tiny = make_tiny_model(row.made_as, dtype="bfloat16", **row.in_blocks)
    spec = with_quantization(tiny.spec, kind)
    exact = prompt_logprobs(make_driver(tiny.spec, tiny.folder, dtype="bfloat16"), unpack, 150)
    rounded = prompt_logprobs(make_driver(spec, tiny.folder, dtype="bfloat16"), unpack, 150)
    assert np.corrcoef(exact, rounded)[0, 1] > CLOSE[kind]
    assert not np.array_equal(exact, rounded)
    assert weight_bytes(spec, 2) < weight_bytes(tiny.spec, 2)


@pytest.mark.fast_cases(7)
@rows(lambda row: row.gguf)
def test_a_gguf_file_is_the_same_model(make_tiny_model, make_driver, unpack, tmp_path, row):
    tiny = make_tiny_model(row.made_as, **row.in_file)
    path, (arch, _) = tmp_path / "tiny.gguf", row.gguf
    modules = (test_gguf_architectures, test_gguf_mixtures if tiny.spec.experts else test_gguf_dense_families)
    modules[row.model_type not in test_gguf_architectures.MODEL_TYPES].write(path, tiny, arch)
    file = GGUFFile(path)
    spec = read_gguf_spec(file)
    check_gguf_weights(file, spec)

    driver = make_driver(spec, path, kind="gguf")

    assert spec.model_type == STORED_AS.get(row.model_type, row.model_type)
    assert num_parameters(spec) == num_parameters(tiny.spec)
    found = prompt_logprobs(driver, unpack, 80)
    np.testing.assert_allclose(found, reference_logprobs(tiny, 80), atol=3e-4)


def test_only_known_architectures_are_built(make_tiny, make_driver):
    tiny = make_tiny(FAMILIES["llama"])
    with pytest.raises(ConfigError, match="model_type 'bloom' is not supported; supported are: .*, llama, "):
        make_driver(replace(tiny.spec, model_type="bloom"), tiny.folder)
