"""The text of multimodal folders against transformers, on tiny random models that transformers has saved."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.model_runner.adapters.adapter_store import SlotSizes
from engine.models.adapters.read_adapter import read_adapter
from engine.models.gguf.gguf_file import GGUFFile
from engine.models.gguf_config import read_gguf_spec
from engine.models.hf.hf_config import read_hf_spec
from engine.models.hf.multimodal_types import MULTIMODAL
from engine.models.weight_files.check_weights import check_folder_weights
from engine.models.weight_files.weight_memory import num_parameters
from engine.runtime.errors import ConfigError
from engine.runtime.sampling_params import SamplingParams
from tests.model_runner.adapters.peft_adapters import ALL_LINEAR, make_adapter
from tests.model_runner.conftest import LATENT_MIXTURE, Driver, TinyModel
from tests.model_runner.distributed.test_tensor_parallel import load_rank
from tests.model_runner.distributed.thread_group import ThreadGroup, on_ranks
from tests.model_runner.structures.families import GEMMA4, SHARING
from tests.model_runner.structures.text_checks import tokens_of
from tests.model_runner.weights.test_gguf_architectures import write

TEXT = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
SIGLIP = {
    "model_type": "siglip_vision_model",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
GEMMA = {
    "text_config": TEXT
    | {
        "model_type": "gemma3_text",
        "head_dim": 16,
        "num_hidden_layers": 7,
        "sliding_window": 16,
        "query_pre_attn_scalar": 16,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
    },
    "vision_config": SIGLIP,
    "mm_tokens_per_image": 4,
    "image_token_index": 90,
    "boi_token_index": 91,
    "eoi_token_index": 92,
}
PIXTRAL = {
    "model_type": "pixtral",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
CLIP = SIGLIP | {"model_type": "clip_vision_model", "projection_dim": 16}
QWEN_VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "patch_size": 14,
    "out_hidden_size": 48,
}
IDEFICS = {name: value for name, value in SIGLIP.items() if name != "model_type"}
MROPE = {"rope_type": "default", "rope_theta": 1000.0, "mrope_section": [2, 1, 1]}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "mrope_section": [2, 1, 1],
}
DELTA = {
    "num_hidden_layers": 3,
    "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "rope_parameters": MROPE | {"partial_rotary_factor": 0.5, "mrope_interleaved": True},
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 40,
}
AUDIO = {
    "d_model": 16,
    "encoder_layers": 1,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "max_source_positions": 8,
    "num_mel_bins": 4,
}
VOXTRAL = {
    "hidden_size": 16,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_source_positions": 8,
    "num_mel_bins": 4,
}
OF_GEMMA4 = TEXT | GEMMA4 | {"num_attention_heads": 4, "hidden_size": 48}
GEMMA4_VISION = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "patch_size": 2,
    "position_embedding_size": 16,
}
OF_LLAMA = TEXT | {"model_type": "llama"}
OF_QWEN = TEXT | {"rope_parameters": MROPE}
OF_EXPERTS: dict[str, Any] = {
    "text_config": OF_QWEN
    | {
        "head_dim": 8,
        "moe_intermediate_size": 40,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 3,
        "mlp_only_layers": [1],
    },
    "vision_config": QWEN_VISION | {"deepstack_visual_indexes": [0]},
}
LLAMA4 = {
    "text_config": TEXT
    | {
        "head_dim": 8,
        "num_hidden_layers": 4,
        "num_local_experts": 6,
        "intermediate_size": 24,
        "intermediate_size_mlp": 40,
        "interleave_moe_layer_step": 2,
        "attention_chunk_size": 45,
        "floor_scale": 32,
    },
    "vision_config": {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
        "projector_input_dim": 16,
        "projector_output_dim": 16,
        "vision_output_dim": 16,
    },
}
GLM_VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "image_size": 28,
    "patch_size": 14,
    "out_hidden_size": 48,
}
GLM_ROPE = {
    "rope_type": "default",
    "rope_theta": 1000.0,
    "partial_rotary_factor": 0.5,
    "mrope_section": [1, 1, 2],
}
OF_GLM4 = TEXT | {"hidden_size": 96, "rope_parameters": GLM_ROPE}
OF_GLM4_MOE = OF_GLM4 | {
    "head_dim": 16,
    "moe_intermediate_size": 24,
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "num_hidden_layers": 3,
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": ("gemma3", GEMMA),
    "gemma3 untied": ("gemma3", {**GEMMA, "tie_word_embeddings": False}),
    "gemma4": ("gemma4", {"text_config": {**OF_GEMMA4, **SHARING}, "vision_config": GEMMA4_VISION}),
    "gemma4_unified": (
        "gemma4_unified",
        {
            "text_config": {name: one for name, one in OF_GEMMA4.items() if "per_layer_input" not in name},
            "vision_config": {"mm_embed_dim": 16, "mm_posemb_size": 8, "patch_size": 2},
            "audio_config": None,
        },
    ),
    "mistral3": (
        "mistral3",
        {
            "text_config": TEXT | {"model_type": "mistral", "head_dim": 16, "sliding_window": None},
            "vision_config": PIXTRAL,
            "tie_word_embeddings": False,
        },
    ),
    "mistral3 window tied": (
        "mistral3",
        {"text_config": TEXT | {"model_type": "mistral", "sliding_window": 23}, "vision_config": PIXTRAL},
    ),
    "mistral3 of ministral3": (
        "mistral3",
        {
            "text_config": TEXT
            | {
                "model_type": "ministral3",
                "head_dim": 16,
                "rope_parameters": {
                    "rope_type": "yarn",
                    "rope_theta": 1e4,
                    "factor": 4.0,
                    "original_max_position_embeddings": 64,
                    "llama_4_scaling_beta": 0.1,
                    "mscale": 1.0,
                    "mscale_all_dim": 1.0,
                },
            },
            "vision_config": PIXTRAL,
        },
    ),
    "cohere2_vision": (
        "cohere2_vision",
        {
            "text_config": TEXT
            | {"model_type": "cohere2", "sliding_window": 19, "layer_norm_eps": 1e-5, "logit_scale": 1.0},
            "vision_config": SIGLIP,
            "downsample_factor": 2,
        },
    ),
    "aya_vision of cohere2": (
        "aya_vision",
        {
            "text_config": TEXT
            | {
                "model_type": "cohere2",
                "sliding_window": 19,
                "num_hidden_layers": 4,
                "layer_norm_eps": 1e-5,
                "logit_scale": 1.0,
            },
            "vision_config": SIGLIP,
            "downsample_factor": 2,
        },
    ),
    "qwen2_vl": (
        "qwen2_vl",
        {"text_config": OF_QWEN, "vision_config": QWEN_VISION | {"embed_dim": 16, "hidden_size": 48}},
    ),
    "qwen2_5_vl": ("qwen2_5_vl", {"text_config": OF_QWEN, "vision_config": QWEN_VISION}),
    "qwen2_5_vl yarn tied": (
        "qwen2_5_vl",
        {
            "text_config": OF_QWEN | {"rope_parameters": YARN},
            "vision_config": QWEN_VISION,
            "tie_word_embeddings": True,
        },
    ),
    "qwen2_5_vl window": (
        "qwen2_5_vl",
        {
            "text_config": OF_QWEN
            | {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1},
            "vision_config": QWEN_VISION,
        },
    ),
    "qwen3_vl": (
        "qwen3_vl",
        {
            "text_config": OF_QWEN | {"head_dim": 8, "attention_bias": True},
            "vision_config": QWEN_VISION | {"deepstack_visual_indexes": [0]},
        },
    ),
    "qwen3_vl_moe": ("qwen3_vl_moe", OF_EXPERTS),
    "qwen3_vl_moe square": (
        "qwen3_vl_moe",
        OF_EXPERTS | {"text_config": OF_EXPERTS["text_config"] | {"moe_intermediate_size": 24}},
    ),
    "llava of llama": ("llava", {"text_config": OF_LLAMA, "vision_config": CLIP}),
    "llava_next of mistral": (
        "llava_next",
        {"text_config": TEXT | {"model_type": "mistral"}, "vision_config": CLIP},
    ),
    "llava_onevision of qwen2": (
        "llava_onevision",
        {"text_config": TEXT | {"model_type": "qwen2", "tie_word_embeddings": True}, "vision_config": SIGLIP},
    ),
    "vipllava": (
        "vipllava",
        {"text_config": OF_LLAMA, "vision_config": CLIP, "vision_feature_layers": [-1]},
    ),
    "internvl of qwen3": (
        "internvl",
        {
            "text_config": TEXT | {"model_type": "qwen3", "head_dim": 8},
            "vision_config": SIGLIP | {"model_type": "internvl_vision"},
            "tie_word_embeddings": False,
        },
    ),
    "llama4": ("llama4", LLAMA4),
    "idefics3": ("idefics3", {"text_config": OF_LLAMA, "vision_config": IDEFICS}),
    "smolvlm tied": (
        "smolvlm",
        {"text_config": OF_LLAMA, "vision_config": IDEFICS, "tie_word_embeddings": True},
    ),
    "kimi_k25": (
        "kimi_k25",
        {
            "text_config": TEXT | LATENT_MIXTURE | {"model_type": "kimi_k2"},
            "vision_config": {**IDEFICS, "pos_emb_height": 2, "pos_emb_width": 2, "patch_size": 14},
            "projection_hidden_size": 64,
            "tie_word_embeddings": False,
        },
    ),
    "glm4v": ("glm4v", {"text_config": OF_GLM4, "vision_config": GLM_VISION}),
    "glm4v_moe": ("glm4v_moe", {"text_config": OF_GLM4_MOE, "vision_config": GLM_VISION}),
    "exaone4_5": (
        "exaone4_5",
        {
            "text_config": TEXT
            | {"model_type": "exaone4", "sliding_window": 16, "sliding_window_pattern": 2},
            "vision_config": QWEN_VISION | {"fullatt_block_indexes": [0], "num_key_value_heads": 2},
        },
    ),
    "video_llama_3": (
        "video_llama_3",
        {
            "text_config": TEXT | {"model_type": "qwen2"},
            "vision_config": {name: size for name, size in IDEFICS.items() if name != "image_size"},
        },
    ),
    "idefics2": (
        "idefics2",
        {
            "text_config": TEXT | {"model_type": "mistral", "sliding_window": None},
            "vision_config": IDEFICS,
            "perceiver_config": {"hidden_size": 48, "resampler_depth": 1, "resampler_n_latents": 4},
        },
    ),
    "lfm2_vl": (
        "lfm2_vl",
        {
            "text_config": TEXT
            | {
                "model_type": "lfm2",
                "num_hidden_layers": 3,
                "layer_types": ["conv", "full_attention", "conv"],
                "block_auto_adjust_ff_dim": False,
            },
            "vision_config": {
                "model_type": "siglip2_vision_model",
                "hidden_size": 16,
                "intermediate_size": 24,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "num_patches": 4,
                "patch_size": 2,
            },
            "projector_hidden_size": 16,
        },
    ),
    "qwen3_5": ("qwen3_5", {"text_config": TEXT | DELTA, "vision_config": QWEN_VISION}),
    "qwen3_5_moe": ("qwen3_5_moe", {"text_config": TEXT | DELTA | EXPERTS, "vision_config": QWEN_VISION}),
    "qwen2_audio": (
        "qwen2_audio",
        {"text_config": TEXT | {"model_type": "qwen2"}, "audio_config": AUDIO},
    ),
    "voxtral": (
        "voxtral",
        {
            "text_config": OF_LLAMA | {"head_dim": 16, "rope_theta": 1e4},
            "audio_config": VOXTRAL,
        },
    ),
}
"""Name -> `model_type` and options of a tiny configuration."""
kinds = pytest.mark.parametrize(("outer", "options"), KINDS.values(), ids=KINDS.keys())
MakeTiny = Callable[..., TinyModel]


@pytest.fixture
def make_tiny(tmp_path: Path) -> MakeTiny:
    """A tiny random multimodal model, saved by transformers.

    `names`: "saved": those that it writes, which are older than 4.52; "new": those of its modules.
    """

    def make(
        outer: str, options: dict[str, Any], *, dtype: str = "float32", names: str = "saved", **save: Any
    ) -> TinyModel:
        import transformers

        torch.manual_seed(0)
        config = transformers.AutoConfig.for_model(outer, **options)
        config._attn_implementation = "eager"
        reference = getattr(transformers, MULTIMODAL[outer].architecture)(config).eval()
        with torch.no_grad():
            for name, parameter in reference.named_parameters():
                if "norm" in name:
                    parameter.uniform_(0.5, 1.5)
                else:
                    parameter.normal_(0.0, 0.3 if parameter.ndim == 1 else 1.5 / parameter.shape[-1] ** 0.5)
        reference = reference.to(getattr(torch, dtype))
        folder = tmp_path / outer
        reference.save_pretrained(folder, **save)
        if names == "new":
            save_file(_modules_names(reference), folder / "model.safetensors")
        return TinyModel(reference, folder, read_hf_spec(folder))

    return make


def _modules_names(reference: Any) -> dict[str, torch.Tensor]:
    """All tensors by the names of the modules, which `save_pretrained` changes into those of older versions."""
    tied = set(reference.all_tied_weights_keys)
    return {name: tensor.clone() for name, tensor in reference.state_dict().items() if name not in tied}


@pytest.mark.fast_cases(6)
@kinds
@pytest.mark.parametrize("names", ["saved", "new"])
def test_logits_are_those_of_transformers(
    make_tiny: MakeTiny, make_driver: Any, unpack: Any, outer: str, options: dict[str, Any], names: str
) -> None:
    if (outer, names) == ("kimi_k25", "saved"):
        pytest.skip("transformers renames the layers of its text like those of its tower")
    tiny = make_tiny(outer, options, names=names)
    spec, summary = check_folder_weights(tiny.folder, tiny.spec)
    driver = make_driver(spec, tiny.folder)
    prompt = tokens_of(150, vocab=90)
    expected = tiny.logprobs(prompt)
    req = driver.start(prompt, SamplingParams(temperature=0.0, prompt_logprobs=5))

    found = []
    for chunk in (37, 1, 80, 32):
        found += unpack(driver.step([(req, chunk)]).prompt_logprobs[0])[0].tolist()

    np.testing.assert_allclose(found, expected[torch.arange(149), prompt[1:]], atol=2e-4)
    while len(req.output) < 8:
        driver.step([(req, 1)])
    assert tiny.logprobs(prompt + req.output)[149:-1].argmax(-1).tolist() == req.output
    numbers = {name: tensor.numel() for name, tensor in tiny.reference.named_parameters()}
    biases = sum(b.numel() for name, b in tiny.reference.named_buffers() if "correction_bias" in name)
    own = ("model.language_model.", "model.text_model.", "language_model.", "lm_head.")
    tower = sum(number for name, number in numbers.items() if not name.startswith(own))
    assert summary.num_ignored > 0 and summary.ignored_bytes == 4 * tower
    scalars = spec.num_layers if spec.form.layer_scalars else 0  # which are buffers
    assert num_parameters(spec) == sum(numbers.values()) + biases + scalars - tower


OMNI_AUDIO = {
    "d_model": 16,
    "encoder_layers": 1,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "num_mel_bins": 4,
    "max_source_positions": 8,
    "output_dim": 48,
}
OMNI = {
    "qwen2_5_omni": ("Qwen2_5Omni", ["Qwen2_5OmniModel"], OF_QWEN),
    "qwen3_omni_moe": (
        "Qwen3OmniMoe",
        ["Qwen3OmniMoeForConditionalGeneration"],
        {**OF_EXPERTS["text_config"], "mlp_only_layers": None},
    ),
}


@pytest.mark.parametrize("outer", OMNI)
def test_the_thinker_of_a_model_that_speaks(
    make_driver: Any, unpack: Any, tmp_path: Path, outer: str
) -> None:
    """`thinker_config` and the tensors `thinker.` are the model; the talker is not read."""
    import transformers

    torch.manual_seed(0)
    stem, architectures, text = OMNI[outer]
    vision = QWEN_VISION | {"deepstack_visual_indexes": [0]} if outer.startswith("qwen3") else QWEN_VISION
    config = transformers.AutoConfig.for_model(
        f"{outer}_thinker", text_config=text, vision_config=vision, audio_config=OMNI_AUDIO
    )
    config._attn_implementation = "eager"
    thinker = getattr(transformers, f"{stem}ThinkerForConditionalGeneration")(config).eval()
    thinker.save_pretrained(tmp_path)
    tensors = {f"thinker.{name}": each for name, each in load_file(tmp_path / "model.safetensors").items()}
    save_file(tensors | {"talker.model.norm.weight": torch.ones(4)}, tmp_path / "model.safetensors")
    path = tmp_path / "config.json"
    inner = json.loads(path.read_text())
    whole = {
        "model_type": outer,
        "architectures": architectures,
        "thinker_config": inner,
        "talker_config": {},
    }
    path.write_text(json.dumps(whole | {"dtype": "float32"}))

    spec, summary = check_folder_weights(tmp_path, read_hf_spec(tmp_path))

    assert spec.files.language_of == outer and summary.num_ignored > 1
    _check(TinyModel(thinker, tmp_path, spec), make_driver(spec, tmp_path), unpack)


def _check(tiny: TinyModel, driver: Any, unpack: Any) -> None:
    """Check the logits of one prompt and the tokens after it."""
    prompt = tokens_of(60, vocab=90)
    req = driver.start(prompt, SamplingParams(temperature=0.0, prompt_logprobs=0))
    found, _, _ = unpack(driver.step([(req, 60)]).prompt_logprobs[0])
    np.testing.assert_allclose(found, tiny.logprobs(prompt)[torch.arange(59), prompt[1:]], atol=2e-4)
    while len(req.output) < 4:
        driver.step([(req, 1)])
    assert tiny.logprobs(prompt + req.output)[59:-1].argmax(-1).tolist() == req.output


@pytest.mark.parametrize("names", ["saved", "new"])
@pytest.mark.parametrize("name", ["gemma3", "mistral3", "qwen2_5_vl"])
def test_both_names_of_tensors_are_tested(make_tiny: MakeTiny, name: str, names: str) -> None:
    tiny = make_tiny(*KINDS[name], names=names)
    stored = load_file(tiny.folder / "model.safetensors")
    old = {"qwen2_5_vl": "model.layers.0."}.get(name, "language_model.model.layers.0.")

    assert any(tensor.startswith("model.language_model.layers.0.") for tensor in stored) is (names == "new")
    assert any(tensor.startswith(old) for tensor in stored) is (names == "saved")


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl yarn tied"])
def test_fields_beside_the_vision_config(
    make_tiny: MakeTiny, make_driver: Any, unpack: Any, name: str
) -> None:
    """Published folders of Qwen2-VL and 2.5 have no `text_config`."""
    tiny = make_tiny(*KINDS[name])
    path = tiny.folder / "config.json"
    config = json.loads(path.read_text())
    inner = config.pop("text_config")
    rope = inner.pop("rope_parameters")
    theta, kind = rope.pop("rope_theta"), rope.pop("rope_type")
    del inner["model_type"]
    scaling = rope | {"type": "mrope" if kind == "default" else kind}
    path.write_text(json.dumps({**inner, **config, "rope_theta": theta, "rope_scaling": scaling}))

    spec = read_hf_spec(tiny.folder)

    assert spec == tiny.spec
    _check(tiny, make_driver(spec, tiny.folder), unpack)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("name", ["gemma3", "qwen3_vl"])
def test_bfloat16_is_as_close_to_float32_as_transformers_is(
    make_tiny: MakeTiny, make_driver: Any, unpack: Any, name: str
) -> None:
    tiny = make_tiny(*KINDS[name], dtype="bfloat16")
    driver = make_driver(tiny.spec, tiny.folder, dtype="bfloat16")
    prompt = tokens_of(120, vocab=90)
    theirs = tiny.logprobs(prompt)[torch.arange(119), prompt[1:]].numpy()
    tiny.reference.float()
    exact = tiny.logprobs(prompt)[torch.arange(119), prompt[1:]].numpy()

    req = driver.start(prompt, SamplingParams(temperature=0.0, prompt_logprobs=0))
    ours, _, _ = unpack(driver.step([(req, 120)]).prompt_logprobs[0])

    assert tiny.spec.torch_dtype == "bfloat16"
    assert np.abs(ours - exact).mean() < 1.25 * np.abs(theirs - exact).mean() + 1e-3


def test_shards(make_tiny: MakeTiny, make_driver: Any, unpack: Any) -> None:
    tiny = make_tiny(*KINDS["gemma3"], max_shard_size="60KB")
    assert (tiny.folder / "model.safetensors.index.json").exists()

    spec, summary = check_folder_weights(tiny.folder, tiny.spec)

    assert summary.num_files > 2 and summary.num_ignored > 0
    _check(tiny, make_driver(spec, tiny.folder), unpack)


def test_ranks_and_dummy_weights(make_tiny: MakeTiny, make_driver: Any) -> None:
    tiny = make_tiny(*KINDS["gemma3"])
    prompts = [tokens_of(30, vocab=90), tokens_of(7, seed=1, vocab=90)]
    expected = make_driver(tiny.spec, tiny.folder).generate(prompts, num=6)

    def tokens(group: ThreadGroup) -> list[list[int]]:
        runner, capacity = load_rank(tiny, group)
        return Driver(runner, capacity).generate(prompts, num=6)

    assert on_ranks(2, tokens) == [expected, expected]
    dummy = make_driver(tiny.spec).generate(prompts, num=6)
    assert dummy == make_driver(tiny.spec).generate(prompts, num=6) != expected


def test_a_missing_and_an_unknown_tensor_are_named(make_tiny: MakeTiny) -> None:
    tiny = make_tiny(*KINDS["mistral3"])
    path = tiny.folder / "model.safetensors"
    tensors = load_file(path)
    save_file({**tensors, "model.novel.weight": torch.ones(2)}, path)
    with pytest.raises(ConfigError, match=r"unexpected tensor 'model\.novel\.weight' \(1 in all\)"):
        check_folder_weights(tiny.folder, tiny.spec)

    save_file({name: x for name, x in tensors.items() if not name.endswith("0.mlp.up_proj.weight")}, path)
    with pytest.raises(ConfigError, match=r"tensor 'model\.layers\.0\.mlp\.up_proj\.weight' is missing"):
        check_folder_weights(tiny.folder, tiny.spec)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("name", ["gemma3", "qwen2_5_vl yarn tied", "olmo in llava"])
def test_transformers_can_compute_the_text(
    make_tiny: MakeTiny, make_driver: Any, unpack: Any, name: str
) -> None:
    """With `--model-impl transformers`, and where the engine has no model of the language model's type."""
    of_olmo = {"text_config": TEXT | {"model_type": "olmo"}, "vision_config": CLIP}
    tiny = make_tiny(*KINDS.get(name, ("llava", of_olmo)))
    spec, _ = check_folder_weights(tiny.folder, tiny.spec)

    _check(tiny, make_driver(spec, tiny.folder, model_impl="transformers"), unpack)


