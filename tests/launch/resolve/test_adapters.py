"""`resolve_adapters`: what is read at the start, the numbers for "auto", and every refusal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine.launch.resolve.adapters import adapted_names, adapter_bytes, resolve_adapters
from engine.models.spec.model_spec import ModelSpec
from engine.runtime.config.config_sources import from_arguments, merge
from engine.runtime.config.engine_config import EngineConfig
from engine.runtime.errors import ConfigError
from tests.adapter_files import write_adapter
from tests.launch.resolve.test_encoder_settings import MINILM

BASE = msgspec.structs.replace(
    MINILM,
    model_type="llama",
    encoder=None,
    hidden_size=16,
    intermediate_size=24,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    vocab_size=50,
)


def config_of(**settings: Any) -> EngineConfig:
    return merge(from_arguments(settings)).config


def refusal(spec: ModelSpec = BASE, **settings: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve_adapters(config_of(**settings), spec)
    return str(caught.value)


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, Path]:
    return {
        "a": write_adapter(tmp_path / "a", BASE, seed=1, rank=4),
        "b": write_adapter(tmp_path / "b", BASE, seed=2, rank=24, modules=("down_proj",)),
    }


def test_without_adapters_nothing_changes():
    config = config_of()
    resolved = resolve_adapters(config, BASE)
    assert resolved == ((), config.adapters, {})
    assert adapter_bytes(config, BASE, 2) == 0


def test_ranks_and_modules_of_the_start(folders: dict[str, Path]):
    resolved = resolve_adapters(config_of(lora=[f"x={folders['a']}", f"y={folders['b']}"]), BASE)
    assert [(each.store_id, each.spec.name, each.pinned) for each in resolved.adapters] == [
        (1, "x", True),
        (2, "y", True),
    ]
    assert resolved.config.max_lora_rank == 24
    assert resolved.config.lora_target_modules == ("down_proj", "q_proj", "v_proj")
    assert resolved.notes == {
        "max_lora_rank": "the largest rank of the adapters",
        "lora_target_modules": "what the adapters change",
    }


def test_names_of_equal_adapters_share_a_number(folders: dict[str, Path]):
    lora = [f"x={folders['a']}", f"y={folders['b']}", f"z={folders['a']}"]
    resolved = resolve_adapters(config_of(lora=lora), BASE)
    assert [each.store_id for each in resolved.adapters] == [1, 2, 1]


@pytest.mark.parametrize(("name", "rank"), [("a", 16), ("b", 24)])
def test_room_for_adapters_that_come_later(folders: dict[str, Path], name: str, rank: int):
    resolved = resolve_adapters(config_of(lora=[f"x={folders[name]}"], enable_lora=True), BASE)
    assert resolved.config.max_lora_rank == rank
    assert resolved.config.lora_target_modules[0] == "all-linear"
    names = adapted_names(resolved.config, BASE)
    assert names == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def test_room_without_any(tmp_path: Path):
    resolved = resolve_adapters(config_of(allow_runtime_lora=True, lora_root=str(tmp_path)), BASE)
    assert (resolved.config.max_lora_rank, resolved.config.lora_target_modules) == (16, ("all-linear",))


def test_given_numbers_stay(folders: dict[str, Path]):
    given = {"max_lora_rank": 64, "lora_target_modules": ["q_proj", "v_proj", "lm_head"]}
    resolved = resolve_adapters(config_of(lora=[f"x={folders['a']}"], **given), BASE)
    assert resolved.config.max_lora_rank == 64
    assert adapted_names(resolved.config, BASE) == {"q_proj", "v_proj", "lm_head"}
    assert resolved.notes == {}


def test_bytes_are_slots_times_rank_times_widths():
    settings = {"enable_lora": True, "max_lora_rank": 8, "max_loras_per_batch": 3}
    config = config_of(**settings, lora_target_modules=["q_proj", "down_proj"])
    widths = 2 * ((16 + 16) + (24 + 16))  # inputs and outputs, in two layers
    assert adapter_bytes(config, BASE, 2) == 3 * 8 * widths * 2


@pytest.mark.parametrize("target", ["q_porj", "all", "", "experts"])
def test_a_target_that_the_model_lacks(target: str):
    config = config_of(enable_lora=True, lora_target_modules=[target])
    with pytest.raises(ConfigError) as caught:
        adapted_names(config.adapters, BASE)
    assert str(caught.value).startswith(
        f"lora_target_modules has {target!r}, but the model has no such module; it has"
    )
    assert "all-linear, down_proj, embed_tokens, gate_proj" in str(caught.value)


def test_what_is_refused(folders: dict[str, Path], tmp_path: Path):
    a = folders["a"]
    assert "adapters of encoders (bert) are not supported; merge the adapter" in refusal(
        MINILM, enable_lora=True
    )
    assert "nowhere: no such adapter" in refusal(lora=[f"x={tmp_path / 'nowhere'}"])
    assert "has rank 24, the maximum is 8" in refusal(lora=[f"x={folders['b']}"], max_lora_rank=8)
    assert "'x:y' cannot be an adapter's name" in refusal(lora=[f"x:y={a}"])
    other = msgspec.structs.replace(BASE, hidden_size=32, head_dim=16)
    assert "has the shape [4, 16]" in refusal(other, lora=[f"x={a}"])
    shallow = msgspec.structs.replace(BASE, num_layers=1)
    assert "the adapter belongs to another model" in refusal(shallow, lora=[f"x={a}"])
    assert refusal(lora=[f"x={a}"], lora_target_modules=["o_proj"]) == (
        "the adapter 'x' changes model.layers.0.self_attn.q_proj, but lora_target_modules is o_proj; add q_proj, or "
        "leave the setting out"
    )
    assert "there is no such folder; create it first" in refusal(lora_root=str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="lora names an adapter 'x', which is the name of the model"):
        resolve_adapters(config_of(lora=[f"x={a}"]), BASE, "x")
    file = a / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    assert str(file) in refusal(lora=[f"x={a}"])
