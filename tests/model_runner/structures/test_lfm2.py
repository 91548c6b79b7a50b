"""LFM2 against transformers: states of short convolutions beside keys and values."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from engine.models.gguf.gguf_file import GGUFFile
from engine.models.gguf_config import read_gguf_spec
from engine.runtime.sampling_params import SamplingParams

from .families import FAMILIES
from .text_checks import check_gguf_file, tokens_of

if TYPE_CHECKING:
    from ..conftest import TinyModel


variants = pytest.mark.parametrize("name", [n for n, row in FAMILIES.items() if row.model_type == "lfm2"])


@variants
def test_convolutions_have_states_and_attention_has_a_cache(make_tiny_model, name):
    tiny = make_tiny_model("lfm2", **FAMILIES[name].options)
    config, spec = tiny.reference.config, tiny.spec

    attending = config.layer_types.count("full_attention")
    head_dim = config.hidden_size // config.num_attention_heads
    assert spec.kv_bytes_per_token(2) == 4 * attending * config.num_key_value_heads * head_dim
    num_convs = config.num_hidden_layers - attending
    if num_convs:
        assert spec.state.slot_bytes(2) == 2 * num_convs * (config.conv_L_cache - 1) * config.hidden_size
    else:
        assert spec.state is None


def write_gguf(path: Path, tiny: TinyModel, kind_name: str = "F32") -> None:
    """As llama.cpp's converter writes LFM2: heads of keys and values for each layer, and no axis of length 1."""
    import gguf

    config, state, spec = tiny.reference.config, tiny.reference.state_dict(), tiny.spec
    arch = gguf.MODEL_ARCH.LFM2
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(spec.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    heads = config.num_key_value_heads
    writer.add_head_count_kv([heads if kind == "full_attention" else 0 for kind in config.layer_types])
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_shortconv_l_cache(config.conv_L_cache)
    writer.add_eos_token_id(2)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    kind = gguf.GGMLQuantizationType[kind_name]
    for name, tensor in state.items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        array = np.ascontiguousarray(tensor.float().squeeze().numpy())
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert target is not None, name
        if array.ndim == 1 or array.shape[-1] % 32 or "conv.conv" in name:
            writer.add_tensor(target, array)
        else:
            writer.add_tensor(target, gguf.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("variant", ["lfm2", "lfm2 tied, ends with a convolution"])
def test_a_gguf_file_is_the_same_model(make_tiny_model, make_driver, tmp_path, variant):
    tiny = make_tiny_model("lfm2", **FAMILIES[variant].options)
    write_gguf(tmp_path / "tiny.gguf", tiny)
    check_gguf_file(tiny, tmp_path / "tiny.gguf", make_driver)


def test_blocks_of_a_gguf_file_stay_quantized(make_tiny_model, make_driver, unpack, tmp_path):
    tiny = make_tiny_model("lfm2", **FAMILIES["lfm2"].options, hidden_size=96, intermediate_size=64)
    path = tmp_path / "tiny.gguf"
    write_gguf(path, tiny, "Q8_0")
    spec = read_gguf_spec(GGUFFile(path))
    assert spec.quantization is not None and spec.quantization.types["model.layers.0.conv.in_proj"] == "Q8_0"
    prompt, params = tokens_of(100), SamplingParams(temperature=0.0, prompt_logprobs=0)

    def logprobs(**options: Any) -> Any:
        driver = make_driver(spec, path, kind="gguf", **options)
        return unpack(driver.step([(driver.start(prompt, params), 100)]).prompt_logprobs[0])[0]

    exact = tiny.logprobs(prompt)[torch.arange(99), prompt[1:]].numpy()
    assert np.abs(logprobs(quantization="none") - exact).mean() < 0.1
    assert np.abs(logprobs(dtype="bfloat16") - exact).mean() < 0.2
