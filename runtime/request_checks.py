"""Checks of single values of a request: type, range and finiteness, with field, value and rule in the error.

`SamplingParams`, `LLM` and the scheduler's intake use them. The checks take plain Python values only, since others fail
later: in an encoder, in an array, or in a comparison. `plain` makes such a value of a scalar of numpy or torch.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable
from typing import Any, Final

from .errors import RequestError

_PLAIN: Final = frozenset({int, float, str, bool, type(None)})
_MAX_SHOWN_CHARS: Final = 80
_REPR: Final = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = _REPR.maxlong = _MAX_SHOWN_CHARS


def plain(value: object) -> object:
    """The plain Python value of a scalar of numpy or torch, or of a subclass (enums); anything else unchanged."""
    if type(value) in _PLAIN:
        return value
    if getattr(value, "shape", None) == ():
        scalar: Any = value
        value = scalar.item()
    for kind in (str, int, float):
        if isinstance(value, kind) and not isinstance(value, bool):
            return str.__str__(value) if isinstance(value, str) else kind(value)
    return value


def plain_items(value: object) -> object:
    """A tuple of plain values of a list, a tuple or an array of one dimension; anything else unchanged."""
    if len(getattr(value, "shape", ())) == 1:
        array: Any = value
        value = array.tolist()
    if not isinstance(value, list | tuple):
        return value
    return tuple(value if are_plain(value) else map(plain, value))


def are_plain(values: Iterable[object]) -> bool:
    """Whether `plain` would change none of them; it costs far less than asking that for each."""
    return _PLAIN.issuperset(map(type, values))


def shown(value: object) -> str:
    """A value for an error message: its repr, cut where it is long."""
    try:
        return _REPR.repr(value)
    except ValueError:  # an integer with more digits than Python prints
        return f"a long {type(value).__name__}"


def refused(field: str, value: object, rule: str) -> RequestError:
    """The error for a value out of range; `rule` goes on after "but it"."""
    return RequestError(f"{field} is {shown(value)}, but it {rule}", param=field, code="invalid_value")


def wrong_type(field: str, value: object, wanted: str, *, has_default: bool = True) -> RequestError:
    """The error for a value that is not `wanted`, a noun with its article; `has_default`: it can be left out."""
    hint = "; leave it out for the default" if value is None and has_default else ""
    message = f"{field} is {shown(value)}, but it must be {wanted}{hint}"
    return RequestError(message, param=field, code="invalid_type")


def check_integer(field: str, value: object, low: int, high: int, rule: str = "") -> int:
    """A plain integer in [low, high].

    Args:
        rule: what to say of values below `low` instead of the range.

    Raises:
        RequestError: another type (a bool, a float), or out of range.
    """
    if type(value) is not int:
        raise wrong_type(field, value, "an integer")
    if value < low:
        raise refused(field, value, rule or f"must lie in [{low}, {high}]")
    if value > high:
        raise refused(field, value, f"must be at most {high}" if rule else f"must lie in [{low}, {high}]")
    return value


def check_number(
    field: str, value: object, low: float, high: float, *, low_open: bool = False, unit: str = ""
) -> float:
    """A plain integer or float in [low, high], or (low, high] if `low_open`; the bounds are finite.

    Raises:
        RequestError: another type (a bool), out of range, infinite or not a number. `unit` follows the range.
    """
    if type(value) is not float and type(value) is not int:
        raise wrong_type(field, value, "a number")
    if not (low < value <= high or (value == low and not low_open)):  # false for NaN
        interval = f"{'(' if low_open else '['}{low:g}, {high:g}]"
        raise refused(field, value, f"must lie in {interval} {unit}".rstrip())
    return value


def check_flag(field: str, value: object) -> None:
    """Check a bool.

    Raises:
        RequestError: another type (0 or 1).
    """
    if type(value) is not bool:
        raise wrong_type(field, value, "True or False")


def check_text(field: str, value: object) -> None:
    """Check a string that can be encoded in UTF-8, which messages and logs need.

    Raises:
        RequestError: another type (bytes), or it has a lone surrogate.
    """
    if type(value) is not str:
        raise wrong_type(field, value, "a string")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise refused(field, value, "must be valid Unicode; it has a lone surrogate") from None


def check_texts(field: str, strings: object, most: int, most_chars: int) -> None:
    """Check a tuple of at most `most` strings, each of 1 to `most_chars` characters.

    Raises:
        RequestError: it is none.
    """
    if type(strings) is not tuple:
        raise wrong_type(field, strings, "a list of strings")
    if len(strings) > most:
        raise too_long(field, len(strings), f"{most} strings")
    for string in strings:
        check_text(field, string)
        if not 1 <= len(string) <= most_chars:
            raise refused(field, string, f"must have strings of 1 to {most_chars} characters")


def check_sequences(field: str, sequences: object, most: int, vocab_size: int) -> None:
    """Check a tuple of token sequences, each of 1 to `most` tokens; as many as a front end finds in a vocabulary.

    Raises:
        RequestError: it is none.
    """
    if type(sequences) is not tuple or not all(type(each) is tuple for each in sequences):
        raise wrong_type(field, sequences, "a list of lists of token ids")
    for each in sequences:
        if not each:
            raise refused(field, list(each), "must have no empty sequence")
        check_token_ids(field, each, most, vocab_size)


def check_token_ids(field: str, token_ids: object, most: int, vocab_size: int) -> None:
    """Check a tuple of at most `most` token ids.

    Raises:
        RequestError: it is none.
    """
    if type(token_ids) is not tuple:
        raise wrong_type(field, token_ids, "a list of token ids")
    if len(token_ids) > most:
        raise too_long(field, len(token_ids), f"{most} entries")
    for token_id in token_ids:
        check_token_id(field, token_id, vocab_size)


def check_token_id(field: str, token_id: object, vocab_size: int) -> None:
    """Check a token id.

    Raises:
        RequestError: it is none of the vocabulary.
    """
    if type(token_id) is not int:
        raise wrong_type(field, token_id, "made of token ids, which are integers")
    if not 0 <= token_id < vocab_size:
        raise refused(field, token_id, f"must name token ids in [0, {vocab_size})")


def too_long(field: str, count: int, limit: str) -> RequestError:
    """The error for a value with too many parts; `limit`: the most."""
    return RequestError(f"{field} has {count}, but it has at most {limit}", param=field, code="invalid_value")
