"""Families with code of their own, beside the contract of all families: what only some files have, and refusals."""

from __future__ import annotations

import copy
import json

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from engine.models.hf.hf_config import read_hf_spec
from engine.models.weight_files.check_weights import check_folder_weights
from engine.runtime.errors import ConfigError

from ..conftest import TinyModel
from ..distributed.test_tensor_parallel import GREEDY, generate
from ..distributed.thread_group import on_ranks
from .families import DEEPSEEK_MOE, GEMMA
from .own_code import write_as_published
from .text_checks import tokens_of

PROMPT = tokens_of(30)


def write(tiny, model_type, architecture, **fields):
    path = tiny.folder / "config.json"
    other = {"model_type": model_type, "architectures": [architecture], **fields}
    path.write_text(json.dumps(json.loads(path.read_text()) | other))
    write_as_published(tiny.folder, model_type)


def test_rows_of_the_head_of_baichuan_2_have_length_one(make_tiny_model, make_driver):
    tiny = make_tiny_model("llama", num_key_value_heads=6)
    write(tiny, "baichuan", "BaichuanForCausalLM", z_loss_weight=0)
    spec = read_hf_spec(tiny.folder)
    check_folder_weights(tiny.folder, spec)

    found = make_driver(spec, tiny.folder).generate([PROMPT], num=8)

    with torch.no_grad():
        tiny.reference.lm_head.weight.copy_(F.normalize(tiny.reference.lm_head.weight))
    assert found == [tiny.greedy(PROMPT, 8)]


@pytest.mark.parametrize(("vocab_size", "is_second"), [(125_696, True), (64_000, False)])
def test_baichuan_2_is_also_known_by_its_vocabulary(make_tiny_model, vocab_size, is_second):
    tiny = make_tiny_model("llama", num_key_value_heads=6)
    write(tiny, "baichuan", "BaichuanForCausalLM", vocab_size=vocab_size)

    assert read_hf_spec(tiny.folder).form.unit_head == is_second


def test_llava_of_its_own_code_is_served_for_text(make_tiny_model, make_driver):
    tiny = make_tiny_model("llama")
    write(tiny, "llava", "LlavaLlamaForCausalLM", mm_vision_tower="openai/clip-vit-large-patch14-336")
    spec = read_hf_spec(tiny.folder)

    assert spec.model_type == "llama" and spec.files.language_of == "llava"
    assert make_driver(spec, tiny.folder).generate([PROMPT], num=4) == [tiny.greedy(PROMPT, 4)]


@pytest.mark.parametrize("prefix", ["language.", ""])
def test_deepseek_vl2_and_ocr_are_served_for_text(make_tiny_model, make_driver, prefix):
    """The tiny one of the first, and the second, which has the usual names of the language model."""
    tiny = make_tiny_model("deepseek", **DEEPSEEK_MOE)
    path, weights = tiny.folder / "config.json", tiny.folder / "model.safetensors"
    unused = {"kv_lora_rank": None, "qk_nope_head_dim": 0, "qk_rope_head_dim": 0, "v_head_dim": 0}
    text = json.loads(path.read_text()) | {"model_type": "deepseek_v2", "use_mla": False, **unused}
    text.pop("rms_norm_eps")
    text.pop("rope_parameters")
    outer = {"model_type": "deepseek_vl_v2", "vision_config": {"model_type": "vision"}}
    path.write_text(json.dumps({**outer, "language_config": text}))
    tensors = {f"{prefix}{name}": tensor for name, tensor in load_file(weights).items()}
    towers = ["vision.blocks.0.attn.qkv.weight", "image_newline", "view_seperator"]
    towers += ["model.sam_model.pos_embed", "model.vision_model.embeddings.weight", "projector.layers.weight"]
    save_file({**tensors, **{name: torch.ones(4) for name in towers}}, weights, {"format": "pt"})
    spec = read_hf_spec(tiny.folder)
    check_folder_weights(tiny.folder, spec)

    assert spec.latent is None and spec.files.language_of == "deepseek_vl_v2"
    assert make_driver(spec, tiny.folder).generate([PROMPT], num=6) == [tiny.greedy(PROMPT, 6)]


def test_the_first_files_of_gemma_name_gelu_and_mean_its_approximation(make_tiny_model, make_driver):
    tiny = make_tiny_model("gemma", **GEMMA)
    path = tiny.folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"hidden_act": "gelu"}))

    driver = make_driver(read_hf_spec(tiny.folder), tiny.folder)
    assert driver.generate([PROMPT], num=6) == [tiny.greedy(PROMPT, 6)]


