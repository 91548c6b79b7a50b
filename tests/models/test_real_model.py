"""The default model itself: facts, weights and tokens. Skipped unless its file is in the cache."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from engine.launch.resolve.model_resolution import read_model
from engine.models.gguf.gguf_file import GGUFFile
from engine.models.hub.built_in.fetch import cached_model
from engine.models.load_spec import load_spec
from engine.models.source import ModelSource, resolve_source
from engine.models.tokenizer.tokenizer import Tokenizer, load_tokenizer
from engine.models.weight_files.weight_memory import num_parameters
from engine.runtime.config.engine_config import ModelConfig

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def source() -> ModelSource:
    if cached_model() is None:
        pytest.skip("the default model is not in the cache")
    return resolve_source("default")


@pytest.fixture(scope="module")
def tokenizer(source: ModelSource) -> Tokenizer:
    return load_tokenizer(source)


def test_source_and_spec(source: ModelSource) -> None:
    assert (source.kind, source.name) == ("gguf", "SmolLM2-135M-Instruct")
    spec = load_spec(source)
    assert num_parameters(spec) == 134_515_008
    assert (spec.num_layers, spec.num_heads, spec.num_kv_heads, spec.head_dim) == (30, 9, 3, 64)
    assert (spec.hidden_size, spec.intermediate_size, spec.vocab_size) == (576, 1536, 49152)
    assert (spec.rope_theta, spec.max_position_embeddings) == (100_000.0, 8192)
    assert spec.rms_norm_eps == pytest.approx(1e-5)
    assert spec.tie_word_embeddings
    assert (spec.bos_token_id, spec.eos_token_ids) == (1, (2,))
    assert spec.sampling_defaults.values() == {"temperature": 0.2, "top_p": 0.9}


def test_a_start_reads_the_same_spec(source: ModelSource) -> None:
    assert read_model(ModelConfig(), source).spec == load_spec(source)


def test_weights_agree_with_the_reference_reader(source: ModelSource) -> None:
    file = GGUFFile(source.path)
    reference = {tensor.name: tensor for tensor in gguf.GGUFReader(source.path).tensors}
    assert list(reference) == list(file.tensors)
    for name in ("token_embd.weight", "blk.7.ffn_down.weight", "blk.29.attn_norm.weight"):  # Q8_0, Q4_1, F32
        rows = reference[name].data[:256]
        expected = gguf.quants.dequantize(rows, reference[name].tensor_type)
        np.testing.assert_allclose(file.read(name)[:256], expected, rtol=1e-6, atol=1e-7)


def test_all_weights_are_finite_and_counted_once(source: ModelSource) -> None:
    file = GGUFFile(source.path)
    num_in_file = 0
    for name in file.tensors:
        weights = file.read(name)
        assert np.isfinite(weights).all(), name
        num_in_file += weights.size
    assert num_in_file == num_parameters(load_spec(source))


GOLDEN = {
    "The capital of France is": [504, 3575, 282, 4649, 314],
    "<|im_start|>user\nWhat is 2+2?<|im_end|>\n<|im_start|>assistant\n": [
        1,
        4093,
        198,
        1780,
        314,
        216,
        34,
        27,
        34,
        47,
        2,
        198,
        1,
        520,
        9531,
        198,
    ],
    "  def f(x):\n\t\treturn x  \r\n": [216, 753, 275, 24, 104, 727, 3354, 197, 5406, 1792, 256, 2738],
    "In 1984, 3.14159 and ½": [
        788,
        216,
        33,
        41,
        40,
        36,
        28,
        216,
        35,
        30,
        33,
        36,
        33,
        37,
        41,
        284,
        216,
        16738,
    ],
    "naïve café 中文 한국어 🙂👩\u200d👩\u200d👧 é": [
        3546,
        46494,
        37366,
        216,
        28589,
        29184,
        216,
        33085,
        246,
        181,
        130,
        251,
        183,
        240,
        129,
        47526,
        10813,
        235,
        119,
        321,
        231,
        10813,
        235,
        119,
        321,
        231,
        10813,
        235,
        117,
        26411,
    ],
    "don't can't WE'LL": [12420, 982, 416, 982, 26587, 23, 16421],
}


@pytest.mark.parametrize("text", list(GOLDEN))
def test_tokens_are_those_of_the_published_tokenizer(tokenizer: Tokenizer, text: str) -> None:
    """Recorded from transformers' conversion with the pre-tokenizer of the published tokenizer.json."""
    ids = tokenizer.encode(text)
    assert ids == GOLDEN[text]
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert b"".join(tokenizer.token_bytes(i) for i in ids) == text.encode()


def test_special_tokens_and_template(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == 49152
    assert tokenizer.special_tokens["eos_token"] == "<|im_end|>"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (1, (2,))
    assert [i for i in range(49152) if tokenizer.is_special(i)] == list(range(17))
    assert tokenizer.chat_template is not None
    assert "<|im_start|>" in tokenizer.chat_template
