"""Whether an answer ends where the chat template ends a turn."""

from __future__ import annotations

import pytest

from engine.tokenizer_manager.conversation.chat_template import ChatTemplate
from engine.tokenizer_manager.conversation.template_choice import turn_without_end
from tests.tokenizer_manager.fake_engine import TEMPLATE, TOKENIZER

TURN = "{% for m in messages %}{{ m.role }}: {{ m.content }}END{% endfor %}"
IM_END = TOKENIZER.token_to_id("<|im_end|>")


@pytest.mark.parametrize(
    ("source", "eos_token_ids", "message"),
    [
        (TEMPLATE, [IM_END], ""),
        (TEMPLATE, [0, IM_END], ""),
        (TEMPLATE, [], "ends a turn with '<|im_end|>', which is no end token of the model"),
        (TURN.replace("END", "</s>"), [IM_END], "ends a turn with '</s>', which is no single token"),
        (TURN.replace("END", "</a><|im_end|>"), [IM_END], ""),
        (TURN.replace("END", " <|im_end|>\n"), [IM_END], ""),
        (TURN.replace("END", "\n"), [IM_END], ""),
        (TURN.replace("END", "x" * 100), [IM_END], "ends a turn with '" + "x" * 40 + "...'"),
        ("{{ messages[0].content }}", [IM_END], ""),  # for one turn
        ("{{ raise_exception('never') }}", [IM_END], ""),
    ],
)
def test_every_kind_of_end(source: str, eos_token_ids: list[int], message: str):
    found = turn_without_end(ChatTemplate(source, {}), TOKENIZER, eos_token_ids)
    assert message in found
    assert bool(found) is bool(message)
    assert not found or "; " in found