@pytest.mark.parametrize(
    ("made_as", "model_type", "architecture", "fields", "rule"),
    [
        (
            "llama",
            "baichuan",
            "BaichuanForCausalLM",
            {"hidden_size": 5120},
            "hidden_size is 5120, position biases",
        ),
        ("qwen2", "qwen", "QWenLMHeadModel", {"no_bias": False}, "no_bias is False, only true"),
        ("glm", "chatglm", "ChatGLMModel", {"rmsnorm": False}, "rmsnorm is False, only true"),
        ("glm", "chatglm", "ChatGLMModel", {"add_bias_linear": True}, "add_bias_linear is True, only false"),
        ("stablelm", "stablelm", "StableLmForCausalLM", {"qk_layernorm": True}, "qk_layernorm is True"),
        (
            "stablelm",
            "stablelm",
            "StableLmForCausalLM",
            {"use_parallel_residual": True},
            "use_parallel_residual is True",
        ),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    make_tiny_model, made_as, model_type, architecture, fields, rule
):
    tiny = make_tiny_model(made_as)
    write(tiny, model_type, architecture)
    path = tiny.folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    with pytest.raises(ConfigError, match=rule):
        read_hf_spec(tiny.folder)


def test_beyond_the_length_of_training_qwen_1_is_not_served(make_tiny_model):
    tiny = make_tiny_model("qwen2", num_key_value_heads=6)
    write(tiny, "qwen", "QWenLMHeadModel")

    assert read_hf_spec(tiny.folder).max_position_embeddings == 256


def test_a_quarter_of_each_head_of_stablelm_rotates_by_default(make_tiny_model):
    tiny = make_tiny_model("stablelm", head_dim=16, num_attention_heads=3, num_key_value_heads=3)
    path = tiny.folder / "config.json"
    config = json.loads(path.read_text())
    config.pop("partial_rotary_factor", None)
    path.write_text(json.dumps(config | {"rope_parameters": None, "rope_theta": 1e4}))

    assert read_hf_spec(tiny.folder).rotary_dim == 4


def test_chatglm_2_divides_positions(make_tiny_model):
    """Its files of 32K do; later models of the type have a larger base."""
    tiny = make_tiny_model("glm")
    write(tiny, "chatglm", "ChatGLMModel", _name_or_path="THUDM/chatglm2-6b-32k")
    path = tiny.folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rope_ratio": 4}))
    spec = read_hf_spec(tiny.folder)
    assert (spec.rope_theta, spec.rope_scaling.kind, spec.rope_scaling.factor) == (1e4, "linear", 4.0)

    path.write_text(path.read_text().replace("chatglm2-6b-32k", "chatglm3-6b-32k"))
    spec = read_hf_spec(tiny.folder)
    assert (spec.rope_theta, spec.rope_scaling.kind) == (4e4, "default")


def test_frequencies_of_internlm_2_scale_only_beyond_the_length_that_is_served(make_tiny_model, make_driver):
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    tiny = make_tiny_model("llama", max_position_embeddings=80)
    scaling = {"rope_scaling": {"type": "dynamic", "factor": 2.0}, "rope_theta": 1e4}
    write(tiny, "internlm2", "InternLM2ForCausalLM", rope_parameters=None, **scaling)
    spec = read_hf_spec(tiny.folder)
    prompt = tokens_of(70)

    found = make_driver(spec, tiny.folder).generate([prompt], num=10)

    config = copy.deepcopy(tiny.reference.config)
    config.rope_parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    tiny.reference.model.rotary_emb = LlamaRotaryEmbedding(config)
    assert found == [tiny.greedy(prompt, 10)] and spec.max_position_embeddings == 80


def test_ranks_have_the_rows_of_their_heads_of_internlm_2(make_tiny_model):
    tiny = make_tiny_model("llama")
    write(tiny, "internlm2", "InternLM2ForCausalLM")
    tiny = TinyModel(tiny.reference, tiny.folder, read_hf_spec(tiny.folder))
    expected, _ = generate(tiny, GREEDY)

    def tokens(group):
        return generate(tiny, GREEDY, group)[0]

    assert on_ranks(2, tokens) == [expected] * 2
