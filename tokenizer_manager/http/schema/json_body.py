"""From body bytes to typed structs, with errors that name field, value and rule.

The standard library's parser is used instead of msgspec's, because only it can refuse duplicate keys and NaN by name;
it costs 10 us more for a chat and 0.5 ms more for 8,192 token ids. Large bodies are parsed on a thread (`body_reader`);
the parser is written in C and releases the GIL only where it calls Python. In a large body it does that for each number
and object, and `--max-json-items` bounds the strings.
"""

from __future__ import annotations

import codecs
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, Final

from ....runtime.config.answer_config import RequestLimits
from ....runtime.errors import RequestError
from .values import DEFAULT_LIMITS, Body

_COMPRESSED: Final = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}
_OTHER_UNICODE: Final = {
    codecs.BOM_UTF32_LE: "UTF-32",  # begins like that of UTF-16
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}
_CONTAINERS: Final = (dict, list)
_ITEM_MARKS: Final = ("[", "{")
_STRINGS: Final = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
"""Matches an unterminated string too, once: searching for its end from each quote inside it would take days."""
_SURROGATE: Final = re.compile(rb"\\u[dD][89a-fA-F]")
_MAX_EXACT_FLOAT: Final = 2.0**53
_SMALL_CHARS: Final = 64 << 10  # parsed in a few milliseconds


def parse_object(body: bytes, limits: RequestLimits = DEFAULT_LIMITS) -> Body:
    """The JSON object in a request body. Floats with whole values become integers: 575.0 is a valid count.

    Args:
        body: as it was received; a byte order mark of UTF-8 is allowed.
        limits: on its depth, and on the number of lists, objects and keys.

    Raises:
        RequestError: compressed, not UTF-8, not JSON, not an object, a key twice, NaN, half a surrogate pair, too deep.
    """
    for magic, name in _COMPRESSED.items():
        if body.startswith(magic):
            raise encoded_body(f"the body is {name}, without a Content-Encoding")
    for mark, name in _OTHER_UNICODE.items():
        if body.startswith(mark):
            raise _invalid(f"it begins with the byte order mark of {name}; send UTF-8")
    body = body.removeprefix(codecs.BOM_UTF8)
    try:
        text = body.decode()
        _check_items(text, limits.max_json_items)
    except UnicodeDecodeError as error:
        raise _invalid(f"it is not UTF-8: byte {body[error.start]:#04x} at offset {error.start}") from None
    try:
        value = _decoded(text)
        if body.count(b"[") + body.count(b"{") > limits.max_json_depth:  # otherwise it cannot be deeper
            _check_depth(value, limits.max_json_depth)
        if isinstance(value, dict) and _SURROGATE.search(body):
            _refuse_lone_surrogates(value)
    except json.JSONDecodeError as error:
        what = (
            "it is empty" if not text.strip() else f"{error.msg} at line {error.lineno} column {error.colno}"
        )
        raise _invalid(what) from None
    except RecursionError:
        raise _invalid("it is nested too deeply") from None
    except ValueError as error:  # an integer of thousands of digits
        raise _invalid(str(error).partition(";")[0]) from None
    if not isinstance(value, dict):
        raise _invalid("it must be an object, {...}")
    return value


def encoded_body(what: str) -> RequestError:
    """The error for a compressed body, or one that says so."""
    return RequestError(
        f"{what}, which this server does not decode; send the body as plain UTF-8, without Content-Encoding",
        code="unsupported_encoding",
        status=415,
    )


def _check_items(text: str, max_items: int) -> None:
    """Refuse a body that would take long to parse: objects, keys and strings, not lists of numbers."""
    if text.count('"') // 2 + sum(map(text.count, _ITEM_MARKS)) <= max_items:
        return
    count = end = 0
    for string in _STRINGS.finditer(text):  # the same marks may stand in strings: prompts with code in them
        count += 1 + sum(text.count(mark, end, string.start()) for mark in _ITEM_MARKS)
        end = string.end()
        if count > max_items:
            break
    count += sum(text.count(mark, end) for mark in _ITEM_MARKS) if count <= max_items else 0
    if count > max_items:
        raise RequestError(
            f"the body has more than {max_items} keys, strings, lists and objects, which is the limit; send less, or "
            f"raise --max-json-items",
            code="invalid_json",
        )


