"""Every family of encoders against transformers on tiny random models, through the real runner."""

from __future__ import annotations

import random
from functools import reduce
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.model_runner.recording.eager_executor import EagerExecutor
from engine.model_runner.recording.programs.forward_program import ProgrammedForward
from engine.models.hf.hf_config import read_hf_spec
from engine.models.spec.encoder_spec import PoolingSpec
from engine.runtime.pooling import PoolingKind, PoolingParams

from .encoder_texts import WHOLE, Texts, make_encoder

MODERNBERT = {"num_hidden_layers": 5, "local_attention": 16}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("bert", {}),
    "bert heads of 32": ("bert", {"num_attention_heads": 2}),
    "bert tanh gelu, one type": ("bert", {"hidden_act": "gelu_new", "type_vocab_size": 1}),
    "bert relu": ("bert", {"hidden_act": "relu", "layer_norm_eps": 1e-3}),
    "bert with a head": ("bert", {"head": "ForMaskedLM"}),
    "bert classifier": ("bert", {"head": "ForSequenceClassification"}),
    "roberta": ("roberta", {"type_vocab_size": 1}),
    "roberta other padding": ("roberta", {"pad_token_id": 5, "head": "ForSequenceClassification"}),
    "xlm-roberta": ("xlm-roberta", {"type_vocab_size": 1}),
    "xlm-roberta with a head": ("xlm-roberta", {"type_vocab_size": 1, "head": "ForMaskedLM"}),
    "distilbert": ("distilbert", {}),
    "distilbert classifier": ("distilbert", {"head": "ForSequenceClassification"}),
    "modernbert": ("modernbert", MODERNBERT),
    "modernbert window of one": ("modernbert", {**MODERNBERT, "local_attention": 1}),
    "modernbert biases": (
        "modernbert",
        {
            **MODERNBERT,
            "norm_bias": True,
            "attention_bias": True,
            "mlp_bias": True,
            "hidden_activation": "silu",
        },
    ),
    "modernbert with a head": ("modernbert", {**MODERNBERT, "head": "ForMaskedLM"}),
    "modernbert classifier": ("modernbert", {**MODERNBERT, "head": "ForSequenceClassification"}),
    "modernbert global layers": ("modernbert", {**MODERNBERT, "layer_types": ["full_attention"] * 5}),
}
LENGTHS = (1, 2, 17, 40, 3, 64, 100, 9)


def texts_of(lengths: tuple[int, ...] = LENGTHS, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(6, 96) for _ in range(length)] for length in lengths]


@pytest.fixture
def make_texts(tmp_path, make_driver):
    def make(name: str, dtype: str = "float32", **options: Any):
        model_type, variant = VARIANTS[name]
        encoder = make_encoder(tmp_path / "encoder", model_type, dtype=dtype, **variant)
        driver = make_driver(encoder.spec, encoder.folder, dtype=dtype, max_model_len=150, **options)
        return encoder, Texts(driver)

    return make


@pytest.mark.fast_cases(5)
@pytest.mark.parametrize("name", VARIANTS)
def test_hidden_states_are_those_of_transformers(make_texts, name):
    encoder, runner = make_texts(name)
    texts = texts_of()
    for ours, text in zip(runner.states(texts), texts, strict=True):
        torch.testing.assert_close(ours, encoder.states(text), rtol=1e-5, atol=2e-5)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("name", ["bert", "xlm-roberta", "modernbert"])
