"""Architectures that the engine has no model for, computed by transformers around our KV pool and attention."""

from __future__ import annotations

import os
import random
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from torch import nn

from engine.model_runner.hf_backend.transformers_load import _import_transformers, load_transformers_model
from engine.model_runner.hf_backend.transformers_model import ATTENTION_NAME
from engine.models.source import ModelSource
from engine.models.spec.layer_form import WindowsSpec
from engine.runtime.config.engine_config import ModelConfig
from engine.runtime.errors import ConfigError
from engine.runtime.sampling_params import SamplingParams

ALL_HEADS = {"num_key_value_heads": 6}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt_oss sinks": ("gpt_oss", {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "gemma2 capped scores": (
        "gemma2",
        {"head_dim": 16, "sliding_window": 20, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 9},
    ),
    "gpt_neox": ("gpt_neox", ALL_HEADS),
    "gpt2, learned positions": ("gpt2", {"n_inner": 80, **ALL_HEADS}),
    "olmo2": ("olmo2", {}),
    "opt, whose head calls an inner decoder": (
        "opt",
        {"ffn_dim": 64, "word_embed_proj_dim": 48, **ALL_HEADS},
    ),
    "granite, scales of its own": (
        "granite",
        {"attention_multiplier": 0.05, "logits_scaling": 3.0, "embedding_multiplier": 2.0},
    ),
    "starcoder2": ("starcoder2", {"sliding_window": None}),
    "starcoder2 window": ("starcoder2", {"sliding_window": 21}),
    "cohere2, windows in some layers": (
        "cohere2",
        {"sliding_window": 19, "num_hidden_layers": 4, "layer_norm_eps": 1e-5, "logit_scale": 0.5},
    ),
    "olmoe": ("olmoe", {"num_experts": 8, "num_experts_per_tok": 2}),
    "llama": ("llama", {}),
}
variants = pytest.mark.parametrize(("model_type", "options"), VARIANTS.values(), ids=VARIANTS.keys())


def tokens_of(length: int, seed: int = 0) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(96) for _ in range(length)]


def load(tiny: Any, spec: Any = None, max_model_len: int = 512, dtype=torch.float32, **settings: Any) -> Any:
    """The model alone, or why not."""
    config = ModelConfig(model_impl="transformers", **settings)
    source = ModelSource(settings.pop("kind", "hf"), str(tiny.folder), "test")
    spec = spec or tiny.spec
    device = torch.device("cpu")
    return load_transformers_model(
        config, source, spec, max_model_len=max_model_len, dtype=dtype, device=device
    )


@pytest.mark.fast_cases(3)
@variants
def test_chunks_prefixes_and_mixed_steps_give_what_transformers_gives_alone(
    make_tiny_model, make_driver, unpack, model_type, options
):
    tiny = make_tiny_model(model_type, **options)
    driver = make_driver(tiny.spec, tiny.folder, model_impl="transformers")
    params = SamplingParams(temperature=0.0, prompt_logprobs=0)
    decoding = [driver.start(tokens_of(length, seed=length)) for length in (1, 9, 60)]
    driver.step([(req, len(req.tokens)) for req in decoding])
    prompt = tokens_of(110, seed=7)
    long = driver.start(prompt, params)
    found = []

    for chunk in (37, 1, 72):
        result = driver.step([(long, chunk), *((req, 1) for req in decoding)])
        found += unpack(result.prompt_logprobs[0])[0].tolist()
    behind = driver.start(prompt[:60] + tokens_of(30, seed=8), prefix=(long, 60))
    driver.step([(behind, 30), (long, 1), *((req, 1) for req in decoding)])

    np.testing.assert_allclose(found, tiny.logprobs(prompt)[torch.arange(109), prompt[1:]], atol=2e-4)
    for req in (*decoding, long, behind):
        predicted = tiny.logprobs(req.tokens)[req.prompt_len - 1 : -1].argmax(-1).tolist()
        assert predicted == req.output


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_it_equals_our_own_model(make_tiny_llama, make_driver, kv_cache_dtype):
    tiny = make_tiny_llama()
    prompts = [tokens_of(length, seed=length) for length in (3, 40, 11)]
    drivers = [
        make_driver(tiny.spec, tiny.folder, model_impl=model_impl, kv_cache_dtype=kv_cache_dtype)
        for model_impl in ("engine", "transformers")
    ]

    ours, theirs = drivers[0].generate(prompts, num=8), drivers[1].generate(prompts, num=8, chunk=16)

    assert theirs == ours


