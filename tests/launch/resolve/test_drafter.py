"""The second model that drafts: what it is, whether it belongs to the model, and its memory."""

from __future__ import annotations

import dataclasses
import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest

from engine.launch.resolve import drafter
from engine.launch.resolve.drafter import resolve_drafter
from engine.launch.resolve.model_resolution import read_model
from engine.launch.resolve.prepare import prepare
from engine.models.source import resolve_source
from engine.models.spec.model_spec import ModelSpec
from engine.runtime.config.config_sources import from_arguments, merge
from engine.runtime.config.engine_config import EngineConfig
from engine.runtime.errors import ConfigError


@pytest.fixture
def draft(tiny_model: Path, tmp_path: Path) -> Path:
    """The same model under another name."""
    return Path(shutil.copytree(tiny_model, tmp_path / "draft"))


def change(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def resolve(
    model: Path, draft: Path, speculative: str = "auto"
) -> tuple[EngineConfig, ModelSpec, dict[str, str]]:
    config = merge(
        from_arguments({"model": model, "speculative": speculative, "speculative_model": draft})
    ).config
    source = resolve_source(str(model))
    return resolve_drafter(config, source, read_model(config.model, source).spec)


@pytest.fixture
def no_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft model as large as the model counts as cheap."""
    monkeypatch.setattr(drafter, "MAX_DRAFT_COST", 2.0)


def test_auto_takes_no_model_that_cannot_pay(
    tiny_model: Path, draft: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config, spec, notes = resolve(tiny_model, draft)
    assert (config.scheduler.speculative, config.scheduler.speculative_model) == ("auto", None)
    assert spec.drafter is None
    assert notes == {"speculative": f"a draft of {draft} costs about 100% of a step, which does not pay"}
    with caplog.at_level(logging.WARNING):
        asked, spec, _ = resolve(tiny_model, draft, "draft")
    assert asked.scheduler.speculative == "draft" and spec.drafter is not None
    assert "costs about 100% of a step, which does not pay; use a smaller model" in caplog.text


def test_a_model_of_the_same_vocabulary_drafts(tiny_model: Path, draft: Path, no_cost: None) -> None:
    config, spec, notes = resolve(tiny_model, draft)
    assert (config.scheduler.speculative, config.scheduler.speculative_model) == ("draft", str(draft))
    assert notes == {"speculative": f"what {draft} is"}
    assert spec.drafter is not None and spec.drafter.weights_bytes > 0
    plain = dataclasses.replace(config.scheduler, speculative="off", speculative_model=None)
    alone = resolve_drafter(
        dataclasses.replace(config, scheduler=plain), resolve_source(str(tiny_model)), spec
    )[1]
    assert alone is spec
    without = dataclasses.replace(config, scheduler=plain)
    source = resolve_source(str(tiny_model))
    target = read_model(without.model, source).spec
    assert spec.kv_bytes_per_token(2) == 2 * target.kv_bytes_per_token(2)  # both have the same layers


def test_memory_of_the_pool_counts_it(tiny_model: Path, draft: Path) -> None:
    arguments = {"model": tiny_model, "device": "cpu", "max_total_tokens": 4096}
    with_it = {"speculative": "draft", "speculative_model": draft}
    found = prepare(merge(from_arguments(arguments | with_it)))
    assert found.config.scheduler.speculative == "draft"
    assert found.spec.drafter is not None


def test_a_short_context_is_said_once(
    tiny_model: Path, draft: Path, caplog: pytest.LogCaptureFixture
) -> None:
    change(draft, max_position_embeddings=64)
    with caplog.at_level(logging.WARNING):
        config, spec, _ = resolve(tiny_model, draft, "draft")
    assert config.scheduler.speculative_len == 64
    assert [each for each in caplog.messages if "nothing is drafted beyond" in each] == [
        f"{draft}: knows 64 positions, the model {spec.known_positions}: nothing is drafted beyond"
    ]


def test_the_first_token_that_differs_is_named(tiny_model: Path, draft: Path) -> None:
    path = draft / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocab = tokenizer["model"]["vocab"]
    by_id = {token_id: token for token, token_id in vocab.items()}
    first, second = sorted(by_id)[40], sorted(by_id)[50]
    vocab[by_id[first]], vocab[by_id[second]] = second, first
    path.write_text(json.dumps(tokenizer))
    with pytest.raises(
        ConfigError, match=f"token {first} is .* in one and .* in the other; use a draft model"
    ):
        resolve(tiny_model, draft)


@pytest.mark.parametrize(
    ("fields", "method", "message"),
    [
        ({"draft_vocab_size": 8}, "draft", "is an EAGLE-3 head, not a model; use --speculative eagle3"),
        ({"draft_vocab_size": 8}, "auto", "num_hidden_layers is 2, but only heads with one layer"),
        ({"num_hidden_layers": 1}, "eagle3", "so it is no EAGLE-3 head"),
        ({"architectures": ["BertModel"], "model_type": "t5"}, "draft", "t5"),
    ],
)
def test_refusals(tiny_model: Path, draft: Path, fields: dict[str, Any], method: str, message: str) -> None:
    change(draft, **fields)
    with pytest.raises(ConfigError, match=message):
        resolve(tiny_model, draft, method)


def test_settings_that_contradict() -> None:
    with pytest.raises(
        ConfigError, match="speculative_model is 'x', but speculative is off, .* --speculative auto"
    ):
        merge(from_arguments({"speculative_model": "x"}))
    with pytest.raises(
        ConfigError, match="speculative is eagle3, but no model drafts; .* --speculative-model"
    ):
        merge(from_arguments({"speculative": "eagle3"}))
