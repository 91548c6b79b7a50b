from __future__ import annotations

import itertools
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from typing import Any

import jinja2.sandbox
import pytest

from engine.runtime.errors import ConfigError, RequestError
from engine.tokenizer_manager.conversation import chat_template, template_sandbox
from engine.tokenizer_manager.conversation.chat_template import ChatTemplate
from engine.tokenizer_manager.conversation.template_sandbox import AbandonedError, RenderBudget
from tests.tokenizer_manager.conversation import chat_templates
from tests.tokenizer_manager.fake_engine import TEMPLATE

USER = {"role": "user", "content": "hi"}


class LeavingMessage(dict[str, Any]):
    """A message that is the last to be wanted: its request is cancelled when it is rendered."""

    def __init__(self, budget: RenderBudget) -> None:
        super().__init__(USER)
        self._budget = budget

    def __getitem__(self, key: str) -> Any:
        self._budget.wanted = False
        return super().__getitem__(key)


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


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages | tojson(false, 2, (',', ':'), true) }}{{ messages | tojson(indent='\\t') }}",
        "{% set ns = namespace(a=1, self=2) %}{% set ns.a = 3 %}{{ ns.a }}{{ ns.self }}",
        "{{ dict([('a', 1)], b=2) }}{{ dict.fromkeys(['a'], 1) }}",
        "{{ 2 ** 3 }}{{ 2 ** 0.5 }}{{ 2 ** -1 }}",
        "{% macro f(y, x=2) %}{{ y + x }}{{ caller() if caller else '' }}{% endmacro %}"
        "{{ f(y=1) }}{% call f(1) %}z{% endcall %}",
        "{% for m in messages %}{% if loop.first %}{{ m.get('x', 'y') }}{% continue %}{% endif %}{% endfor %}",
        "{{ messages | groupby('role') | list }}{{ messages | map(attribute='role') | join(',') }}",
        "{{ 'a%sc' % 'b' }}{{ '{self}-{}'.format(1, self=2) }}{{ 'x' ~ 1 ~ none }}{{ joiner(',')() }}",
        chat_templates.KIMI_K2_IDS,
    ],
)
def test_templates_render_as_in_transformers(source: str):
    transformers = pytest.importorskip("transformers.utils.chat_template_utils")
    call = {"id": "functions.f:0", "type": "function", "function": {"name": "f", "arguments": {"a": "<é>"}}}
    chat: list[dict[str, Any]] = [
        USER,
        {"role": "assistant", "content": "", "reasoning_content": "r", "tool_calls": [call]},
        {"role": "tool", "content": "<r>", "tool_call_id": "functions.f:0"},
    ]
    tools = [{"type": "function", "function": {"name": "f", "description": "<é>"}}]
    for variables in ({}, {"tools_ts_str": "namespace functions {}"}):
        [expected], _ = transformers.render_jinja_template(
            [chat], tools=tools, chat_template=source, add_generation_prompt=True, **variables
        )
        found = ChatTemplate(source, {}).render(chat, tools=tools, variables=variables)
        assert found == expected


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


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}",
        "{% set r = range(9999) %}{% for i in r %}{% for j in r %}{% for k in r %}{% endfor %}{% endfor %}{% endfor %}",
        "{% set r = range(9999) %}{% for i in r if i < 0 %}{% else %}{% for j in r %}{% for k in r %}{% endfor %}"
        "{% endfor %}{% endfor %}",
        "{% set s = 'a' * 4000000 %}{% for i in range(90000) %}{% set t = s | upper %}{% endfor %}",
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(40) }}",
        "{% for i in [[0]] recursive %}{{ loop([[0], [0]]) }}{% endfor %}",
    ],
)
def test_cpu_time_is_limited_also_where_nothing_is_put_out(source):
    """A second of CPU time goes by from one look at a clock to the next: a few looks are enough, and come soon.

    A template that is never checked takes years, and is ended by this test's own time limit.
    """
    seconds = itertools.count(1000.0)
    budget = RenderBudget(cpu_clock=lambda: next(seconds), wall_clock=lambda: next(seconds))

    with pytest.raises(RequestError) as caught:
        render(source, [USER] * 2001, budget=budget)
    assert caught.value.message == (
        "the model's chat template took more than 2 s of CPU time for 2,001 messages; send fewer or shorter messages, "
        "or give the server a template that does less for each with --chat-template"
    )
    assert (caught.value.status, caught.value.param) == (400, "messages")


