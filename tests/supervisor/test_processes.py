"""Scheduler and detokenizer as real processes, under a real supervisor, with a tiny random model."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

pytestmark = pytest.mark.real_process

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "eos_token_id": 2,
    "bos_token_id": 1,
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder with a configuration and a byte tokenizer; the weights are dummies."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


OF_RUNNER = ("torch", "device", "backend", "instruction_set")  # see `build_facts`


@pytest.mark.slow
def test_requests_pass_through_scheduler_and_detokenizer(start_engine, model):
    engine = start_engine(model=model)

    details = engine.read()["details"]
    answers = {key: value for key, value in details.items() if key not in {"load_s", *OF_RUNNER}}
    results = {key: json.loads(value) for key, value in answers.items()}
    engine.process.send_signal(signal.SIGTERM)
    outcome = engine.end()

    assert all(details[name] for name in OF_RUNNER)
    greedy, again, stopped = results["greedy"], results["again"], results["stopped"]
    assert (greedy["num_ids"], greedy["completion_tokens"], greedy["finish"]) == (12, 12, "length")
    assert (again["text"], greedy["cached_tokens"], again["cached_tokens"]) == (greedy["text"], 0, 32)
    assert stopped["matched"] == greedy["text"][2:5]
    assert stopped["text"] == greedy["text"].partition(stopped["matched"])[0]
    assert (stopped["finish"], stopped["num_ids"]) == ("stop", stopped["completion_tokens"])
    assert stopped["num_ids"] < 12
    assert results["aborted"]["finish"] == "abort"
    assert results["flushed"] == {"call_id": 1, "kept": 0}
    assert results["report"] == {"running": 0, "used": 0}
    assert outcome == (0, "stopped")


@pytest.mark.slow
def test_a_killed_scheduler_ends_the_engine(start_engine, model):
    engine = start_engine(model=model)
    engine.read()

    os.kill(engine.pids["scheduler"], signal.SIGKILL)

    code, message = engine.end()
    assert code == 1
    assert message.startswith("scheduler was killed by SIGKILL")


def test_a_model_without_a_tokenizer_is_refused_with_the_file_to_mend(start_engine, model):
    (model / "tokenizer.json").unlink()

    code, message = start_engine(model=model).end()

    assert code == 2
    assert "tokenizer.json" in message
    assert "\n" not in message
