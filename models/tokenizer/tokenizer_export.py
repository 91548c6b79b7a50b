"""`TokenizerExport`: a folder with a GGUF model's tokenizer, for programs that read tokenizer.json.

Routers that look at prompts load the tokenizer of their workers from a local folder, and ask a model hub for any other
path. The folder is in the cache folder, named by its content, and appears whole.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ...runtime.installation import cache_dir

if TYPE_CHECKING:
    from ..source import ModelSource
    from .tokenizer import Tokenizer

FOLDER: Final = "tokenizers"
_HASH_CHARS: Final = 16


class TokenizerExport:
    """The folder of one model's tokenizer, written when it is first asked for."""

    def __init__(self, source: ModelSource, tokenizer: Tokenizer) -> None:
        """Write nothing yet.

        Args:
            source: the model's files.
            tokenizer: of the model.
        """
        self._source = source
        self._tokenizer = tokenizer
        self._folder: Path | None = None

    def folder(self) -> Path:
        """The model's own folder if it has one, else one in the cache folder; the first call takes up to a second.

        Raises:
            OSError: the folder cannot be written.
            ConfigError: there is no place for a cache folder.
        """
        if self._folder is None:
            own = Path(self._source.path)
            self._folder = own if self._source.kind == "hf" else _write(self._tokenizer)
        return self._folder


def _write(tokenizer: Tokenizer) -> Path:
    text = tokenizer.to_json()
    config = json.dumps({**tokenizer.special_tokens, "chat_template": tokenizer.chat_template}, indent=1)
    digest = hashlib.sha256(f"{text}\n{config}".encode()).hexdigest()[:_HASH_CHARS]
    folder = cache_dir() / FOLDER / digest
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f"{digest}."))
        try:
            (partial / "tokenizer.json").write_text(text, encoding="utf-8")
            (partial / "tokenizer_config.json").write_text(config, encoding="utf-8")
            partial.chmod(0o755)
            os.rename(partial, folder)
        except OSError:
            if not folder.exists():  # else another server was faster
                raise
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return folder
