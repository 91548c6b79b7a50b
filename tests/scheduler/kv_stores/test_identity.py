"""Identity and keys of pages: what must differ for equal tokens, and what must not."""

from __future__ import annotations

import hashlib
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from engine.models.spec.layer_form import RopeScaling
from engine.models.spec.model_spec import ModelSpec
from engine.runtime.config.device_config import KernelConfig, ParallelConfig
from engine.runtime.config.engine_config import CacheConfig, EngineConfig, ModelConfig
from engine.runtime.errors import ConfigError
from engine.scheduler.kv_stores.identity import (
    identity_of,
    is_salted,
    kv_facts,
    weights_content,
)
from engine.scheduler.prefix_cache.base import namespace_of
from engine.scheduler.prefix_cache.tier_pages import page_keys, root_key

SPEC = ModelSpec(
    model_type="llama",
    vocab_size=97,
    hidden_size=64,
    intermediate_size=128,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    rms_norm_eps=1e-5,
    rope_theta=1e4,
    max_position_embeddings=2048,
    tie_word_embeddings=True,
    torch_dtype="bfloat16",
)
CONFIG = EngineConfig(model=ModelConfig(dtype="bfloat16"), cache=CacheConfig(page_size=16))
BUILD = {"backend": "native", "instruction_set": "avx2"}
TENSORS = (("bfloat16", 6144),) * 60
SIZE = 100_000


def identity_with(
    config: EngineConfig = CONFIG,
    spec: ModelSpec = SPEC,
    tensors: Any = TENSORS,
    max_model_len: int = 2048,
    weights: str = "w",
    **build: str,
) -> bytes:
    facts = kv_facts(config, spec, tensors, max_model_len=max_model_len, build=BUILD | build)
    return identity_of(facts, weights)


def with_rope(**fields: Any) -> ModelSpec:
    return msgspec.structs.replace(SPEC, rope_scaling=RopeScaling(**fields))


@pytest.mark.parametrize(
    "other",
    [
        {"weights": "other"},
        {"spec": with_rope(kind="linear", factor=2.0)},
        {"spec": with_rope(kind="linear", factor=4.0)},
        {"spec": msgspec.structs.replace(SPEC, rope_theta=5e5)},
        {"config": replace(CONFIG, model=replace(CONFIG.model, dtype="float32"))},
        {"config": replace(CONFIG, model=replace(CONFIG.model, quantization="int8"))},
        {"config": replace(CONFIG, cache=replace(CONFIG.cache, page_size=32))},
        {"config": replace(CONFIG, cache=replace(CONFIG.cache, kv_cache_dtype="int8"))},
        {"config": replace(CONFIG, parallel=ParallelConfig(tp=2))},
        {"config": replace(CONFIG, kernels=KernelConfig(deterministic=True))},
        {"config": replace(CONFIG, kernels=KernelConfig(avoid_kernels=("triton",)))},
        {"tensors": (("uint8", 3072),) * 60},
        {"tensors": TENSORS[1:]},
        {"backend": "torch_native"},
        {"instruction_set": "avx512"},
    ],
    ids=str,
)
def test_what_changes_kv_changes_the_identity(other):
    assert identity_with(**other) != identity_with()


def test_the_longest_context_matters_only_where_frequencies_depend_on_it():
    longrope = with_rope(kind="longrope", original_max_position=4096)

    assert identity_with(max_model_len=8192) == identity_with(max_model_len=2048)
    assert identity_with(spec=longrope, max_model_len=8192) != identity_with(
        spec=longrope, max_model_len=2048
    )


def test_adapters_salts_and_their_absence_have_keys_of_their_own():
    namespaces = ["", namespace_of("", "adapter a"), namespace_of("", "adapter b"), namespace_of("salt", "")]
    roots = {root_key(identity_with(), namespace) for namespace in namespaces}

    assert len(roots) == len(namespaces)
    assert [is_salted(namespace) for namespace in namespaces] == [False, False, False, True]
    root_key(identity_with(), namespace_of("\ud800", ""))  # a lone surrogate, which JSON can hold


def test_a_key_names_all_tokens_before_the_end_of_its_page():
    tokens = np.arange(64, dtype=np.int32)
    root = root_key(identity_with(), "")
    keys = list(page_keys(root, tokens.tobytes(), 16))

    assert len(keys) == 4 and len(set(keys)) == 4
    assert keys[:3] == list(page_keys(root, tokens[:48].tobytes(), 16))
    tokens[0] = 99
    assert not set(keys) & set(page_keys(root, tokens.tobytes(), 16))


# ---------------------------------------------------------------- weights


def write(folder: Path, weights: bytes) -> Path:
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(weights)
    return folder


def test_weights_are_their_bytes_wherever_they_lie(tmp_path):
    memo = tmp_path / "weights.json"
    first, second = (write(tmp_path / name, bytes(SIZE)) for name in ("first", "second"))
    content = weights_content(first, "auto", 0, memo)

    assert weights_content(second, "auto", 0, memo) == content
    assert weights_content(first.rename(tmp_path / "moved"), "auto", 0, memo) == content


def test_one_byte_in_the_middle_makes_other_weights(tmp_path):
    memo = tmp_path / "weights.json"
    folder = write(tmp_path / "model", bytes(SIZE))
    file = folder / "model.safetensors"
    content = weights_content(folder, "auto", 0, memo)

    with file.open("r+b") as opened:
        opened.seek(SIZE // 2)
        opened.write(b"\1")

    assert weights_content(folder, "auto", 0, memo) != content


def test_files_that_have_not_changed_are_not_read_again(tmp_path, monkeypatch):
    memo = tmp_path / "weights.json"
    folder = write(tmp_path / "model", bytes(SIZE))
    os.utime(folder / "model.safetensors", ns=(0, 1))  # not just now
    content = weights_content(folder, "auto", 0, memo)

    def refuse(*_args: Any) -> None:
        raise AssertionError("read again")

    real = hashlib.sha256
    with monkeypatch.context() as patch:
        patch.setattr(hashlib, "sha256", lambda *data: real(*data) if data else refuse())
        assert weights_content(folder, "auto", 0, memo) == content
    memo.write_bytes(b'{"/torn')
    assert weights_content(folder, "auto", 0, memo) == content


def test_dummy_weights_are_their_seed_and_missing_ones_an_error(tmp_path):
    memo = tmp_path / "weights.json"

    assert weights_content(tmp_path, "dummy", 1, memo) != weights_content(tmp_path, "dummy", 2, memo)
    with pytest.raises(ConfigError, match="neither"):
        weights_content(tmp_path, "auto", 0, memo)
