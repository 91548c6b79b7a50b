"""Chat templates in all places and forms, against transformers."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import Tokenizer as CoreTokenizer
from tokenizers import models

from engine.models.fields import Fields
from engine.models.tokenizer.chat_templates import read_chat_templates
from engine.runtime.errors import ConfigError

IN_CONFIG: list[Any] = [
    None,
    "config",
    [{"name": "default", "template": "listed"}],
    [{"name": "default", "template": "listed"}, {"name": "tool_use", "template": "tools"}],
    [{"name": "rag", "template": "listed"}, {"name": "tool_use", "template": "tools"}],
    {"default": "object", "rag": "other"},
    {"rag": "object"},
]


@pytest.mark.parametrize(
    ("in_config", "jinja", "others"),
    list(itertools.product(IN_CONFIG, ["", "file"], [(), ("rag",), ("default", "rag")])),
)
def test_all_places(tmp_path: Path, in_config: Any, jinja: str, others: tuple[str, ...]) -> None:
    CoreTokenizer(models.BPE({"a": 0}, [])).save(str(tmp_path / "tokenizer.json"))
    config = {"tokenizer_class": "TokenizersBackend", "chat_template": in_config}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    if jinja:
        (tmp_path / "chat_template.jinja").write_text(jinja)
    for name in others:
        (tmp_path / "additional_chat_templates").mkdir(exist_ok=True)
        (tmp_path / "additional_chat_templates" / f"{name}.jinja").write_text(f"{name} of the folder")
    reference = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path).chat_template

    found = read_chat_templates(tmp_path, Fields(tmp_path / "tokenizer_config.json", config))

    expected = reference if isinstance(reference, dict) else {"default": reference} if reference else {}
    if jinja and "default" in others:  # transformers takes the one of the folder
        expected = expected | {"default": jinja}
    assert found == expected


@pytest.mark.parametrize(("in_config", "expected"), [(None, "of the processor"), ("of the tokenizer",) * 2])
def test_older_multimodal_models_have_a_file_of_the_processor(
    tmp_path: Path, in_config: str | None, expected: str
) -> None:
    (tmp_path / "chat_template.json").write_text('{"chat_template": "of the processor"}')
    config = Fields(tmp_path / "tokenizer_config.json", {"chat_template": in_config})

    assert read_chat_templates(tmp_path, config) == {"default": expected}


@pytest.mark.parametrize("value", [7, ["A"], [{"name": "default"}], {"default": 1}, {"default": ["a"]}])
def test_another_form_is_refused(tmp_path: Path, value: Any) -> None:
    with pytest.raises(ConfigError, match=r"chat_template is .*, expected a string, or names and templates"):
        read_chat_templates(tmp_path, Fields(tmp_path / "tokenizer_config.json", {"chat_template": value}))


def test_a_file_that_is_not_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=r"chat_template\.jinja: cannot be read"):
        read_chat_templates(tmp_path, Fields(tmp_path / "tokenizer_config.json", {}))
