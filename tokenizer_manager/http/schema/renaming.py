"""`renamed_fields`: errors that call fields what the client called them.

`SamplingParams` and admission know a field by its usual name; some requests have it elsewhere or under another.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from typing import Final

from ....runtime.errors import RequestError

OPENAI_NAMES: Final = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}
"""Fields of `SamplingParams` that have another name in OpenAI's API."""


@contextlib.contextmanager
def renamed_fields(names: Mapping[str, str]) -> Iterator[None]:
    """Put the client's names into what is raised inside.

    Args:
        names: usual name -> the client's. In messages, short names like `n` are words of their own elsewhere: a name is
            replaced where the message begins with it, and everywhere if it has an underscore.
    """
    try:
        yield
    except RequestError as error:
        for ours, theirs in names.items():
            word = rf"(?<![\w.\-]){re.escape(ours)}(?![\w\-])"
            pattern = word if "_" in ours else f"^{word}"
            error.message = re.sub(pattern, theirs.replace("\\", r"\\"), error.message)
        error.args = (error.message,)
        if error.param is not None:
            error.param = names.get(error.param, error.param)
        raise
