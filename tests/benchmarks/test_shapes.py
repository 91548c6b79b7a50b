"""`shapes`: the files that it writes are such models, and the figures of all sides are read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import gguf
import pytest

from engine import LLM, SamplingParams
from engine.models.gguf.gguf_file import GGUFFile
from engine.models.gguf_config import read_gguf_spec

TOKENS = [*"abcdefgh", "ab", "abc", "<|end|>"]
TINY: dict[str, Any] = {
    "vocab_size": 70,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "moe_intermediate_size": 32,
    "num_experts": 6,
    "num_experts_per_tok": 3,
}


@pytest.fixture
def models(import_benchmark: Callable[[str], ModuleType]) -> ModuleType:
    return import_benchmark("random_models")


@pytest.fixture
def shapes(import_benchmark: Callable[[str], ModuleType]) -> ModuleType:
    return import_benchmark("shapes")


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    path = tmp_path / "tokenizer.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_merges(["a b", "ab c"])
    writer.add_token_types([1] * 10 + [3])
    writer.add_eos_token_id(10)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tiny(models: ModuleType, name: str) -> Any:
    shape = models.SHAPES[name]
    sizes = dict(TINY)
    if "num_local_experts" in shape.config:
        sizes["num_local_experts"] = sizes.pop("num_experts")
    return models.Shape({**shape.config, **sizes}, shape.metadata, shape.expert_type)


@pytest.mark.slow
def test_every_shape_is_written_in_both_forms(models: ModuleType, tokenizer: Path, tmp_path: Path) -> None:
    params = SamplingParams(max_new_tokens=3, temperature=0.0, ignore_eos=True)
    assert models.SHAPES
    for name in models.SHAPES:
        shape = tiny(models, name)
        for model in (
            models.write_folder(shape, tmp_path / name, tokenizer),
            models.write_gguf(shape, tmp_path / f"{name}.gguf", tokenizer),
        ):
            with LLM(str(model), max_total_tokens=256, num_threads=1) as llm:
                assert len(llm.generate([[1, 2, 3]], params)[0].token_ids) == 3


def test_a_mixture_has_its_experts_in_blocks(models: ModuleType, tokenizer: Path, tmp_path: Path) -> None:
    path = models.write_gguf(tiny(models, "qwen3-30b-a3b"), tmp_path / "moe.gguf", tokenizer)
    file = GGUFFile(path)
    spec = read_gguf_spec(file)
    assert (spec.model_type, spec.num_layers, spec.vocab_size) == ("qwen3_moe", 2, 70)
    assert spec.experts is not None and spec.quantization is not None
    assert (spec.experts.num_experts, spec.experts.num_active) == (6, 3)
    assert spec.quantization.types["model.layers.1.mlp.experts.down_proj"] == "Q4_0"
    assert file.tensors["blk.1.ffn_gate_exps.weight"].shape == (6, 32, 64)
    tokens = file.metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, list) and len(tokens) == 70


def test_sides_take_turns_and_their_medians_are_compared(
    shapes: ModuleType, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    bench = tmp_path / "llama-bench"
    printed = [{"n_prompt": 512, "avg_ts": 50.0}, {"n_prompt": 0, "avg_ts": 4.0}]
    bench.write_text(f"#!/bin/sh\necho '{json.dumps(printed)}'\n")
    bench.chmod(0o755)
    sides = {
        "engine": lambda: shapes.Rates(100.0, 10.0),
        "llama.cpp": lambda: shapes.run_llama(bench, tmp_path / "any.gguf", 2),
    }
    found = shapes.compare("tiny", sides, 2)
    rounds = capsys.readouterr().err.splitlines()
    assert [line.split()[3] for line in rounds] == ["engine", "llama.cpp"] * 2
    assert shapes.rows_of("tiny", "4-bit", found) == [
        "| tiny | 4-bit | engine | 100.0 | 10.0 |  |  |",
        "| tiny | 4-bit | llama.cpp | 50.0 | 4.0 | 2.00 (target 0.95) | 2.50 (target 1.3) |",
    ]


def test_a_side_that_fails_is_left_out_and_said(
    shapes: ModuleType, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    bench = tmp_path / "llama-bench"
    bench.write_text("#!/bin/sh\necho unknown architecture >&2; exit 3\n")
    bench.chmod(0o755)
    sides = {
        "engine": lambda: shapes.Rates(100.0, 10.0),
        "llama.cpp": lambda: shapes.run_llama(bench, tmp_path / "any.gguf", 2),
    }
    assert list(shapes.compare("tiny", sides, 2)) == ["engine"]
    said = capsys.readouterr().err
    assert said.count("tiny: llama.cpp is left out: exit code 3: unknown architecture") == 1
