"""`mixture`: the file that it writes is such a model, and both sides' figures are read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import gguf
import pytest

from engine.runtime.model_files.gguf.gguf_config import read_gguf_spec
from engine.runtime.model_files.gguf.gguf_file import GGUFFile

from .conftest import run_benchmark as run

TOKENS = [f"t{n}" for n in range(70)]


@pytest.fixture
def mixture(import_benchmark: Callable[[str], ModuleType]) -> ModuleType:
    return import_benchmark("mixture")


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    path = tmp_path / "tokenizer.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_eos_token_id(3)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_it_writes_a_mixture_of_experts(mixture: ModuleType, tokenizer: Path, tmp_path: Path) -> None:
    sizes = {"heads": 2, "kv_heads": 1, "head_dim": 32, "experts": 6, "active": 3, "inner": 32}
    mixture.write(tmp_path / "moe.gguf", mixture.Shape(2, hidden=64, **sizes), tokenizer)
    file = GGUFFile(tmp_path / "moe.gguf")
    spec = read_gguf_spec(file)
    assert (spec.model_type, spec.num_layers, spec.vocab_size) == ("qwen3_moe", 2, len(TOKENS))
    assert spec.experts is not None and spec.quantisation is not None
    assert (spec.experts.num_experts, spec.experts.num_active) == (6, 3)
    assert spec.quantisation.types["model.layers.1.mlp.experts.down_proj"] == "Q4_0"
    assert file.tensors["blk.1.ffn_gate_exps.weight"].shape == (6, 32, 64)


def test_both_sides_are_reported_in_turn(
    mixture: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    bench = tmp_path / "llama-bench"
    rows = [{"n_prompt": 512, "avg_ts": 50.0}, {"n_prompt": 0, "avg_ts": 4.0}]
    bench.write_text(f"#!/bin/sh\necho '{json.dumps(rows)}'\n")
    bench.chmod(0o755)
    monkeypatch.setattr(mixture, "run_engine", lambda *_: mixture.Rates(100.0, 10.0))
    (tmp_path / "moe.gguf").touch()
    run(mixture, monkeypatch, tmp_path / "moe.gguf", "--llama-bench", bench, "--rounds", 2)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:5]] == ["engine", "llama.cpp"] * 2
    assert lines[-1] == "median llama.cpp: 50.0, 4.0; ratio 2.00, 2.50"


def test_without_a_file_it_says_what_it_needs(
    mixture: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with pytest.raises(SystemExit):
        run(mixture, monkeypatch, tmp_path / "moe.gguf")
    assert (
        "moe.gguf does not exist; to write it, --tokenizer must name a GGUF file" in capsys.readouterr().err
    )