def test_a_rendering_that_waits_for_a_core_is_not_refused():
    """An hour of wall time between two checks, and a millisecond of CPU time."""
    wall_s, cpu_s = itertools.count(1000.0, 3600.0), itertools.count(5.0, 0.001)
    budget = RenderBudget(cpu_clock=lambda: next(cpu_s), wall_clock=lambda: next(wall_s))

    assert render(TEMPLATE, [USER] * 100, budget=budget) == render(TEMPLATE, [USER] * 100)


def test_the_cpu_clock_is_read_only_when_the_limit_may_be_exceeded():
    num_reads = 0

    def cpu_clock() -> float:
        nonlocal num_reads
        num_reads += 1
        return 0.0

    wall_s = itertools.count(1000.0, 0.01)
    budget = RenderBudget(cpu_clock=cpu_clock, wall_clock=lambda: next(wall_s))
    render("{% for i in range(1000) %}{{ i }}{% endfor %}", budget=budget)

    assert next(wall_s) > 1020  # 10 ms for each of more than 2,000 checks
    assert num_reads <= (next(wall_s) - 1000) / template_sandbox.MAX_RENDER_CPU_S + 1


def test_a_rendering_that_is_not_wanted_any_more_ends():
    budget = RenderBudget()
    messages = [USER, LeavingMessage(budget)]

    with pytest.raises(AbandonedError):
        render(
            "{% for m in messages %}{{ m.content }}{% endfor %}{% for i in range(1000000000) %}{% endfor %}",
            messages,
            budget=budget,
        )


def test_threads_render_with_one_template_under_budgets_of_their_own():
    template = ChatTemplate(TEMPLATE, {})
    spent, fresh = (
        RenderBudget(
            cpu_clock=itertools.count(0.0, 9.0).__next__, wall_clock=itertools.count(0.0, 9.0).__next__
        ),
        RenderBudget(),
    )
    with ThreadPoolExecutor(1) as thread:
        with pytest.raises(RequestError, match="CPU time"):
            thread.submit(template.render, [USER] * 2, budget=spent).result()
        assert template.render([USER], budget=fresh) == template.render([USER])
        assert thread.submit(template.render, [USER]).result() == template.render([USER])


DOUBLE = "{% set n = namespace(x='aaaaaaaa') %}{% for i in range(27) %}@{% endfor %}x"


