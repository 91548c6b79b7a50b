"""`read_adapter`: what is taken from an adapter's headers, and what is refused, by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs
from safetensors.torch import save_file

from engine.models.adapters.read_adapter import read_adapter
from engine.models.spec.experts_spec import ExpertsSpec, Routing
from engine.models.spec.layer_form import FUSED
from engine.models.spec.model_spec import ModelSpec
from engine.runtime.errors import ConfigError
from tests.tokenizer_manager.media.test_image_store import VISION

BASE = ModelSpec(
    model_type="llama",
    vocab_size=50,
    hidden_size=16,
    intermediate_size=24,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    rms_norm_eps=1e-5,
    rope_theta=1e4,
    max_position_embeddings=64,
    tie_word_embeddings=True,
    torch_dtype="float32",
)
Q, V = "model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.v_proj"
SHAPES = {Q: (16, 16), V: (8, 16), "model.layers.0.mlp.down_proj": (16, 24)}
Tensors = dict[str, torch.Tensor]


def lora(name: str, rank: int = 4, prefix: str = "base_model.model.") -> Tensors:
    outputs, inputs = SHAPES[name]
    return {
        f"{prefix}{name}.lora_A.weight": torch.ones((rank, inputs)),
        f"{prefix}{name}.lora_B.weight": torch.ones((outputs, rank)),
    }


def write(folder: Path, tensors: Tensors | None = None, **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(lora(Q) | lora(V) if tensors is None else tensors, folder / "adapter_model.safetensors")
    fields = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none", **config}
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    return folder


def refusal(path: Path, base: ModelSpec = BASE, **options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        read_adapter(path, options.pop("name", "one"), base, **options)
    return str(caught.value)


def test_modules_ranks_and_scales(tmp_path):
    spec = read_adapter(write(tmp_path / "a"), "one", BASE)
    assert [(module.name, module.rank, module.scale) for module in spec.modules] == [(Q, 4, 2.0), (V, 4, 2.0)]
    assert (spec.name, spec.rank, spec.path) == ("one", 4, str(tmp_path / "a"))
    assert spec.num_bytes == spec.file.stat().st_size


def test_names_without_a_head_around_the_model(tmp_path):
    tensors = {name.replace("model.model.", "model."): tensor for name, tensor in lora(Q).items()}
    assert [module.name for module in read_adapter(write(tmp_path / "a", tensors), "one", BASE).modules] == [
        Q
    ]


def test_scale_by_the_square_root(tmp_path):
    spec = read_adapter(write(tmp_path / "a", use_rslora=True), "one", BASE)
    assert spec.modules[0].scale == 4.0


def test_the_fingerprint_is_of_content_not_of_the_name(tmp_path):
    first = read_adapter(write(tmp_path / "a"), "one", BASE)
    assert read_adapter(write(tmp_path / "b"), "two", BASE).fingerprint == first.fingerprint
    changed = lora(Q) | lora(V)
    next(iter(changed.values()))[0, 0] = 2.0
    others = [
        write(tmp_path / "c", changed),
        write(tmp_path / "d", lora_alpha=9),
        write(tmp_path / "e", use_rslora=True),
        write(tmp_path / "f", target_modules=["q_proj"]),
    ]
    found = {read_adapter(other, "one", BASE).fingerprint for other in others}
    assert len(found) == 4 and first.fingerprint not in found
    same = write(tmp_path / "g", lora_dropout=0.5, inference_mode=True, base_model_name_or_path="x")
    assert read_adapter(same, "one", BASE).fingerprint == first.fingerprint


@pytest.mark.parametrize(
    ("config", "selected"),
    [
        ({"target_modules": ["q_proj"]}, [Q]),
        ({"target_modules": "all-linear"}, [Q, V]),
        ({"target_modules": r".*\.(q|k)_proj"}, [Q]),
        ({"target_modules": ["q_proj", "v_proj"], "layers_to_transform": 1}, [V]),
        (
            {"target_modules": ["q_proj", "v_proj"], "layers_to_transform": [0], "layers_pattern": "layers"},
            [Q],
        ),
        ({"target_modules": "all-linear", "exclude_modules": ["v_proj"]}, [Q]),
        ({"target_modules": None}, [Q, V]),
    ],
)
def test_modules_that_the_configuration_selects(tmp_path, config, selected):
    spec = read_adapter(write(tmp_path / "a", **config), "one", BASE)
    assert [module.name for module in spec.modules] == selected


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"use_dora": True}, "use_dora is True, DoRA"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"lora_bias": True}, "lora_bias"),
        ({"peft_type": "LOHA"}, "peft_type is 'LOHA'"),
        ({"modules_to_save": ["embed_tokens"]}, "modules_to_save is ['embed_tokens']"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights is 'pissa_niter_4'"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens"),
        ({"r": 0}, "r is 0, expected a whole number"),
        (
            {"r": 8},
            "has the shape [4, 16], but model.layers.0.self_attn.q_proj of this model with rank 8 needs [8, 16]",
        ),
        ({"lora_alpha": "8"}, "lora_alpha is '8', expected a number"),
        ({"lora_alpha": float("inf")}, "lora_alpha"),
        ({"rank_pattern": {"q_proj": "x"}}, "rank_pattern['q_proj'] is 'x'"),
        ({"rank_pattern": {"(": 4}}, "which is no regular expression"),
        ({"target_modules": "(a+)+$"}, "expected a pattern without repeated groups"),
        ({"target_modules": 3}, "expected module names, or a pattern"),
        ({"layers_to_transform": ["a"]}, "expected layer numbers"),
    ],
)
def test_configurations_that_are_refused(tmp_path, config, words):
    assert words in refusal(write(tmp_path / "a", **config))


def other_tensors() -> dict[str, tuple[Tensors, str]]:
    swapped = {
        f"base_model.model.{V}.lora_A.weight": torch.ones((8, 4)),
        f"base_model.model.{V}.lora_B.weight": torch.ones((4, 16)),
    }
    head = {
        f"base_model.model.model.layers.0.self_attn.qkv_proj.lora_{part}.weight": torch.ones((4, 4))
        for part in "AB"
    }
    expert = {
        f"base_model.model.model.layers.0.mlp.experts.3.up_proj.lora_{part}.weight": torch.ones((4, 4))
        for part in "AB"
    }
    far = {
        f"base_model.model.model.layers.7.mlp.up_proj.lora_{part}.weight": torch.ones((4, 4)) for part in "AB"
    }
    q = f"base_model.model.{Q}"
    return {
        "swapped": (swapped, "A and B are swapped"),
        "other shapes": (
            {f"{q}.lora_A.weight": torch.ones((4, 20)), f"{q}.lora_B.weight": torch.ones((16, 4))},
            f"{q}.lora_A.weight' has the shape [4, 20]",
        ),
        "one dimension": (
            {f"{q}.lora_A.weight": torch.ones(4), f"{q}.lora_B.weight": torch.ones((16, 4))},
            "has the shape [4], but",
        ),
        "without B": ({f"{q}.lora_A.weight": torch.ones((4, 16))}, "is without its B"),
        "without A": (lora(V) | {f"{q}.lora_B.weight": torch.ones((16, 4))}, "is without its A"),
        "fused": (head, "separate modules"),
        "experts": (expert, "the base model has no such linear layer"),
        "layer": (far, "model.layers.7.mlp.up_proj.lora_A.weight': the base model has no such linear layer"),
        "DoRA": (lora(Q) | {f"{q}.lora_magnitude_vector": torch.ones(16)}, "is of DoRA"),
        "whole module": (
            lora(Q) | {"base_model.model.model.norm.weight": torch.ones(16)},
            "model.norm.weight' is no part of a LoRA adapter",
        ),
        "integers": ({name: tensor.int() for name, tensor in lora(Q).items()}, "has the dtype I32"),
        "nothing": ({}, "holds no LoRA tensors"),
    }


@pytest.mark.parametrize("case", other_tensors())
def test_tensors_that_are_refused(tmp_path, case):
    tensors, words = other_tensors()[case]
    message = refusal(write(tmp_path / "a", tensors))
    assert words in message
    assert str(tmp_path / "a") in message


def test_modules_of_fused_models(tmp_path):
    assert "this model has qkv_proj" in refusal(
        write(tmp_path / "a"), ModelSpec(**{**fields(BASE), "model_type": "phi3", "form": FUSED})
    )


def test_experts_of_a_mixture(tmp_path):
    base = ModelSpec(
        **{
            **fields(BASE),
            "model_type": "qwen3_moe",
            "experts": ExpertsSpec(
                num_experts=4, intermediate_size=8, routing=Routing(num_active=2, normalize=True)
            ),
        }
    )
    name = "base_model.model.model.layers.0.mlp.experts.1.gate_proj.lora_{}.weight"
    tensors = {name.format("A"): torch.ones((4, 16)), name.format("B"): torch.ones((8, 4))}
    found = read_adapter(write(tmp_path / "a", tensors), "one", base)
    assert [module.name for module in found.modules] == ["model.layers.0.mlp.experts.1.gate_proj"]
    router = {name.replace("experts.1.gate_proj", "gate"): tensor for name, tensor in tensors.items()}
    assert "adapters of routers are not supported" in refusal(write(tmp_path / "c", router), base)
    assert read_adapter(write(tmp_path / "b"), "one", base).rank == 4


def fields(spec: ModelSpec) -> dict[str, Any]:
    return {name: getattr(spec, name) for name in spec.__struct_fields__}


def test_the_maximum_rank(tmp_path):
    folder = write(tmp_path / "a")
    assert read_adapter(folder, "one", BASE, max_rank=4).rank == 4
    assert "has rank 4, the maximum is 3" in refusal(folder, max_rank=3)


@pytest.mark.parametrize("name", ["", "a/b", "a\\b", "..", "a:b", "a=b", "a\n", "x" * 300])
def test_names_that_are_refused(tmp_path, name):
    assert "name" in refusal(write(tmp_path / "a"), name=name)


def test_copies_of_the_base_models_weights_are_left_out(tmp_path):
    copies = {
        "base_model.model.lm_head.base_layer.weight": torch.ones((50, 16)),
        "base_model.model.model.embed_tokens.weight": torch.ones((50, 16)),
    }
    spec = read_adapter(write(tmp_path / "a", lora(Q) | copies), "one", BASE)
    assert [module.name for module in spec.modules] == [Q]


def test_truncated_files(tmp_path):
    folder = write(tmp_path / "a")
    path = folder / "adapter_model.safetensors"
    whole = path.read_bytes()
    for length in (0, 4, 8, 100, len(whole) - 1):
        path.write_bytes(whole[:length])
        assert str(path) in refusal(folder)


def test_an_absurd_header(tmp_path):
    folder = write(tmp_path / "a")
    path = folder / "adapter_model.safetensors"
    path.write_bytes((1 << 60).to_bytes(8, "little") + b"{}")
    assert "truncated, or not a safetensors file" in refusal(folder)
    header = json.dumps({"x": {"dtype": "F32", "shape": [1 << 40, 1 << 40], "data_offsets": [0, 4]}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    assert "damaged" in refusal(folder)


def test_missing_files(tmp_path):
    assert "no such adapter" in refusal(tmp_path / "nowhere")
    folder = write(tmp_path / "a")
    (folder / "adapter_config.json").unlink()
    assert "adapter_config.json" in refusal(folder)
    (tmp_path / "file").write_bytes(b"not a GGUF file")
    assert "neither a folder" in refusal(tmp_path / "file")
    folder = write(tmp_path / "b")
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    assert "can run code" in refusal(folder)


def test_links_that_leave_the_root(tmp_path):
    root, outside = tmp_path / "root", write(tmp_path / "outside")
    root.mkdir()
    inside = write(root / "inside")
    (root / "link").symlink_to(outside)
    (root / "good").symlink_to(inside)
    (root / "loop").symlink_to(root / "loop")
    half = write(root / "half")
    (half / "adapter_model.safetensors").unlink()
    (half / "adapter_model.safetensors").symlink_to(outside / "adapter_model.safetensors")
    for path in (root / "link", root / ".." / "outside", half, outside):
        assert "outside of" in refusal(path, root=root)
    assert "no such adapter" in refusal(root / "loop", root=root)
    assert read_adapter(root / "good", "one", BASE, root=root).path == str(inside)


GGUF_FACTS = {"general.type": "adapter", "adapter.type": "lora", "adapter.lora.alpha": 8.0}


def gguf_tensors() -> dict[str, np.ndarray]:
    return {
        "blk.0.attn_q.weight.lora_a": np.ones((4, 16), dtype=np.float32),
        "blk.0.attn_q.weight.lora_b": np.ones((16, 4), dtype=np.float32),
        "token_embd.weight.lora_a": np.ones((50, 2), dtype=np.float32),
        "token_embd.weight.lora_b": np.ones((16, 2), dtype=np.float32),
    }


def test_a_gguf_adapter(write_gguf, tmp_path):
    path = write_gguf(tmp_path / "a.gguf", GGUF_FACTS, gguf_tensors())
    spec = read_adapter(path, "one", BASE)
    assert [(module.name, module.rank, module.scale, module.heads) for module in spec.modules] == [
        ("model.embed_tokens", 2, 4.0, 0),
        (Q, 4, 2.0, 4),
    ]
    assert spec.rank == 4


@pytest.mark.parametrize(
    ("arch", "model_type", "heads"),
    [("llama", "mistral", 4), ("granite", "granite", 4), ("smollm3", "smollm3", 4), ("qwen2", "qwen2", 0)],
)
def test_the_order_of_rows_in_gguf_adapters_is_that_of_the_family_s_weights(
    write_gguf, tmp_path, arch, model_type, heads
):
    path = write_gguf(tmp_path / "a.gguf", GGUF_FACTS, gguf_tensors(), arch=arch)
    spec = read_adapter(path, "one", structs.replace(BASE, model_type=model_type))
    assert [module.heads for module in spec.modules if module.name == Q] == [heads]


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"general.type": "model"}, "general.type is 'model'"),
        ({"adapter.type": "control"}, "adapter.type is 'control'"),
    ],
)
def test_gguf_files_that_are_refused(write_gguf, tmp_path, facts, words):
    path = write_gguf(tmp_path / "a.gguf", {**GGUF_FACTS, **facts}, gguf_tensors())
    assert words in refusal(path)


def test_gguf_adapters_of_other_models(write_gguf, tmp_path):
    path = write_gguf(tmp_path / "a.gguf", GGUF_FACTS, gguf_tensors(), arch="qwen2")
    assert "general.architecture is 'qwen2', but the base model is llama" in refusal(path)
    tensors = {"blk.9.attn_q.weight.lora_a": np.ones((4, 16), dtype=np.float32)}
    tensors["blk.9.attn_q.weight.lora_b"] = np.ones((16, 4), dtype=np.float32)
    assert "no such linear layer" in refusal(write_gguf(tmp_path / "b.gguf", GGUF_FACTS, tensors))
    del tensors["blk.9.attn_q.weight.lora_b"]
    assert "is without" in refusal(write_gguf(tmp_path / "c.gguf", GGUF_FACTS, tensors))


def test_modules_of_a_tower_are_refused_where_images_are_served(tmp_path):
    """For text alone they change nothing."""
    text = structs.replace(BASE, files=structs.replace(BASE.files, language_of="smolvlm"))
    name = "model.vision_model.encoder.layers.0.self_attn.q_proj"
    of_tower = {f"base_model.model.{name}.lora_{part}.weight": torch.ones((4, 4)) for part in "AB"}
    own = {each.replace(".layers.", ".text_model.layers."): tensor for each, tensor in lora(Q).items()}
    folder = write(tmp_path / "a", of_tower | own)
    assert [module.name for module in read_adapter(folder, "one", text).modules] == [Q]
    seeing = structs.replace(text, vision=VISION)
    assert "1 module of the model's tower" in refusal(folder, seeing)
    assert [module.name for module in read_adapter(write(tmp_path / "b", own), "one", seeing).modules] == [Q]
