"""`render_markdown`: an answer's Markdown as elements that the page can make; it runs in the process of `worker.py`.

markdown-it-py parses, Pygments colors code, latex2mathml makes MathML. No HTML is made at any time: an element is
`[tag, attributes, *children]` with texts as children, and raw HTML in an answer is text. Colors of code are classes
(the short names of Pygments), because the page's policy allows no inline styles.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from typing import Any, Final, NamedTuple
from xml.etree.ElementTree import Element

from latex2mathml.converter import convert_to_element
from markdown_it import MarkdownIt
from markdown_it.ruler import RuleOptionsType
from markdown_it.rules_block import StateBlock
from markdown_it.tree import SyntaxTreeNode
from mdit_py_plugins.amsmath import amsmath_plugin
from mdit_py_plugins.dollarmath import dollarmath_plugin
from mdit_py_plugins.dollarmath.index import math_block_dollar
from mdit_py_plugins.gfm import gfm_plugin
from mdit_py_plugins.texmath.index import RuleDictType, make_block_func, make_inline_func, rules
from pygments.lexers import get_lexer_by_name
from pygments.token import STANDARD_TYPES
from pygments.util import ClassNotFound

Child = str | list[Any]
"""A text, or an element: `[tag, attributes, *children]`."""

_MAX_COLORED_CHARS: Final = 50_000
_MAX_MATH_CHARS: Final = 5_000
_MAX_HEADING: Final = 6
_HEADING_SHIFT: Final = 2
"""An answer's title is an h3 of the page."""
_LINKS: Final = ("http://", "https://", "mailto:")
_ENDS_PARAGRAPH: Final[RuleOptionsType] = {"alt": ["paragraph", "reference", "blockquote", "list"]}
_BRACKETS: Final[RuleDictType] = {  # the plugin's own rule drops a text that follows in the same line
    "name": "math_block",
    "rex": re.compile(r"\\\[((?:(?!\\\]|\n\n).)+)\\\](?=[ \t]*(?:\n|\Z))", re.DOTALL),
    "tmpl": "",
    "tag": r"\[",
}
_BRACKETS_IN_TEXT: Final[RuleDictType] = {
    "name": "math_inline_double",
    "rex": re.compile(r"\\\[(.+?)\\\]", re.DOTALL),
    "tmpl": "",
    "tag": r"\[",
}
_ALIGNED: Final = re.compile(r"\\(begin|end)\{(?:aligned|alignedat|split|gathered|gather\*?|eqnarray\*?)\}")
_PLAIN: Final = re.compile(r"\\(?:begin|end)\{(?:equation|displaymath|math)\*?\}|\\(?:label|tag)\{[^{}]*\}")


class Rendered(NamedTuple):
    """Rendered blocks, and the number of lines of the text that they show."""

    blocks: list[Child]
    num_lines: int


def render_markdown(text: str, *, complete: bool) -> Rendered:
    r"""The blocks of a text.

    Args:
        text: Markdown, with math in `$..$`, `$$..$$`, `\(..\)` and `\[..\]`.
        complete: False if the text still grows. Its last block is left out then.
    """
    nodes = SyntaxTreeNode(_PARSER.parse(text)).children
    if not complete:
        nodes = [node for node in nodes if node.type != "footnote_block"][:-1]
    ends = [node.map[1] for node in nodes if node.map is not None]
    return Rendered([block for node in nodes for block in _elements(node)], ends[-1] if ends else 0)


def _make_parser() -> MarkdownIt:
    parser = MarkdownIt("commonmark", {"html": False, "breaks": True})
    parser.use(gfm_plugin)
    parser.options["alerts"] = False
    parser.use(
        dollarmath_plugin, allow_space=False, allow_digits=False, allow_labels=False, double_inline=True
    )
    parser.use(amsmath_plugin)
    parser.block.ruler.at("math_block", _dollars, _ENDS_PARAGRAPH)
    parser.block.ruler.before("fence", "brackets", make_block_func(_BRACKETS), _ENDS_PARAGRAPH)
    for rule in (rules["brackets"]["inline"][0], _BRACKETS_IN_TEXT):
        parser.inline.ruler.before("escape", rule["tag"], make_inline_func(rule))
    return parser


def _dollars(state: StateBlock, begin: int, end: int, silent: bool) -> bool:
    """The plugin's rule for `$$`, which pushes tokens also where it is only asked whether a block begins."""
    if silent:
        line = state.src[state.bMarks[begin] + state.tShift[begin] : state.eMarks[begin]].strip()
        return line == "$$" or (line.startswith("$$") and line.endswith("$$") and len(line) > 4)
    return _DOLLARS(state, begin, end, silent)


