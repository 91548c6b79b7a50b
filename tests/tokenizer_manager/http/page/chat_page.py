"""A person in front of the chat at `/`: what is typed and chosen, and what the page keeps."""

from __future__ import annotations

import json
from typing import Any

from tests.browser import Tab
from tests.tokenizer_manager.fake_engine import TOKENIZER as TOKENS
from tests.tokenizer_manager.fake_engine import ids_of

ANSWERED = "document.querySelector('#stop').hidden && document.querySelector('.assistant .figures')"


def ask(tab: Tab, text: str) -> None:
    tab.click("#question")
    tab.type(text)
    tab.press("Enter")


def kept(tab: Tab) -> list[dict[str, Any]]:
    """The conversation as the browser keeps it."""
    messages: list[dict[str, Any]] = json.loads(
        tab.run("localStorage.getItem('engine.conversation')") or "[]"
    )
    return messages


def fill(tab: Tab, field: str, text: str) -> None:
    """Replace the value of a field of the settings."""
    if tab.run("document.querySelector('#settings').hidden"):
        tab.click("#open-settings")
    tab.click(f"#set-{field}")
    tab.run("document.activeElement.select?.()")
    tab.type(text)


def choose(tab: Tab, field: str, value: str) -> None:
    if tab.run("document.querySelector('#settings').hidden"):
        tab.click("#open-settings")
    tab.run(
        f"(() => {{ const field = document.querySelector('#set-{field}'); field.value = {json.dumps(value)}; "
        "field.dispatchEvent(new Event('change', { bubbles: true })); })()"
    )


def prompt_of(request: Any) -> str:
    return TOKENS.decode(ids_of(request), skip_special_tokens=False)
