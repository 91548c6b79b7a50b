"""Models by their hub name, through huggingface_hub, which is imported only if a hub name is used.

Only files that the engine reads are downloaded: configuration, tokenizer and safetensors in the repository's top
folder. Models in the hub's cache work offline.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from ..errors import ConfigError

_TIMEOUT_S: Final = 10.0
_PICKLES: Final = (".bin", ".pt", ".pth")


def fetch_from_hub(name: str, revision: str | None = None) -> Path:
    """The local folder with the files of `name` ("org/name"), downloaded if they are not in the hub's cache.

    Raises:
        ConfigError: no such model, no access, no connection and not in the cache, or no supported file format.
    """
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    try:
        info = HfApi().model_info(name, revision=revision, timeout=_TIMEOUT_S)
    except GatedRepoError as error:
        raise ConfigError(
            f"{name}: access must be granted; accept the terms on the model's page and run `hf auth login`"
        ) from error
    except RepositoryNotFoundError as error:
        raise ConfigError(
            f"{name}: neither a local folder or .gguf file nor a model on the hub "
            "(or it is private: run `hf auth login`)"
        ) from error
    except RevisionNotFoundError as error:
        raise ConfigError(f"{name}: there is no revision {revision!r}") from error
    except Exception as error:  # the library's HTTP client differs by version, and so do its exceptions
        return _from_cache(name, revision, error)
    files = wanted_files(name, [sibling.rfilename for sibling in info.siblings or ()])
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=files))
    except Exception as error:
        raise ConfigError(f"{name}: the download failed: {_line(error)}; start again to resume it") from error


def cached_from_hub(name: str) -> Path | None:
    """The folder that an earlier start downloaded; None if it is not in the hub's cache. Uses no network."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, local_files_only=True))
    except Exception as missing:  # see `_from_cache`
        partial = getattr(missing, "snapshot_path", None)
        return Path(partial) if partial else None


def wanted_files(name: str, files: Sequence[str]) -> list[str]:
    """The files of a repository to download.

    Raises:
        ConfigError: there are none that the engine can read.
    """
    top = [file for file in files if "/" not in file]
    weights = [file for file in top if file.endswith(".safetensors")]
    if "config.json" in top and weights:
        # Some repositories hold the same weights twice, as model*.safetensors and in another layout.
        named_model = [file for file in weights if file.startswith("model")]
        return [f for f in top if f.endswith((".json", ".jinja"))] + (named_model or weights)
    ggufs = [file for file in files if file.endswith(".gguf")]
    if ggufs:
        raise ConfigError(
            f"{name}: has GGUF files only; download one (for example `hf download {name} {ggufs[0]}`) "
            "and pass its path"
        )
    if any(file.endswith(_PICKLES) for file in top):
        raise ConfigError(f"{name}: {PICKLE_REASON}")
    raise ConfigError(
        f"{name}: has no config.json with .safetensors weights, it is not a model the engine reads"
    )


PICKLE_REASON: Final = (
    "has only pickled weights (.bin, .pt), which are refused because loading them runs code from the file; "
    "use a version in safetensors"
)


def _from_cache(name: str, revision: str | None, error: Exception) -> Path:
    """Use an earlier download, if the hub cannot be reached."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, revision=revision, local_files_only=True))
    except Exception as missing:
        # Newer versions of the library call a snapshot incomplete if files are missing that were never requested. The
        # files that the engine needs are checked later, as in any folder.
        if partial := getattr(missing, "snapshot_path", None):
            return Path(partial)
        raise ConfigError(
            f"{name}: the hub cannot be reached ({_line(error)}) and the model is not in its cache; "
            "check the network, or pass a local folder or .gguf file"
        ) from error


def _line(error: Exception) -> str:
    """The error's first line, or its type if it has no text."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
