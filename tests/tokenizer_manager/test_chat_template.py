from __future__ import annotations

import re
from datetime import datetime

import pytest

from engine.runtime.errors import ConfigError, RequestError
from engine.tokenizer_manager import chat_template
from engine.tokenizer_manager.chat_template import ChatTemplate, load_chat_template

from .fake_engine import TEMPLATE, TOKENIZER, make_tokenizer

USER = {"role": "user", "content": "hi"}


def render(source: str, messages: list[dict[str, str]] | None = None, **options: object) -> str:
    template = ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"})
    return template.render([USER] if messages is None else messages, **options)  # type: ignore[arg-type]


def test_a_chat_is_rendered_with_the_beginning_of_an_answer():
    assert render(TEMPLATE) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert render(TEMPLATE, add_generation_prompt=False) == "<|im_start|>user\nhi<|im_end|>\n"


def test_templates_find_what_hugging_face_gives_them():
    assert render("{{ bos_token }}{{ eos_token }}") == "<s></s>"
    assert render("{{ messages[0] | tojson }}") == '{"role": "user", "content": "hi"}'
    assert render("{{ ['<é>'] | tojson(indent=1) }}") == '[\n "<é>"\n]'
    assert render("{{ strftime_now('%Y') }}") == str(datetime.now().year)
    assert render("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "01"
    assert render("{% generation %}x{{ messages[0].role }}{% endgeneration %}") == "xuser"
    assert render("{{ tools is none }}{{ documents is none }}{{ undefined_thing }}") == "TrueTrue"
    assert render("  {% if true %}\na\n  {% endif %}\nb") == "a\nb"
    assert render("{{ thinking }}", variables={"thinking": False}) == "False"


def test_a_template_that_refuses_says_why():
    with pytest.raises(RequestError, match="roles must alternate") as caught:
        render("{{ raise_exception('roles must alternate') }}")

    assert caught.value.param == "messages"
    assert caught.value.status == 400


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.append(1) }}",
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ raise_exception.__globals__.sys.exit() }}",
        "{{ messages[5].role }}",
        "{{ 1 / 0 }}",
        "{% for i in range(1000000000) %}{% endfor %}",
        "{{ 'x' * 1000000000 }}",
        "{{ 9 ** 999999999 }}",
        "{{ nothing() }}",
    ],
)
def test_what_a_template_may_not_do_is_the_requests_error(source):
    with pytest.raises(RequestError, match="cannot render these messages"):
        render(source)


def test_output_is_limited(monkeypatch):
    monkeypatch.setattr(chat_template, "_MAX_OUTPUT_CHARS", 1000)

    with pytest.raises(RequestError, match="more than 1000 characters"):
        render("{% for i in range(2000) %}ab{{ i }}{% endfor %}")


def test_time_is_limited_also_where_nothing_is_put_out(monkeypatch):
    monkeypatch.setattr(chat_template, "_MAX_RENDER_S", 0.05)

    with pytest.raises(RequestError, match=re.escape("longer than 0.05 s")):
        render("{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}")


def test_a_broken_template_is_refused_at_start():
    with pytest.raises(ConfigError, match=r"the file x has a syntax error in line 2: .*--chat-template"):
        ChatTemplate("a\n{% if %}", {}, "the file x")


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