@pytest.mark.fast_cases(10)
@pytest.mark.parametrize(
    "source",
    [
        DOUBLE.replace("@", "{% set n.x = n.x + n.x %}"),
        DOUBLE.replace("@", "{% set n.x = n.x ~ n.x %}"),
        DOUBLE.replace("@", "{% set n.x %}{{ n.x }}{{ n.x }}{% endset %}"),
        DOUBLE.replace("@", "{% set n.x = n.x | replace('a', 'aa') %}"),
        DOUBLE.replace("@", "{% set n.x = n.x.replace('a', 'aa') %}"),
        DOUBLE.replace("@", "{% set n.x = [n.x, n.x] | join %}"),
        DOUBLE.replace("@", "{% set n.x = ''.join([n.x, n.x]) %}"),
        DOUBLE.replace("'aaaaaaaa'", "[0]").replace("@", "{% set n.x = n.x + n.x %}"),
        DOUBLE.replace("'aaaaaaaa'", "9").replace("@", "{% set n.x = n.x * n.x %}"),
        "{% set y = 'a' | center(1000000000) %}x",
        "{% set y = 'a' | center(width=1000000000) %}x",
        "{% set y = 'a' | indent(1000000000, true) %}x",
        "{% set y = [1] | batch(1000000000, 0) | list %}x",
        "{% set y = '%1000000000d' | format(1) %}x",
        "{% set y = '%*d' | format(1000000000, 1) %}x",
        "{% set y = '%1000000000d' % 1 %}x",
        "{% set y = '%.1000000000f' % 1 %}x",
        "{% set y = '{:1000000000d}'.format(1) %}x",
        "{% set y = '{:{}d}'.format(1, 1000000000) %}x",
        "{% set y = '{a:1000000000d}'.format_map({'a': 1}) %}x",
        "{% set y = 'a'.ljust(1000000000) %}x",
        "{% set f = 'a'.center %}{% set y = f(1000000000) %}x",
        "{% set y = '\t'.expandtabs(1000000000) %}x",
        "{% set y = [0] * 100000000 %}x",
        "{% set y = 1000000000 * 'a' %}x",
    ],
)
def test_values_that_grow_without_bound_are_refused_before_they_exist(monkeypatch, source):
    monkeypatch.setattr(template_sandbox, "MAX_RENDER_CPU_S", 3600.0)  # it is their size that is refused
    tracemalloc.start()
    try:
        with pytest.raises(RequestError, match="cannot render these messages: it (uses|makes)"):
            render(source)
        assert tracemalloc.get_traced_memory()[1] < 300 << 20
    finally:
        tracemalloc.stop()


def test_what_templates_usually_do_is_what_it_was():
    """The loops, filters and operators that are watched give what Jinja's own give."""
    source = """
        {%- for m in messages %}{{ loop.index }}/{{ loop.length }}{{ loop.last }}{{ m.content ~ 1 ~ none ~ [2] }}
        {%- for key, value in m.items() if key != 'role' %}{{ key }}{{ loop.first }}{% else %}none{% endfor %}
        {%- endfor %}
        {{- 'ab' + 'c' * 2 }}{{ 7 % 4 }}{{ '%s-%05.1f' % ('x', 2) }}{{ '%d%%' | format(1700000000) }}
        {{- '{:>4}|{}'.format('a', 1700000000) }}{{ 'a' | center(5) }}{{ 'x\ny' | indent(2) }}{{ 'a'.ljust(3) }}
        {{- ['a', 'b'] | join(', ') }}{{ 'aXb' | replace('X', '-') }}{{ 'aXb'.replace('X', '-', 1) }}{{ 3 * 4 + 1 }}
        {{- messages | map(attribute='role') | join('+') }}{{ nothing ~ '' }}{% for x in nothing %}{% endfor %}
        {%- for c in 'ab' %}{{ loop.previtem }}{{ loop.nextitem }}{{ loop.cycle(1, 2) }}{{ loop.revindex }}{% endfor %}
        {%- for t in [[1, [2]]] recursive %}{% if t is sequence %}({{ loop(t) }})
        {%- else %}{{ t }}{% endif %}{% endfor %}
        {%- macro m(x) %}<{{ x }}>{% endmacro %}{{ m('q') + m(1) }}{% set b %}{{ m(2) }}!{% endset %}{{ b ~ b }}
        {%- for p in {'k': 1} %}{{ p }}{% endfor %}{{ (['a'] + ['b'])[-1] }}{{ [[1, 2, 3] | batch(2)] | length }}"""
    plain = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)

    assert render(source) == plain.from_string(source).render(messages=[USER])


def test_a_broken_template_is_refused_at_start():
    with pytest.raises(ConfigError, match=r"the file x has a syntax error in line 2: .*--chat-template"):
        ChatTemplate("a\n{% if %}", {}, "the file x")


