"""Items of stored responses: those that a request sends, those of a chain, and the pages of `/input_items`."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from ...state.responses import Response
from ..schema.values import Body, is_newest_first, number_of, refused, show
from .wire import ItemsBody

_PREFIXES: Final = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
}
_DIGEST_BYTES: Final = 16
_MAX_LIMIT: Final = 100


def input_items(value: object, find_item: Callable[[str], Body | None]) -> list[Any]:
    """The items of a request's `input` to be stored: a text as an item, and items instead of references to them."""
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": value}]
    items = value if isinstance(value, list) else []
    references = (
        find_item(item["id"]) if isinstance(item, dict) and item.get("type") == "item_reference" else None
        for item in items
    )
    found = [item if found is None else found for item, found in zip(items, references, strict=True)]
    return [item for item in found if item.get("type") != "item_reference"]  # of the chain, which has them


def items_of(chain: Sequence[Response]) -> list[Body]:
    """The items of a chain in order: of each response its input, then its output."""
    items: list[Body] = []
    for response in chain:
        items += msgspec.json.decode(response.input)
        items += msgspec.json.decode(response.output)
    return items


def context_items(chain: Sequence[Response]) -> list[Body]:
    """The items that a response was made from, the last of a chain; each as OpenAI's clients read it, with an id.

    An id that a client has sent a second time is replaced, because it could not name the end of a page.
    """
    context: list[Body] = []
    ids: set[str] = set()
    for response in chain:
        given = msgspec.json.decode(response.input)
        output = msgspec.json.decode(response.output) if response is not chain[-1] else []
        for i, item in enumerate([*given, *output]):
            context.append(_listed(item, ids, derived_id(response.id, i)))
            ids.add(context[-1]["id"])
    return context


def page_of(items: Sequence[Body], query: Mapping[str, str]) -> ItemsBody:
    """A page of items.

    Args:
        query: `after`, an item's id; `limit`, 1 to 100, else 20; `order`: asc, or desc, which is the default.

    Raises:
        RequestError: one of these is wrong.
    """
    limit = number_of(query, "limit", 1, _MAX_LIMIT, 20)
    ordered = list(items)[::-1] if is_newest_first(query) else list(items)
    if after := query.get("after"):
        place = next((i for i, item in enumerate(ordered) if item["id"] == after), None)
        if place is None:
            raise refused("after", f"is {show(after)}, but the response has no such item")
        ordered = ordered[place + 1 :]
    page = ordered[:limit]
    return ItemsBody(
        data=page,
        first_id=page[0]["id"] if page else "",
        last_id=page[-1]["id"] if page else "",
        has_more=len(ordered) > limit,
    )


def derived_id(response_id: str, number: int) -> str:
    """Hex digits that are the same whenever they are made."""
    data = f"{response_id}/{number}".encode()
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).hexdigest()


def _listed(item: Body, earlier_ids: Container[str], digits: str) -> Body:
    kind = item.get("type", "message")
    made: Body = {"type": kind, **item}
    item_id = made.get("id")
    if not isinstance(item_id, str) or not item_id or item_id in earlier_ids:
        made["id"] = f"{_PREFIXES.get(kind, 'item')}_{digits}"
    if kind == "message":
        made.setdefault("status", "completed")
        if isinstance(text := item.get("content"), str):
            made["content"] = [_part(text, str(item.get("role")))]
    elif kind in ("function_call_output", "custom_tool_call_output"):
        made.setdefault("status", "completed")
    return made


def _part(text: str, role: str) -> Body:
    if role == "assistant":
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"type": "input_text", "text": text}


def event_texts(events: bytes) -> Iterator[bytes]:
    """The events of a group, each with its end."""
    return (event + EVENT_END for event in events.split(EVENT_END)[:-1])


EVENT_END: Final = b"\n\n"