def test_bfloat16_passes_the_comparison(make_tiny_model, make_driver, unpack):
    tiny = make_tiny_model("olmo2", dtype="bfloat16")
    driver = make_driver(tiny.spec, tiny.folder, dtype="bfloat16", model_impl="transformers")
    prompt = tokens_of(60)
    theirs = tiny.logprobs(prompt)[torch.arange(59), prompt[1:]].numpy()
    tiny.reference.float()
    exact = tiny.logprobs(prompt)[torch.arange(59), prompt[1:]].numpy()

    req = driver.start(prompt, SamplingParams(temperature=0.0, prompt_logprobs=0))
    ours, _, _ = unpack(driver.step([(req, 60)]).prompt_logprobs[0])

    assert np.abs(ours - exact).mean() < 1.25 * np.abs(theirs - exact).mean() + 1e-3


def test_dummy_weights_are_the_same_in_every_run_and_not_zero(make_tiny_model):
    tiny = make_tiny_model("olmo2")
    text, positions = torch.tensor(tokens_of(5)), torch.arange(5)

    models = [load(tiny, load_format="dummy", seed=seed) for seed in (3, 3, 4)]

    first, again, other = (model.logits(hidden_of(model, text, positions)) for model in models)
    assert torch.equal(first, again)
    assert not torch.allclose(first, other)
    assert first.std() > 0


def hidden_of(model: Any, text: torch.Tensor, positions: torch.Tensor) -> Any:
    """Without attention: each token alone."""
    model._decoder.set_attn_implementation("eager")
    try:
        with torch.inference_mode():
            return model._decoder(text[None], position_ids=positions[None]).last_hidden_state[0]
    finally:
        model._decoder.set_attn_implementation(ATTENTION_NAME)


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("model_type", "options", "reason"),
    [
        ("bloom", {"n_layer": 2, "n_head": 6}, "does not support external attention"),
        (
            "jamba",
            {"num_experts": 2, "num_experts_per_tok": 1},
            "layer 0 does not call the attention interface",
        ),
        ("nemotron", {}, "NemotronAttention does not get"),
        ("diffllama", {}, "layer 0 attends twice"),
        ("doge", {}, "layer 0 does not compute plain causal attention: values differ by"),
        ("camembert", {"is_decoder": True, **ALL_HEADS}, "it does not count positions 0, 1, 2 and so on"),
    ],
)
def test_attention_that_ours_cannot_stand_in_for_is_refused(make_tiny_model, model_type, options, reason):
    tiny = make_tiny_model(model_type, **options)
    with pytest.raises(ConfigError, match=f"{model_type} .*with model_impl transformers: .*{reason}"):
        load(tiny)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_kv_heads": 3}, "layer 0 has 6 heads, 2 KV heads, head dim 8; config.json says 6, 3, 8"),
        ({"windows": None}, "layer 0 attends to 21 tokens in transformers, all by"),
        (
            {"num_layers": 3, "windows": WindowsSpec(size=21, layers=(True,) * 3)},
            "layer 2 does not call the attention interface",
        ),
        ({"num_layers": 1, "windows": WindowsSpec(size=21, layers=(True,))}, "has the number 1, of 1 layers"),
        ({"vocab_size": 95}, "it has 96 logits, but vocab_size is 95"),
    ],
)
def test_facts_that_the_model_contradicts_are_refused(make_tiny_model, changes, reason):
    tiny = make_tiny_model("starcoder2", sliding_window=21)
    with pytest.raises(ConfigError, match=reason):
        load(tiny, replace(tiny.spec, **changes))


def test_position_biases_show_in_the_numbers(make_tiny_model, monkeypatch):
    """As in an architecture that adds ALiBi to the scores and says so nowhere."""
    from transformers.models.olmo2 import modeling_olmo2

    plain = modeling_olmo2.eager_attention_forward

    def biased(module, query, key, value, attention_mask, **options):
        distance = torch.arange(key.shape[2]) - torch.arange(query.shape[2])[:, None]
        return plain(module, query, key, value, attention_mask + 0.1 * distance, **options)

    tiny = make_tiny_model("olmo2")
    monkeypatch.setattr(modeling_olmo2, "eager_attention_forward", biased)
    with pytest.raises(
        ConfigError, match="layer 0 does not compute plain causal attention: values differ by"
    ):
        load(tiny)


