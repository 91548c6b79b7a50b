from __future__ import annotations

import logging
import time
from typing import Any

import pytest

from engine.runtime.config.answer_config import AnswerConfig
from engine.runtime.errors import ConfigError
from engine.tokenizer_manager.conversation.chat_template import ChatTemplate
from engine.tokenizer_manager.conversation.detection import AnswerFormats, detect_formats
from tests.tokenizer_manager.conversation import chat_templates
from tests.tokenizer_manager.fake_engine import TOKENIZER

_MAX_CPU_S = 0.25  # about 10 ms on an idle machine


class _ToolTokens:
    """The tests' tokenizer with the marker of LFM2's calls as a special token."""

    def token_to_id(self, text: str) -> int | None:
        return 10**6 if text == "<|tool_call_start|>" else TOKENIZER.token_to_id(text)

    def is_special(self, token_id: int) -> bool:
        return token_id == 10**6 or TOKENIZER.is_special(token_id)


def detect(source: str | None, **config: Any) -> AnswerFormats:
    template = None if source is None else ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"})
    if template is not None:
        template.find_shape()
    tokenizer: Any = _ToolTokens() if source == chat_templates.LFM2 else TOKENIZER
    return detect_formats(template, tokenizer, AnswerConfig(**config))


@pytest.mark.parametrize(
    ("template", "tools", "reasoning", "object_arguments"),
    [
        ("QWEN3", "hermes", "think", True),
        ("QWEN3_CODER", "qwen3_coder", None, True),
        ("LLAMA31", "llama3_json", None, True),
        ("MISTRAL", "mistral", None, True),
        ("DEEPSEEK_R1", "deepseek_v3", "think", False),
        ("GPT_OSS", "harmony", "harmony", True),
        ("GLM45", "glm45", "think", True),
        ("KIMI_K2", "kimi_k2", None, True),
        ("KIMI_K2_IDS", "kimi_k2", "think", True),
        ("GEMMA4", "gemma4", "gemma4", True),
        ("LFM2", "lfm2", None, True),
        ("SEED_OSS", "seed_oss", "seed_oss", True),
        ("DEEPSEEK_V4", "deepseek_v4", "think", True),
        ("GRANITE33", "granite", "granite33", True),
        ("COMMAND_A", "command_a", "command_a", True),
        ("APERTUS", "apertus", "apertus", True),
        ("APRIEL", "apriel", "apriel", True),
        ("SMOLLM2", "generic", None, True),
    ],
)
def test_formats_of_public_templates(
    template: str, tools: str, reasoning: str | None, object_arguments: bool
):
    before_s = time.thread_time()
    formats = detect(getattr(chat_templates, template))

    assert time.thread_time() - before_s < _MAX_CPU_S
    assert formats.tools is not None and formats.tools.name == tools
    assert (formats.reasoning.name if formats.reasoning else None) == reasoning
    assert formats.object_arguments is object_arguments
    assert formats.template_tools is (tools != "generic")


def test_calls_are_written_where_the_template_shows_nothing_of_them():
    written = {
        name: detect(getattr(chat_templates, name)).written_calls
        for name in ("LFM2", "GRANITE33", "QWEN3", "GPT_OSS", "GEMMA4", "SMOLLM2")
    }
    assert [name for name, is_written in written.items() if is_written] == ["LFM2", "GRANITE33"]


def test_the_marks_around_the_answer_tell_two_families_of_one_marker():
    north = detect(chat_templates.COMMAND_A.replace("_RESPONSE|>", "_TEXT|>"))
    assert north.reasoning is not None and north.reasoning.name == "cohere2_moe"
    assert north.reasoning_switch == "reasoning"
    bare = detect("{{ messages[0].content }}{{ '<|START_THINKING|><|END_THINKING|>' }}")
    assert bare.reasoning is not None and bare.reasoning.name == "command_a"


def test_switches_of_the_reasoning_are_variables_of_the_template():
    assert detect(chat_templates.QWEN3).reasoning_switch == "enable_thinking"
    assert detect(chat_templates.GPT_OSS).reasoning_switch is None
    assert "reasoning_effort" in detect(chat_templates.GPT_OSS).variables


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('no') }}{{ tools }}",
        "{{ tools.x.y.z }}",
        "{% for m in messages %}{{ m.content.nothing.at_all }}{% endfor %}{{ tools | tojson }}",
        "{% for i in range(99999999) %}{{ tools }}{{ messages }}{% break %}{% endfor %}{{ 1 / 0 }}",
        "{{ messages }}{{ tools }}<tool_call>",  # shows tools and calls, in no known format
    ],
)
def test_templates_that_fail_or_write_another_format_match_no_family(source: str):
    formats = detect(source)

    assert formats.is_generic and not formats.template_tools


def test_a_model_without_a_template_has_the_generic_format():
    assert detect(None).is_generic


def test_names_of_formats_override_detection():
    formats = detect(chat_templates.QWEN3, tool_call_parser="mistral", reasoning_parser="none")
    assert formats.tools is not None and formats.tools.name == "mistral" and formats.reasoning is None
    assert detect(chat_templates.QWEN3, tool_call_parser="none").tools is None

    with pytest.raises(ConfigError, match=r"--tool-call-parser is 'hermez', but .* deepseek_v3, .*hermes"):
        detect(chat_templates.QWEN3, tool_call_parser="hermez")
    with pytest.raises(ConfigError, match="--reasoning-parser is 'x'"):
        detect(None, reasoning_parser="x")


def test_detection_logs_one_line(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO):
        detect(chat_templates.QWEN3)

    assert [record.getMessage() for record in caplog.records] == [
        "answer formats: tools=hermes reasoning=think template_tools=True switch=enable_thinking"
    ]
