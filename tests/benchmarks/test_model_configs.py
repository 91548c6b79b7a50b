"""`benchmarks/model_configs.py`: the verdicts on a folder of config.json files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import model_configs

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "eos_token_id": 2,
}


def test_each_file_has_a_verdict_and_the_refused_ones_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {
        "a_config.json": LLAMA,
        "b_config.json": LLAMA,
        "b_hf_quant_config.json": {"quantization": {"quant_algo": "W3A16_STRANGE"}},
        "c.json": LLAMA | {"model_type": "stranger", "architectures": ["StrangerForCausalLM"]},
    }
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    monkeypatch.setattr("sys.argv", ["model_configs.py", str(tmp_path)])

    assert model_configs.main() == 0

    native, quantized, unknown, total = capsys.readouterr().out.splitlines()
    assert native.split() == ["a", "native"]
    assert quantized.split()[:3] == ["b", "refused", "hf_quant_config.json:"] and "W3A16_STRANGE" in quantized
    assert unknown.split()[:2] == ["c", "refused"] and "stranger" in unknown and "/" not in unknown.split()[2]
    assert total == "1 native, 0 transformers, 2 refused of 3"
