"""A person in front of the chat at `/`: what is typed and chosen, and what the page keeps."""

from __future__ import annotations

import json
from typing import Any

from tests.browser import Tab
from tests.tokenizer_manager.fake_engine import TOKENIZER as TOKENS
from tests.tokenizer_manager.fake_engine import ids_of

ANSWERED = (
    "document.querySelector('#stop').hidden && document.querySelector('.assistant .figures') "
    "&& !document.querySelector('.assistant .text:not([data-rendered])')"
)
KEPT = """
(async () => {
  const done = (request) => new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
  const names = ["conversations", "messages"], database = await done(indexedDB.open("engine", 1));
  const transaction = database.transaction(names);
  const all = names.map((name) => done(transaction.objectStore(name).getAll()));
  const [conversations, messages] = await Promise.all(all);
  return { conversations: conversations.sort((a, b) => b.updated - a.updated), messages };
})()
"""


def ask(tab: Tab, text: str) -> None:
    tab.click("#question")
    tab.type(text)
    tab.press("Enter")


def database(tab: Tab) -> dict[str, list[dict[str, Any]]]:
    """All records of the browser's database; the conversation that changed last is the first."""
    found: dict[str, list[dict[str, Any]]] = tab.run(KEPT)
    return found


def kept(tab: Tab) -> list[dict[str, Any]]:
    """The branch that is shown of the conversation that changed last, as the browser keeps it."""
    found = database(tab)
    by_id = {message["id"]: message for message in found["messages"]}
    branch: list[dict[str, Any]] = []
    at = found["conversations"][0]["leaf"] if found["conversations"] else None
    while at is not None:
        branch.insert(0, by_id[at])
        at = branch[0]["parent"]
    return branch


def titles(tab: Tab) -> list[str]:
    """The list of conversations."""
    found: list[str] = tab.run(
        "[...document.querySelectorAll('#conversations .title')].map((each) => each.textContent)"
    )
    return found


def fill(tab: Tab, field: str, text: str) -> None:
    """Replace the value of a field of the settings."""
    open_settings(tab)
    tab.click(f"#set-{field}")
    tab.run("document.activeElement.select?.()")
    tab.type(text)


def open_settings(tab: Tab) -> None:
    """Open the panel and unfold its groups."""
    if tab.run("document.querySelector('#settings').hidden"):
        tab.click("#open-settings")
    tab.run("document.querySelectorAll('#settings details').forEach((each) => { each.open = true; })")


def choose(tab: Tab, field: str, value: str) -> None:
    open_settings(tab)
    tab.run(
        f"(() => {{ const field = document.querySelector('#set-{field}'); field.value = {json.dumps(value)}; "
        "field.dispatchEvent(new Event('change', { bubbles: true })); })()"
    )


def prompt_of(request: Any) -> str:
    return TOKENS.decode(ids_of(request), skip_special_tokens=False)