@pytest.mark.parametrize("arch", ["qwen2vl", "qwen3vl"])
def test_gguf_files_of_the_language_model(
    make_tiny_model: Any, make_driver: Any, unpack: Any, tmp_path: Path, arch: str
) -> None:
    tiny = make_tiny_model(arch.removesuffix("vl"), **({"head_dim": 8} if arch == "qwen3vl" else {}))
    path = tmp_path / "tiny.gguf"
    write(path, tiny, arch)
    spec = read_gguf_spec(GGUFFile(path))

    assert spec.model_type == arch.removesuffix("vl")
    _check(tiny, make_driver(spec, path, kind="gguf"), unpack)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("name", ["gemma3", "qwen2_5_vl"])
def test_adapters_of_the_whole_model(
    make_tiny: MakeTiny, make_driver: Any, unpack: Any, tmp_path: Path, name: str
) -> None:
    """Their modules are called as in the folder, and those of towers are ignored."""
    tiny = make_tiny(*KINDS[name])
    adapter = make_adapter(tiny.reference, tmp_path / "adapter", target_modules=[*ALL_LINEAR, "qkv"], seed=3)
    spec = read_adapter(adapter.folder, "one", tiny.spec)
    driver = make_driver(tiny.spec, tiny.folder, adapter_slots=SlotSizes(1, 4, set(ALL_LINEAR)))
    driver.runner.adapters.store.read(5, spec)
    prompt = tokens_of(20, vocab=90)

    req = driver.start(prompt, adapter_slot=1)
    driver.step([(req, 20)], adapter_loads=[(1, 5)])
    while len(req.output) < 6:
        driver.step([(req, 1)])

    assert adapter.logits(req.tokens)[19:-1].argmax(-1).tolist() == req.output
    assert tiny.logprobs(req.tokens)[19:-1].argmax(-1).tolist() != req.output