def _check_depth(value: object, max_depth: int) -> None:
    """Refuse a value that is nested too deeply. Level by level, so that the stack does not grow."""
    level = [value]
    for _ in range(max_depth):
        level = [item for outer in level for item in _items(outer) if isinstance(item, _CONTAINERS)]
        if not level:
            return
    raise _invalid(
        f"it is nested too deeply, the limit is {max_depth}; flatten it, or raise --max-json-depth"
    )


def _items(outer: object) -> Iterable[object]:
    if isinstance(outer, dict):
        return outer.values()
    return outer if isinstance(outer, list) else ()


def _decoded(text: str) -> object:
    decoder = _DECODER if len(text) <= _SMALL_CHARS else _YIELDING_DECODER
    try:
        return decoder.decode(text)
    except _Flawed:
        raise _describe_flaw(text) from None


class _Flawed(Exception):
    """The body has a duplicate key or NaN; a second, slower parse finds the place."""


class _Twice(dict[str, Any]):
    """An object with a duplicate key.

    Attributes:
        key: the first duplicate.
    """

    def __init__(self, fields: Body, key: str) -> None:
        super().__init__(fields)
        self.key = key


def _unique(pairs: list[tuple[str, Any]]) -> Body:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise _Flawed
    return fields


def _marked(pairs: list[tuple[str, Any]]) -> Body:
    fields = dict(pairs)
    if len(fields) == len(pairs):
        return fields
    counts = Counter(key for key, _ in pairs)
    return _Twice(fields, next(key for key, count in counts.items() if count > 1))


def _flawed(_: str) -> float:
    raise _Flawed


def _describe_flaw(text: str) -> RequestError:
    """The error for a body that raised `_Flawed`."""
    flaws = _flaws_in(_MARKING_DECODER.decode(text), "")
    path, what = next(flaws, ("", "has a flaw in a value that is given twice"))
    return RequestError(f"{path or 'the body'} {what}", param=path or None, code="invalid_json")


def _flaws_in(value: object, path: str) -> Iterator[tuple[str, str]]:
    match value:
        case float() if value is _NOT_A_NUMBER:
            yield path, "is NaN or Infinity, which JSON does not have; send a finite number"
        case dict():
            prefix = f"{path}." if path else ""
            if isinstance(value, _Twice):
                yield prefix + value.key, "is there twice in one object; send it once"
            for key, item in value.items():
                yield from _flaws_in(item, prefix + key)
        case list():
            for i, item in enumerate(value):
                if item is _NOT_A_NUMBER or isinstance(
                    item, dict | list
                ):  # skip numbers: there may be millions
                    yield from _flaws_in(item, f"{path}[{i}]")


def _whole(text: str) -> int | float:
    value = float(text)
    return int(value) if value.is_integer() and abs(value) <= _MAX_EXACT_FLOAT else value


def _integer(text: str) -> int:
    """As `int`, which is no Python code, so that the parser would not give up the GIL between two numbers."""
    return int(text)


_NOT_A_NUMBER: Final = float("nan")  # compared by identity
_DECODER: Final = json.JSONDecoder(object_pairs_hook=_unique, parse_float=_whole, parse_constant=_flawed)
_YIELDING_DECODER: Final = json.JSONDecoder(
    object_pairs_hook=_unique, parse_float=_whole, parse_int=_integer, parse_constant=_flawed
)
_MARKING_DECODER: Final = json.JSONDecoder(
    object_pairs_hook=_marked, parse_float=_whole, parse_int=_integer, parse_constant=lambda _: _NOT_A_NUMBER
)


def _invalid(why: str) -> RequestError:
    return RequestError(f"the body is not valid JSON: {why}", code="invalid_json")


def _refuse_lone_surrogates(value: object, path: str = "") -> None:
    match value:
        case str():
            try:
                value.encode()
            except UnicodeEncodeError as error:
                name = path or "a field without a name"
                raise RequestError(
                    f"{name} has half of a surrogate pair at character {error.start}; send valid Unicode",
                    param=path or None,
                    code="invalid_json",
                ) from None
        case dict():
            for key, item in value.items():
                _refuse_lone_surrogates(key, path or "the body")
                _refuse_lone_surrogates(item, f"{path}.{key}" if path else key)
        case list():
            for i, item in enumerate(value):
                if isinstance(item, dict | list) or (isinstance(item, str) and not item.isascii()):
                    _refuse_lone_surrogates(item, f"{path}[{i}]")
