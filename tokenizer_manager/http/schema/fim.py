"""Prompts that fill in the middle of a text, and `POST /infill`'s fields, which are llama-server's."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from ....models.tokenizer.fim import Extra, FimTokens
from ....models.tokenizer.tokenizer import Tokenizer
from ....runtime.errors import RequestError


def fim_tokens(tokenizer: Tokenizer, param: str) -> FimTokens:
    """The model's tokens for it.

    Raises:
        RequestError: the model has none.
    """
    if tokenizer.fim is None:
        raise RequestError(
            f"{param} asks to fill in the middle of a text, but this model has no tokens for it (fim_prefix, "
            "fim_suffix, fim_middle); leave it out, or serve a model of code",
            param=param,
            code="unsupported_task",
        )
    return tokenizer.fim


def fim_prompt(
    tokenizer: Tokenizer,
    prefix: str | Sequence[int],
    suffix: str,
    *,
    room: int,
    param: str,
    written: str = "",
    extra: Sequence[Extra] = (),
    add_special_tokens: bool = True,
    suffix_first: bool = False,
) -> list[int]:
    """The prompt; see `FimTokens.prompt`. BOS begins it if it begins every text.

    Raises:
        RequestError: the model has no tokens for it.
    """
    fim = fim_tokens(tokenizer, param)
    bos = None
    if add_special_tokens and tokenizer.encode("a")[:1] == [tokenizer.bos_token_id]:
        bos = tokenizer.bos_token_id
    return fim.prompt(
        partial(tokenizer.encode, add_special_tokens=False),
        prefix,
        suffix,
        room=room,
        written=written,
        extra=extra,
        bos=bos,
        suffix_first=suffix_first,
    )