@pytest.mark.parametrize("source", ["{{ (" * 2000, "{% for a in b %}" * 30 + "{% endfor %}" * 30])
def test_a_template_that_cannot_be_compiled_is_refused_at_start(source):
    with pytest.raises(ConfigError, match=r"the file x cannot be compiled: \w+: .*--chat-template"):
        ChatTemplate(source, {}, "the file x")


IDEFICS = (
    "{% for m in messages %}{{ m.role | capitalize }}: {% for part in m.content %}{% if part.type == 'text' %}"
    "{{ part.text }}{% endif %}{% endfor %}<end_of_utterance>\n{% endfor %}"
)
EITHER = (
    "{% for m in messages %}{{ m.role }}: {% if m.content is string %}{{ m.content }}{% else %}"
    "{{ m.content[0].text }}{% endif %}|{% endfor %}"
)
USER_ONLY = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ m.content[0]['text'] }}{% else %}{{ m.content }}{% endif %}"
    "|{% endfor %}"
)
TOOLS_ONLY = (
    "{% for m in messages %}{% if m.role == 'tool' %}{% for part in m.content %}{{ part.text }}{% endfor %}"
    "{% else %}{{ m.content }}{% endif %}|{% endfor %}"
)
CHAT = [{"role": role, "content": f"by {role}"} for role in ("system", "user", "assistant", "tool")]


@pytest.mark.fast_cases(3)
@pytest.mark.parametrize(
    ("source", "roles", "prompt"),
    [
        (TEMPLATE, set(), None),
        (EITHER, set(), "system: by system|user: by user|assistant: by assistant|tool: by tool|"),
        (
            IDEFICS,
            {"system", "user", "assistant", "tool"},
            "System: by system<end_of_utterance>\nUser: by user<end_of_utterance>\n"
            "Assistant: by assistant<end_of_utterance>\nTool: by tool<end_of_utterance>\n",
        ),
        (USER_ONLY, {"user"}, "by system|by user|by assistant|by tool|"),
        (TOOLS_ONLY, {"tool"}, "by system|by user|by assistant|by tool|"),
        ("{{ messages[0].content[0].text }}", {"user", "system"}, "by system"),
        ("{{ raise_exception('never') }}", set(), None),
        ("constant", set(), "constant"),
        ("{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}", set(), None),
    ],
)
def test_contents_get_the_form_that_the_template_shows(source: str, roles: set[str], prompt: str | None):
    template = ChatTemplate(source, {})
    template.find_part_roles()
    assert template.part_roles == roles
    if prompt is not None:
        assert template.render(CHAT, add_generation_prompt=False) == prompt


@pytest.mark.parametrize(
    ("source", "is_reported"),
    [
        ("constant", True),
        ("{% for m in messages %}{{ m.role }}{% endfor %}", True),
        ("{{ messages[0].text }}", True),
        (TEMPLATE, False),
        (IDEFICS, False),
        ("{{ raise_exception('one message is not enough') }}", False),
    ],
)
def test_a_template_that_shows_nothing_of_the_user_is_reported(
    caplog: pytest.LogCaptureFixture, source: str, is_reported: bool
):
    ChatTemplate(source, {}, "the file x").find_part_roles()
    assert ("the file x shows nothing of what a user writes" in caplog.text) == is_reported


def test_an_answer_that_is_continued_has_the_same_form():
    template = ChatTemplate(IDEFICS, {})
    template.find_part_roles()
    prompt = template.render(CHAT[:3], continue_final_message=True)
    assert prompt.endswith("<end_of_utterance>\nAssistant: by assistant")


def test_chats_with_tools_have_a_template_of_their_own():
    tools = [{"type": "function", "function": {"name": "f"}}]
    template = ChatTemplate("plain", {}, with_tools=ChatTemplate("{{ tools[0].function.name }}", {}))
    assert (template.render([USER]), template.render([USER], tools=tools)) == ("plain", "f")
    assert "tools" in template.undeclared_variables()
