"""`--dataset-name custom`: prompts of the user's own, one JSON object per line, as vLLM reads them.

{"prompt": "Why is the sky blue?", "output_tokens": 64}
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ....runtime.errors import ConfigError
from ....runtime.text import decode_utf8, is_unicode
from ..records import BenchRequest
from .datasets import TextEncoder


def custom_requests(
    path: Path, num_prompts: int, tokenizer: TextEncoder, *, output_len: int
) -> list[BenchRequest]:
    """The first `num_prompts` rows, in the order of the file.

    Args:
        output_len: tokens to generate for a row without `output_tokens`.

    Raises:
        ConfigError: the file cannot be read or has no row, or a row is no prompt, with its line.
    """
    try:
        lines = decode_utf8(path.read_bytes(), f"--dataset-path {path}").split("\n")
    except OSError as error:
        raise ConfigError(f"--dataset-path {path} cannot be read: {error.strerror}") from None
    requests: list[BenchRequest] = []
    for number, line in enumerate(lines, 1):
        if len(requests) == num_prompts:
            break
        if line.strip():
            prompt, wanted = _row(line, f"{path}:{number}", output_len)
            requests.append(
                BenchRequest(prompt=prompt, prompt_len=len(tokenizer.encode(prompt)), output_len=wanted)
            )
    if not requests:
        raise ConfigError(f"--dataset-path {path} has no row; write one JSON object per line")
    return requests


def _row(line: str, place: str, output_len: int) -> tuple[str, int]:
    try:
        row: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{place}: not JSON: {error}; write one JSON object per line") from None
    prompt = row.get("prompt") if isinstance(row, dict) else None
    if not isinstance(prompt, str) or not prompt or not is_unicode(prompt):
        raise ConfigError(f'{place}: no prompt; a row is {{"prompt": "...", "output_tokens": 64}}')
    wanted = row.get("output_tokens", output_len)
    if type(wanted) is not int or wanted < 1:
        raise ConfigError(f"{place}: output_tokens is {wanted!r}, but it must be a whole number from 1")
    return prompt, wanted
