"""A server with a model that follows a script: the HTTP side is the product's own, the model's text is not.

A small model does not call an agent's tools. So a fake engine behind the real tokenizer manager reads each prompt as a
model would, in the text of the template, and writes what a trained one writes: a call of the agent's shell, and, once a
result is in the prompt, an answer that repeats what the result shows.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Final

from engine.runtime.feasibility import Capacity
from engine.runtime.messages import GenerateRequest, TextOutput
from tests.tokenizer_manager.fake_engine import (
    TOKENIZER,
    FakeEngine,
    ServerThread,
    ids_of,
    make_services,
    say_all,
)

MARK: Final = re.compile(r"needle-\w+")
"""A name in the result of the call, which the answer repeats."""
SHELLS: Final = {
    "Bash": {"command": "ls", "description": "List the files"},  # Claude Code
    "exec_command": {"cmd": "ls"},  # Codex
    "bash": {"command": "ls", "description": "List the files"},  # opencode
    "run_shell_command": {
        "command": "ls",
        "is_background": False,
        "description": "List the files",
    },  # Qwen Code
    "list_files": {"folder": "."},  # the scripts of the AI SDK
}
"""Tools that list the files of a folder, and the arguments of a call."""
_PIECE: Final = 7
_CAPACITY: Final = Capacity(
    max_model_len=200_000, num_pages=50_000, page_size=4, max_running_requests=8, vocab_size=258
)

_TOOLS: Final = (
    "{% if tools %}<|im_start|>system\n# Tools\n<tools>{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}"
    "\n</tools>\n"
    'Answer with <tool_call>\n{"name": <name>, "arguments": <object>}\n</tool_call><|im_end|>\n{% endif %}'
)
_TURN: Final = (
    "<|im_start|>{{ 'user' if m.role == 'tool' else m.role }}\n"
    "{% if m.role == 'tool' %}<tool_response>\n{{ m.content }}\n</tool_response>{% else %}{{ m.content or '' }}"
    "{% endif %}"
    "{% for call in m.tool_calls or [] %}\n<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}<|im_end|>\n"
)
_END: Final = "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"

TEMPLATES: Final = {
    "any_order": _TOOLS + "{% for m in messages %}" + _TURN + _END,
    # As Qwen3.5's: a system message is the first one.
    "system_first": _TOOLS
    + "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    + "{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
    + _TURN
    + _END,
    # As Gemma 2's: there is no system message.
    "no_system": _TOOLS
    + "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    + _TURN
    + _END,
    # As Mistral's: ids of nine letters, no user message behind a result, one system message.
    "mistral": _TOOLS
    + "{% set ns = namespace(last='') %}{% for m in messages %}"
    + "{% if m.role == 'system' and not loop.first %}{{ raise_exception('Only one system message.') }}{% endif %}"
    + "{% if m.role == 'user' and ns.last in ('user', 'tool') %}"
    + "{{ raise_exception('After the optional system message, conversation roles must alternate.') }}{% endif %}"
    + "{% if m.role == 'tool' and m.tool_call_id | length != 9 %}"
    + "{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}"
    + "{% for call in m.tool_calls or [] %}{% if call.id | length != 9 %}"
    + "{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}{% endfor %}"
    + "{% set ns.last = m.role %}"
    + _TURN
    + _END,
}
"""Chat templates by what they refuse."""


def write_as_an_agent_expects(request: GenerateRequest) -> Iterable[TextOutput]:
    """The script: a call where the prompt has a shell and its last message is the user's, else an answer."""
    prompt = TOKENIZER.decode(ids_of(request))
    last = prompt.rpartition("<|im_start|>user\n")[2]
    shell = next((name for name in SHELLS if f'"name": "{name}"' in prompt), None)
    if found := MARK.search(last) if "<tool_response>" in last else None:
        text = f"The folder holds {found[0]}."
    elif shell is not None and "<tool_response>" not in last:
        call = {"name": shell, "arguments": SHELLS[shell]}
        text = f"<tool_call>\n{json.dumps(call)}\n</tool_call>"
    elif "*file listing*" in prompt:  # aider's word for a whole file in an answer
        text = "needle-x7.txt\n```\nhello\n```\n"
    else:
        text = "There is nothing to do."
    return say_all(*(text[i : i + _PIECE] for i in range(0, len(text), _PIECE)))(request)


@contextmanager
def scripted_server(template: str) -> Iterator[str]:
    """The URL of a server with this chat template that takes any model name."""
    engine = FakeEngine(write_as_an_agent_expects)
    services = make_services(
        engine, chat_template=template, capacity=_CAPACITY, model={"served_model_name": "*"}
    )
    server = ServerThread(services, engine)
    try:
        yield server.url
    finally:
        server.stop()
        server.join()
