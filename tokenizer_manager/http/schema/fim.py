"""Prompts that fill in the middle of a text, for the routes that have a suffix."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from msgspec.structs import replace

from ....models.tokenizer.fim import Extra
from ....models.tokenizer.tokenizer import Tokenizer
from ....runtime.errors import RequestError
from ....runtime.sampling_params import SamplingParams


def fill_in(
    tokenizer: Tokenizer,
    texts: Sequence[tuple[str | Sequence[int], str]],
    sampling: SamplingParams,
    *,
    room: int,
    param: str,
    written: str = "",
    extra: Sequence[Extra] = (),
    add_special_tokens: bool = True,
    suffix_first: bool = False,
) -> tuple[list[list[int]], SamplingParams]:
    """The prompts that ask for the text between others, and `sampling` with the tokens that end it.

    Args:
        texts: prefix and suffix of each.
        room, written, extra, suffix_first: see `FimTokens.prompt`.
        param: the client's name of the field that asks for it.
        add_special_tokens: BOS begins a prompt if it begins every text.

    Raises:
        RequestError: the model has no tokens for it.
    """
    fim = tokenizer.fim
    if fim is None:
        raise RequestError(
            f"{param} asks to fill in the middle of a text, but this model has no tokens for it (fim_prefix, "
            "fim_suffix, fim_middle); leave it out, or serve a model of code",
            param=param,
            code="unsupported_task",
        )
    bos = None
    if add_special_tokens and tokenizer.encode("a")[:1] == [tokenizer.bos_token_id]:
        bos = tokenizer.bos_token_id
    prompts = [
        fim.prompt(
            partial(tokenizer.encode, add_special_tokens=False),
            prefix,
            suffix,
            room=room,
            written=written,
            extra=extra,
            bos=bos,
            suffix_first=suffix_first,
        )
        for prefix, suffix in texts
    ]
    return prompts, replace(sampling, stop_token_ids=(*sampling.stop_token_ids, *fim.ends))
