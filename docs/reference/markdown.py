"""Markdown that the reference pages are built from: wrapped paragraphs, bullets, links to headings."""

from __future__ import annotations

import re
import textwrap
from typing import Final

MAX_COLUMNS: Final = 120
DASH: Final = "-"
_CODE: Final = re.compile(r"(`[^`]*`)")
_ACTIVE: Final = re.compile(r"([*<])")
_NOT_IN_ANCHORS: Final = re.compile(r"[^\w\- ]")


def code(text: object) -> str:
    """A code span."""
    return f"`{text}`"


def plain(text: str) -> str:
    """`text` with the characters that Markdown would act on escaped, except inside code spans."""
    parts = _CODE.split(text)
    parts[::2] = (_ACTIVE.sub(r"\\\1", part) for part in parts[::2])
    return "".join(parts)


def paragraph(text: str) -> str:
    """One wrapped paragraph."""
    return _wrap(text, "", "")


def bullet(text: str) -> str:
    """One wrapped list item."""
    return _wrap(text, "- ", "  ")


def link_to(title: str, page: str = "") -> str:
    """A link to the heading `title` of `page`; of this page without one."""
    return f"[{title.replace('`', '')}]({page}#{anchor(title)})"


def anchor(title: str) -> str:
    """The name that GitHub gives to a heading: lower case, dashes for spaces, no other punctuation."""
    return _NOT_IN_ANCHORS.sub("", title.lower()).replace(" ", "-")


def page(*blocks: str) -> str:
    """The text of a page: blocks with an empty line between them; list items that follow each other stay together."""
    lines: list[str] = []
    previous = ""
    for block in blocks:
        if lines and not (block.startswith("- ") and previous.startswith("- ")):
            lines.append("")
        lines.append(block)
        previous = block
    return "\n".join(lines) + "\n"


def _wrap(text: str, first: str, rest: str) -> str:
    return textwrap.fill(
        text,
        MAX_COLUMNS,
        initial_indent=first,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    )
