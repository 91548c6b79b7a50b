"""The forms in which a caller of `LLM` may pass prompts, token ids and parameters, and what is refused of them.

`own_names` puts the errors of a server's checks into the words of a Python program.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from ..runtime.config.config_fields import setting_names
from ..runtime.errors import ConfigError, RequestError
from ..runtime.request_checks import are_plain, plain, shown, wrong_type
from ..runtime.sampling_defaults import SamplingDefaults
from ..runtime.sampling_params import SamplingParams

_PROMPT: Final = "a text or a list of token ids"
_PROMPTS: Final = f"{_PROMPT}, or a list of these"
_PARAMS: Final = "a SamplingParams, a dict of its fields"
_NO_LISTS: Final = (str, bytes, bytearray, memoryview, Mapping, set, frozenset)
"""Can be iterated over, and are no lists of prompts or token ids. Bytes would pass as token ids."""


def as_prompts(prompts: object, name: str = "prompts") -> tuple[list[object], bool]:
    """The prompts of a call, not yet looked at one by one, and whether the caller passed one and not a list.

    A list or an array of integers is one prompt; an array of two dimensions has one prompt in each row.

    Raises:
        RequestError: another type.
    """
    if isinstance(prompts, str):
        return [prompts], True
    items = _as_list(prompts)
    if items is None:
        raise wrong_type(name, prompts, _PROMPTS + _hint(prompts), has_default=False)
    if items and isinstance(plain(items[0]), int):
        return [items], True
    return items, False


def as_conversations(messages: object) -> tuple[Sequence[object], bool]:
    """The conversations of a call, not yet looked at one by one, and whether the caller passed one and not a list."""
    if isinstance(messages, Sequence) and messages and all(map(_is_list, messages)):
        return messages, False
    return [messages], True


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def checked_token_ids(prompt: object, vocab_size: int, name: str = "prompt") -> list[int]:
    """The token ids of one prompt that is no text.

    Raises:
        RequestError: it is no list of integers in [0, vocab_size).
    """
    items = _as_list(prompt)
    if items is None:
        raise wrong_type(name, prompt, _PROMPT + _hint(prompt), has_default=False)
    token_ids = items if are_plain(items) else [plain(item) for item in items]
    checked: list[int] = []
    for token_id in token_ids:
        if type(token_id) is not int or not 0 <= token_id < vocab_size:
            message = f"{name} holds {shown(token_id)}, but it must be {_PROMPT} in [0, {vocab_size})"
            raise RequestError(message, param=name, code="invalid_value")
        checked.append(token_id)
    return checked


def as_params(params: object, num_prompts: int, defaults: SamplingDefaults) -> Sequence[SamplingParams]:
    """The parameters of each prompt, from none, one for all, or a list; a dict has fields beside the `defaults`,
    and None in it is the default.

    Raises:
        TypeError: a dict has a key that is no field.
        RequestError: another type, a bad value in a dict, or another number of them than prompts.
    """
    if params is None:
        return [defaults.params()] * num_prompts
    if isinstance(params, SamplingParams | Mapping):
        return [_one(params, defaults)] * num_prompts
    items = _as_list(params)
    if items is None:
        raise wrong_type("params", params, f"{_PARAMS} or a list of them" + _hint(params))
    if len(items) != num_prompts:
        message = (
            f"there are {num_prompts} prompts and {len(items)} params; pass one for all or one per prompt"
        )
        raise RequestError(message, param="params")
    return [_one(item, defaults) for item in items]


def _one(params: object, defaults: SamplingDefaults) -> SamplingParams:
    match params:
        case None:
            return defaults.params()
        case SamplingParams():
            return params
        case Mapping():
            given = {str(name): value for name, value in params.items() if value is not None}
            return defaults.params(given)
        case _:
            raise wrong_type("params", params, _PARAMS + _hint(params))


def _as_list(values: object) -> list[object] | None:
    """The items of a list, an array, or anything else that can be iterated over; None if it is no list of anything.

    The items of an array of one dimension become plain values at once, which is much faster than one by one.
    """
    if hasattr(values, "shape") and hasattr(values, "tolist"):
        array: Any = values
        return list(array.tolist()) if len(array.shape) in (1, 2) else None
    if isinstance(values, _NO_LISTS) or not isinstance(values, Iterable):
        return None
    return list(values)


def _hint(value: object) -> str:
    if isinstance(value, bytes | bytearray | memoryview):
        return "; decode bytes that are a text, and pass list(...) of bytes that are token ids"
    if isinstance(value, Mapping):
        return ", not a dict"
    return ""


@contextlib.contextmanager
def located(place: str, name: str) -> Iterator[None]:
    """Puts a place before errors that are raised inside, where they name the argument."""
    try:
        yield
    except RequestError as error:
        if place != name:
            error.message = (
                place + error.message.removeprefix(name)
                if error.message.startswith(name)
                else (f"{place.partition(':')[0]}: {error.message}")
            )
            error.args = (error.message,)
        raise


_FLAG: Final = re.compile(r"(?<![\w-])--([a-z][a-z0-9-]*)(?:[ =]([\w.]+)(?=$|[,;.)]))?")
_COMMAND: Final = re.compile(r"(`engine [^`]*`)")
_CALLS: Final = (
    ("start the server with ", "make the LLM with "),
    ("this server", "this LLM"),
    ("the server", "the LLM"),
    ("use /v1/embeddings", "use LLM.embed"),
    ("use /v1/rerank or /v1/score", "use LLM.rerank or LLM.score"),
    ("use /v1/completions", "use LLM.generate"),
    ("use /v1/chat/completions", "use LLM.chat"),
    ("use /generate", "use LLM.generate"),
    ("serve a model for it", "load a model for it"),
    ("serve another model", "load another model"),
    ("serve a reranker", "load a reranker"),
)
"""Words for a client of a server -> for a Python program."""


@contextlib.contextmanager
def own_names() -> Iterator[None]:
    """Errors in the words of a Python program: settings are arguments of `LLM`, endpoints are its methods."""
    try:
        yield
    except (RequestError, ConfigError) as error:
        message = "".join(map(_in_python, _COMMAND.split(str(error))))
        error.args = (message,)
        if isinstance(error, RequestError):
            error.message = message
        raise


def _in_python(part: str) -> str:
    """A part of a message; a command line in it stays."""
    if _COMMAND.fullmatch(part):
        return part
    part = _FLAG.sub(_as_argument, part)
    for words, own in _CALLS:
        part = part.replace(words, own)
    return part


def _as_argument(flag: re.Match[str]) -> str:
    """`max_model_len` for `--max-model-len`, `task="embed"` for `--task embed`."""
    name, value = flag[1].replace("-", "_"), flag[2]
    if name.startswith("no_") and name[3:] in setting_names():
        return f"{name[3:]}=False" + (f" {value}" if value else "")
    if name not in setting_names():
        return flag[0]
    field = setting_names()[name].field
    if (
        value is None
        or value[0].isupper()
        or (field.kind is str and field.choices and value not in field.choices)
    ):
        return name + flag[0].removeprefix(f"--{flag[1]}")
    return f"{name}={value}" if field.kind is not str else f'{name}="{value}"'