_DOLLARS: Final = math_block_dollar(allow_labels=False)
_PARSER: Final = _make_parser()


def _elements(node: SyntaxTreeNode) -> Iterator[Child]:
    """The elements of one node of the syntax tree."""
    match node.type:
        case "inline":
            yield from _children(node)
        case "text" | "text_special" | "html_inline" | "html_block":
            yield node.content
        case "softbreak" | "hardbreak":
            yield ["br", {}]
        case "code_inline":
            yield ["code", {}, node.content]
        case "fence" | "code_block":
            language = node.info.split(maxsplit=1)[0] if node.info.strip() else ""
            if language == "math":
                yield _math(node.content, "block")
                return
            yield ["pre", {"language": language}, *_colored(node.content.removesuffix("\n"), language)]
        case "math_inline":
            yield _math(node.content, "inline")
        case "math_inline_double" | "math_block" | "amsmath":
            yield _math(node.content, "block")
        case "heading":
            level = min(int(node.tag[1]) + _HEADING_SHIFT, _MAX_HEADING)
            yield [f"h{level}", {}, *_children(node)]
        case "link":
            href = str(node.attrs.get("href", ""))
            yield ["a" if href.startswith(_LINKS) else "span", {"href": href}, *_children(node)]
        case "image":  # nothing is loaded from elsewhere
            src = str(node.attrs.get("src", ""))
            text = "".join(child.content for child in node.children) or src
            yield ["a" if src.startswith(_LINKS) else "span", {"href": src}, text]
        case "paragraph" if node.is_nested and node.nester_tokens and node.nester_tokens.opening.hidden:
            yield from _children(node)  # an item of a tight list
        case "footnote_ref":
            yield ["sup", {}, _footnote_number(node)]
        case "footnote_block":
            yield ["ol", {"class": "footnotes"}, *_children(node)]
        case "footnote":
            yield ["li", {}, *_children(node)]
        case "footnote_anchor":
            pass
        case _:
            yield [node.tag or "div", _attributes(node), *_children(node)]


def _children(node: SyntaxTreeNode) -> Iterator[Child]:
    if node.type == "list_item" and "task-list-item" in str(node.attrs.get("class", "")):
        yield ["input", {"checked": "true" if node.meta.get("checked") else "false"}]
    for child in node.children:
        yield from _elements(child)


def _attributes(node: SyntaxTreeNode) -> dict[str, str]:
    """The attributes that an element keeps."""
    kept = {}
    if "start" in node.attrs:
        kept["start"] = str(node.attrs["start"])
    if style := str(node.attrs.get("style", "")):
        kept["class"] = style.removeprefix("text-align:")
    elif node.attrs.get("class") in ("contains-task-list", "task-list-item"):
        kept["class"] = "task" if node.type == "list_item" else "tasks"
    return kept


def _footnote_number(node: SyntaxTreeNode) -> str:
    return str(int(node.meta.get("id", 0)) + 1)


def _colored(code: str, language: str) -> Iterator[Child]:
    """The tokens of code, each in a span with its class; plain text for a language that Pygments does not have."""
    try:
        lexer = get_lexer_by_name(language, stripnl=False, ensurenl=False)
    except ClassNotFound:
        lexer = None
    if lexer is None or len(code) > _MAX_COLORED_CHARS:
        yield code
        return
    for kind, text in lexer.get_tokens(code):
        while kind not in STANDARD_TYPES:
            kind = kind.parent
        name = STANDARD_TYPES[kind]
        yield ["span", {"class": name}, text] if name and text.strip() else text


def _math(source: str, display: str) -> Child:
    """MathML; the source in monospace if it cannot be read."""
    first, *others = source.split("\n")
    if others and all(line.lstrip().startswith(">") for line in others):  # the marks of a quote
        source = "\n".join([first, *(line.lstrip()[1:] for line in others)])
    if len(source) <= _MAX_MATH_CHARS:
        plain = _PLAIN.sub("", _ALIGNED.sub(r"\\\1{align*}", source)).strip()
        try:
            return ["span", {"class": f"math {display}"}, _mathml(_read(plain, display))]
        except Exception:  # the library has no common class of errors
            pass
    mark = "$$" if display == "block" else "$"
    return ["code", {}, f"{mark}{source.strip()}{mark}"]


def _read(source: str, display: str) -> Element:
    return convert_to_element(source, display=display)


def _mathml(element: Element) -> list[Any]:
    texts = [html.unescape(element.text)] if element.text else []
    attributes = {name: value for name, value in element.attrib.items() if name != "xmlns"}
    return [element.tag, attributes, *texts, *(_mathml(child) for child in element)]
