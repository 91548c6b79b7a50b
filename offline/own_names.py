"""`own_names`: errors of a call in the words of a Python program."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Final

from ..runtime.config.config_fields import setting_names
from ..runtime.errors import RequestError

_FLAG: Final = re.compile(r"(?<![\w-])--([a-z][a-z0-9-]*)")


@contextlib.contextmanager
def own_names() -> Iterator[None]:
    """Names settings as arguments of `LLM`, `max_model_len`, in errors that a server's checks raise for its flags."""
    try:
        yield
    except RequestError as error:
        error.message = _FLAG.sub(lambda flag: _argument(flag[1], flag[0]), error.message)
        error.args = (error.message,)
        raise


def _argument(name: str, flag: str) -> str:
    argument = name.replace("-", "_")
    if argument.startswith("no_") and argument[3:] in setting_names():
        return f"{argument[3:]}=False"
    return argument if argument in setting_names() else flag
