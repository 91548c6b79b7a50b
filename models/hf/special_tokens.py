"""The special tokens of a Hugging Face folder, merged token by token from all files that name them.

`tokenizer` and `hf_config` read them here, so that templates, prompts and the end of an answer know the same tokens:

    tokenizer_config.json     bos_token, eos_token, ... and further names; added_tokens_decoder; extra_special_tokens
    special_tokens_map.json   the same names, in older folders
    tokenizer.json            added_tokens: the ids

A token in both files counts as in transformers: that of tokenizer_config.json if the file has `added_tokens_decoder`,
else that of special_tokens_map.json. A token in one of them always counts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from ...runtime.errors import ConfigError
from ..model_files import read_json

CONFIG: Final = "tokenizer_config.json"
MAP: Final = "special_tokens_map.json"
STANDARD_NAMES: Final = (
    *("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token"),
    "mask_token",
)
_LIST, _OLD_LIST = "extra_special_tokens", "additional_special_tokens"
"""The newer name has precedence, as in transformers; under it can be an object of named tokens, too."""
_DECODER: Final = "added_tokens_decoder"
_FLAGS: Final = ("lstrip", "rstrip", "normalized", "single_word", "special")
_ADDED_KEY: Final = re.compile(r'"added_tokens"\s*:\s*')


class ListedToken(NamedTuple):
    """A token that a file lists beside the vocabulary.

    Attributes:
        token_id: None: the file does not say.
        flags: lstrip, rstrip, normalized, single_word and special, those that the file says.
    """

    content: str
    token_id: int | None
    flags: Mapping[str, bool]


class SpecialTokens(NamedTuple):
    """See the module.

    Attributes:
        named: text by name ("bos_token", ...), for chat templates.
        listed: tokens to be matched as a whole; the last entry of a text counts.
    """

    named: dict[str, str]
    listed: tuple[ListedToken, ...]


def read_special_tokens(folder: Path) -> SpecialTokens:
    """Merge the tokens of all files.

    Raises:
        ConfigError: a file is broken.
    """
    config, token_map = (_read(folder / name) for name in (CONFIG, MAP))
    has_decoder = isinstance(config.get(_DECODER), Mapping)
    order = (token_map, config) if has_decoder else (config, token_map)
    tokens: dict[str, object] = {}
    for file in order:
        tokens |= {name: value for name, value in _named(file) if _content(value) is not None}
    listed = [*_decoder_tokens(config), *(_listed(value) for value in tokens.values())]
    for file in order:
        values = file.get(_LIST) or file.get(_OLD_LIST)
        if isinstance(values, list):
            listed += [_listed(value) for value in values if _content(value) is not None]
    named = {name: content for name, value in tokens.items() if (content := _content(value)) is not None}
    return SpecialTokens(named, tuple(listed))


def read_eos_ids(folder: Path, vocab_size: int) -> tuple[int, ...]:
    """The id of the tokenizer's `eos_token`, from whichever file has it; none: no file names one, or has its id.

    Raises:
        ConfigError: a file is broken.
    """
    special = read_special_tokens(folder)
    eos = special.named.get("eos_token")
    if eos is None:
        return ()
    found = [token.token_id for token in special.listed if token.content == eos]
    if all(token_id is None for token_id in found):
        found = [token_id for content, token_id in _tokenizer_json_ids(folder) if content == eos]
    return tuple(i for i in dict.fromkeys(found) if i is not None and 0 <= i < vocab_size)


def _read(path: Path) -> dict[str, object]:
    return read_json(path) if path.exists() else {}


def _named(file: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """Named tokens: the standard names, others that end like them, and a dict of names."""
    for name, value in file.items():
        if name.endswith("_token"):
            yield name, value
    extra = file.get(_LIST)
    if isinstance(extra, Mapping):
        yield from extra.items()


def _content(value: object) -> str | None:
    """The text of a token: a plain string, or an object with its `content`."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _listed(value: Any, token_id: int | None = None) -> ListedToken:
    flags: dict[str, bool] = {}
    if isinstance(value, Mapping):
        flags = {name: value[name] for name in _FLAGS if isinstance(value.get(name), bool)}
    if token_id is None:
        flags["special"] = True
    return ListedToken(_content(value) or "", token_id, flags)


def _decoder_tokens(config: Mapping[str, object]) -> Iterator[ListedToken]:
    decoder = config.get(_DECODER)
    if isinstance(decoder, Mapping):
        for key, value in decoder.items():
            if str(key).isdecimal() and _content(value) is not None:
                yield _listed(value, int(key))


def _tokenizer_json_ids(folder: Path) -> Iterator[tuple[str, int]]:
    """Text and id of the added tokens in tokenizer.json; the rest of the file, up to 30 MB, is not parsed."""
    path = folder / "tokenizer.json"
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}; download it again") from error
    match = _ADDED_KEY.search(text)
    if match is None:
        return
    try:
        tokens, _ = json.JSONDecoder().raw_decode(text, match.end())
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid JSON ({error}); download it again") from error
    for token in tokens if isinstance(tokens, list) else ():
        content, token_id = _content(token), token.get("id") if isinstance(token, Mapping) else None
        if content is not None and isinstance(token_id, int) and not isinstance(token_id, bool):
            yield content, token_id
