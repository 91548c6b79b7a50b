"""Which template renders the chats: by `--chat-template`, by the model's names, or none with the reason."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from engine.models.tokenizer.tokenizer import Tokenizer
from engine.runtime.errors import ConfigError
from engine.tokenizer_manager.conversation.template_choice import load_chat_template, why_no_template
from tests.tokenizer_manager.fake_engine import TEMPLATE, TOKENIZER, make_tokenizer

TOOLS = [{"type": "function", "function": {"name": "f"}}]


def tokenizer_with(templates: Mapping[str, str]) -> Tokenizer:
    tokenizer = make_tokenizer()
    tokenizer.chat_templates = dict(templates)
    return tokenizer


def test_the_template_is_the_models_or_that_of_a_file(tmp_path):
    path = tmp_path / "template.jinja"
    path.write_text("custom")
    own, custom = load_chat_template(None, TOKENIZER, "m"), load_chat_template(str(path), TOKENIZER, "m")

    assert own is not None
    assert custom is not None
    assert (own.source, custom.source) == (TEMPLATE, "custom")
    with pytest.raises(ConfigError, match=r"nothing.jinja: the chat template cannot be read"):
        load_chat_template(str(tmp_path / "nothing.jinja"), TOKENIZER, "m")
    tokenizer = make_tokenizer()
    tokenizer.chat_templates["default"] = "{% if %}"
    with pytest.raises(
        ConfigError, match=r"^/models/llama: the model's chat template has a syntax error in line 1"
    ):
        load_chat_template(None, tokenizer, "/models/llama")
    path.write_text("{% if %}")
    with pytest.raises(ConfigError, match=r"template.jinja has a syntax error in line 1"):
        load_chat_template(str(path), TOKENIZER, "m")


BOTH = {"default": "D", "tool_use": "T"}


@pytest.mark.parametrize(
    ("templates", "choice", "plain", "with_tools"),
    [
        (BOTH, None, "D", "T"),
        (BOTH, "default", "D", "D"),
        (BOTH, "tool_use", "T", "T"),
        ({"rag": "R"}, None, "R", "R"),
        ({"rag": "R", "tool_use": "T"}, "rag", "R", "R"),
        ({"rag": "R", "tool_use": "T"}, None, None, None),
        ({}, None, None, None),
    ],
)
def test_a_template_is_chosen_by_its_name(templates, choice, plain, with_tools):
    found = load_chat_template(choice, tokenizer_with(templates), "m")
    if found is None:
        assert (plain, with_tools) == (None, None)
        return
    user = [{"role": "user", "content": "a"}]
    assert (found.render(user), found.render(user, tools=TOOLS)) == (plain, with_tools)


def test_a_model_without_a_template_to_take_says_what_it_has():
    assert why_no_template(tokenizer_with({}), "use X") == (
        "has no chat template; use X, or give a file with --chat-template"
    )
    assert why_no_template(tokenizer_with({"rag": "R", "alpha": "A"}), "use X") == (
        "has several chat templates, alpha, rag, and none is called default; use X, or choose one at start, for "
        "example --chat-template alpha"
    )


def test_a_name_that_the_model_does_not_have_is_no_file_either():
    with pytest.raises(ConfigError, match=r"^nope: .*one of the model's templates \(default, tool_use\)"):
        load_chat_template("nope", tokenizer_with(BOTH), "m")


def test_the_form_of_contents_is_detected():
    template = load_chat_template(None, tokenizer_with({"default": "{{ messages[0].content[0].text }}"}), "m")
    assert template is not None
    assert template.render([{"role": "user", "content": "hello"}]) == "hello"