def test_bfloat16_is_as_close_to_float32_as_that_of_transformers(make_texts, name):
    encoder, runner = make_texts(name, "bfloat16")
    texts = texts_of()
    theirs = [encoder.states(text) for text in texts]
    exact = [encoder.reference.float() and encoder.states(text) for text in texts]
    ours = runner.states(texts)
    error, their_error = (
        torch.cat([(a - b).flatten() for a, b in zip(states, exact, strict=True)]).square().mean().sqrt()
        for states in (ours, theirs)
    )
    assert error < 1.2 * their_error


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("name", ["bert", "modernbert"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_text_has_the_same_states_in_any_company(make_texts, name, dtype):
    _, runner = make_texts(name, dtype)
    texts = texts_of()
    together = runner.states(texts)
    for text, states in zip(texts, together, strict=True):
        alone = runner.states([text])[0]
        torch.testing.assert_close(
            alone,
            states,
            rtol=1e-5 if dtype == "float32" else 2e-2,
            atol=2e-5 if dtype == "float32" else 2e-2,
        )


@pytest.mark.parametrize("name", ["bert", "modernbert"])
def test_in_fixed_order_the_company_changes_no_bit(make_texts, name):
    _, runner = make_texts(name, "bfloat16", deterministic=True)
    texts = texts_of()
    together = runner.states(texts)
    for text, states in zip(texts, together, strict=True):
        assert torch.equal(runner.states([text])[0], states)


@pytest.mark.parametrize("name", ["bert", "modernbert"])
def test_a_step_is_one_native_call_and_equals_the_calls_one_by_one(make_texts, name):
    _, runner = make_texts(name, "bfloat16")
    executor = runner.inner
    assert isinstance(executor, EagerExecutor), "no decodes to record"
    assert isinstance(executor.forward, ProgrammedForward)
    texts = texts_of()
    recorded = runner.states(texts)
    executor.forward = runner.runner.model.forward
    for one, other in zip(recorded, runner.states(texts), strict=True):
        assert torch.equal(one, other)


def test_token_types_are_part_of_the_native_call(make_texts):
    _, runner = make_texts("bert", "bfloat16")
    executor = runner.inner
    assert isinstance(executor, EagerExecutor) and isinstance(executor.forward, ProgrammedForward)
    texts = texts_of((40, 20, 33))
    params = [PoolingParams(all_tokens=True, second_start=second) for second in (13, 0, 32)]
    recorded, recorded_plain = runner.states(texts, params), runner.states(texts)
    executor.forward = runner.runner.model.forward
    for one, other in zip(recorded, runner.states(texts, params), strict=True):
        assert torch.equal(one, other)
    for one, other in zip(recorded_plain, runner.states(texts), strict=True):
        assert torch.equal(one, other)
    assert torch.equal(recorded[1], recorded_plain[1]) and not torch.equal(recorded[0], recorded_plain[0])


def test_cls_pooling_computes_the_last_layer_for_the_first_token_only(tmp_path, make_driver):
    encoder = make_encoder(tmp_path / "encoder", "bert")
    pooling = PoolingSpec(task="embed", pooling="cls", size=64)
    runner = Texts(make_driver(msgspec.structs.replace(encoder.spec, pooling=pooling), encoder.folder))
    texts = texts_of()
    result = runner.step(texts, [WHOLE] * len(texts))
    assert len(runner.hidden[-1]) <= 2 * len(texts), (
        "the first token, and the last one, which shows what is not finite"
    )
    for n, text in enumerate(texts):
        vector = torch.frombuffer(bytearray(result.vectors[n]), dtype=torch.float32)
        torch.testing.assert_close(vector, encoder.states(text)[0], rtol=1e-5, atol=2e-5)


def test_a_pair_has_token_types_and_its_companions_have_their_own(make_texts):
    encoder, runner = make_texts("bert")
    texts, seconds = texts_of((40, 20, 33)), (13, 0, 32)
    params = [PoolingParams(all_tokens=True, second_start=second) for second in seconds]
    for ours, text, second in zip(runner.states(texts, params), texts, seconds, strict=True):
        torch.testing.assert_close(ours, encoder.states(text, second), rtol=1e-5, atol=2e-5)
    # The rows are used again by texts without pairs.
    assert (encoder.states(texts[0], 13) - encoder.states(texts[0])).abs().max() > 0.1
    for ours, text in zip(runner.states(texts), texts, strict=True):
        torch.testing.assert_close(ours, encoder.states(text), rtol=1e-5, atol=2e-5)


def test_a_model_without_token_types_takes_a_pair_as_one_text(make_texts):
    encoder, runner = make_texts("roberta")
    text = texts_of((30,))[0]
    params = [PoolingParams(all_tokens=True, second_start=9)]
    torch.testing.assert_close(runner.states([text], params)[0], encoder.states(text), rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("name", "longest"), [("bert", 160), ("roberta", 158), ("roberta other padding", 154)]
)
def test_the_longest_text_takes_the_last_position(tmp_path, make_driver, name, longest):
    model_type, variant = VARIANTS[name]
    encoder = make_encoder(tmp_path / "encoder", model_type, **variant)
    assert encoder.spec.max_position_embeddings == longest
    runner = Texts(make_driver(encoder.spec, encoder.folder, max_model_len=longest))
    text = texts_of((longest,))[0]
    torch.testing.assert_close(runner.states([text])[0], encoder.states(text), rtol=1e-5, atol=2e-5)


def test_only_the_wanted_states_are_computed_after_the_last_attention(make_texts):
    encoder, runner = make_texts("bert")
    texts = texts_of()
    runner.step(texts, [PoolingParams()] * len(texts))  # the last token of each
    for ours, text in zip(runner.hidden[-1], texts, strict=True):
        torch.testing.assert_close(ours, encoder.states(text)[-1], rtol=1e-5, atol=2e-5)


def test_the_vector_is_that_of_the_pooler(make_texts):
    encoder, runner = make_texts("modernbert")
    texts = texts_of()
    result = runner.step(texts, [WHOLE] * len(texts))
    assert sorted(result.vectors) == list(range(len(texts)))
    for n, text in enumerate(texts):
        vector = torch.frombuffer(bytearray(result.vectors[n]), dtype=torch.float32)
        torch.testing.assert_close(vector, encoder.states(text)[-1], rtol=1e-5, atol=2e-5)


CLASSIFIERS = {
    "bert": ("bert", 13),
    "roberta": ("roberta", 0),
    "xlm-roberta": ("xlm-roberta", 0),
    "distilbert": ("distilbert", 0),
    "modernbert": ("modernbert", 0),
    "modernbert mean": ("modernbert", 0),
}


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_scores_are_those_of_transformers(tmp_path, make_driver, name):
    model_type, second = CLASSIFIERS[name]
    options: dict[str, Any] = {"classifier_pooling": "mean"} if "mean" in name else {}
    encoder = make_encoder(
        tmp_path / "encoder", model_type, head="ForSequenceClassification", num_labels=3, **options
    )
    spec = read_hf_spec(encoder.folder)
    assert spec.pooling is not None and spec.pooling.size == 3
    runner = Texts(make_driver(spec, encoder.folder))
    texts = texts_of((40, 17, 64))
    params = PoolingParams(kind=PoolingKind.SCORE, all_tokens=True, second_start=second)
    result = runner.step(texts, [params] * len(texts))
    for n, text in enumerate(texts):
        types = (
            {"token_type_ids": torch.tensor([[int(k >= second) for k in range(len(text))]])} if second else {}
        )
        with torch.inference_mode():
            theirs = encoder.reference(torch.tensor([text]), **types).logits[0]
        ours = torch.frombuffer(bytearray(result.vectors[n]), dtype=torch.float32)
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=5e-5)


def test_all_layers_share_the_memory_of_one(make_texts):
    encoder, runner = make_texts("bert")
    pool = runner.runner.kv_pool
    assert len(pool.k) == len(pool.v) == 1
    assert pool.layer(0).k is pool.layer(2).k and pool.layer(0).v is pool.layer(2).v
    assert encoder.spec.kv_bytes_per_token(4) == 2 * 64 * 4 == pool.page_bytes // pool.page_size


def test_the_names_of_norms_in_the_first_exports_are_read(tmp_path, make_driver):
    encoder = make_encoder(tmp_path / "encoder", "bert")
    path = encoder.folder / "model.safetensors"
    tensors = load_file(path)
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    renamed = {
        reduce(lambda name, new: name.replace(new, old[new]), old, name): tensors[name] for name in tensors
    }
    assert sum("gamma" in name for name in renamed) == 7
    save_file(renamed, path)
    runner = Texts(make_driver(encoder.spec, encoder.folder))
    text = texts_of((30,))[0]
    torch.testing.assert_close(runner.states([text])[0], encoder.states(text), rtol=1e-5, atol=2e-5)


def test_logits_are_refused_by_name(make_texts):
    _, runner = make_texts("distilbert")
    with pytest.raises(NotImplementedError, match="distilbert is an encoder"):
        runner.runner.model.logits(torch.zeros(1, 64))