def test_masks_that_the_model_makes_are_refused_even_if_they_hide_nothing_yet(make_tiny_model):
    tiny = make_tiny_model("doge")
    with torch.no_grad():
        for layer in tiny.reference.model.layers:
            layer.self_attn.A.zero_()  # the scores that its masks add
    tiny.reference.save_pretrained(tiny.folder)
    with pytest.raises(ConfigError, match="it brings a mask of its own for attention"):
        load(tiny)


def test_layers_that_mix_neighbors_are_refused(make_tiny_model, monkeypatch):
    """As a convolution over the text does: right alone, wrong beside others and in chunks."""
    from transformers.models.olmo2 import modeling_olmo2

    plain = modeling_olmo2.Olmo2MLP.forward
    tiny = make_tiny_model("olmo2")
    monkeypatch.setattr(
        modeling_olmo2.Olmo2MLP,
        "forward",
        lambda self, x: plain(self, x + nn.functional.pad(x, (0, 0, 1, 0))[:, :-1]),
    )
    with pytest.raises(ConfigError, match="uses? tokens before the current one in other ways than attention"):
        load(tiny)


def test_heads_that_need_more_than_hidden_states_are_refused(make_tiny_model, monkeypatch):
    """As one that adds something for each token that went in: ours is given hidden states only."""
    from transformers.models.olmo2 import modeling_olmo2

    plain = modeling_olmo2.Olmo2ForCausalLM.forward

    def forward(self, input_ids=None, **options):
        out = plain(self, input_ids, **options)
        if input_ids is not None:
            out.logits = out.logits + input_ids[..., None] * torch.linspace(0, 0.1, 96)
        return out

    tiny = make_tiny_model("olmo2")
    monkeypatch.setattr(modeling_olmo2.Olmo2ForCausalLM, "forward", forward)
    with pytest.raises(ConfigError, match="its head needs more than the last hidden states"):
        load(tiny)


def test_heads_that_reach_into_their_decoder_are_refused(make_tiny_model, monkeypatch):
    from transformers.models.olmo2 import modeling_olmo2

    plain = modeling_olmo2.Olmo2ForCausalLM.forward
    tiny = make_tiny_model("olmo2")
    monkeypatch.setattr(
        modeling_olmo2.Olmo2ForCausalLM,
        "forward",
        lambda self, **options: self.model.norm and plain(self, **options),
    )
    with pytest.raises(ConfigError, match=r"its head does not run without its decoder \(.*'norm'\)"):
        load(tiny)


def test_rotary_that_depends_on_the_batch_is_refused(make_tiny_model):
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4, "partial_rotary_factor": 1.0}
    tiny = make_tiny_model("gpt_neox", rope_parameters=dynamic, **ALL_HEADS)
    with pytest.raises(ConfigError, match="rope_type 'dynamic'; .* cached keys would not fit"):
        load(tiny)


def test_longrope_is_served_where_its_factors_stay_the_same(make_tiny_model):
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0, 1.1, 1.3, 2.0],
        "long_factor": [1.5, 3.0, 6.0, 9.0],
    }
    tiny = make_tiny_model(
        "phi3",
        rope_parameters=rope,
        original_max_position_embeddings=64,
        max_position_embeddings=2048,
    )
    load(tiny, max_model_len=64)
    with pytest.raises(ConfigError, match="rope_type 'longrope'; .*; use --max-model-len 64"):
        load(tiny, max_model_len=65)


def test_missing_weights_are_named(make_tiny_model):
    from safetensors.torch import load_file, save_file

    tiny = make_tiny_model("olmo2")
    path = tiny.folder / "model.safetensors"
    weights = load_file(path)
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, path, metadata={"format": "pt"})
    with pytest.raises(
        ConfigError, match=r"1 tensors of Olmo2ForCausalLM are missing, first .*layers\.1\.mlp\.up"
    ):
        load(tiny)


def test_the_compilers_cache_lies_beside_ours_and_not_among_temporary_files(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")  # so that it is as before afterwards
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    (tmp_path / "file").touch()

    monkeypatch.setenv("ENGINE_CACHE_DIR", str(tmp_path / "file" / "below"))
    _import_transformers()
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ

    monkeypatch.setenv("ENGINE_CACHE_DIR", str(tmp_path / "cache"))
    _import_transformers()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "cache" / "torchinductor")

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/the/users")
    _import_transformers()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "/the/users"


def test_without_the_package_it_says_what_to_install(make_tiny_model, monkeypatch):
    import sys

    tiny = make_tiny_model("olmo2")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match='install it: pip install "transformers>=5.0"'):
        load(tiny)
