"""`MediaConfig`: a group of `EngineConfig` about images: from where they come, and how much of them is kept."""

from __future__ import annotations

import ipaddress
import os
import re
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, cast
from urllib.parse import urlsplit

import msgspec

from ..errors import ConfigError
from .setting_declaration import Alias, check_at_least, check_finite

ImageDetail = Literal["auto", "low", "high"]

_NAME: Final = re.compile(r"[a-z0-9_]([a-z0-9_.-]{0,252})")


def _mm_processor_kwargs(value: object) -> dict[str, object]:
    """vLLM's form: `{"min_pixels": 784, "max_pixels": 262144, "do_image_splitting": false}`."""
    try:
        given = msgspec.json.decode(value, type=dict[str, Any]) if isinstance(value, str) else value
    except ValueError:
        given = None
    settings: dict[str, object] = {}
    for name, each in cast("dict[str, object]", given).items() if isinstance(given, dict) else [("", None)]:
        if name in ("min_pixels", "max_pixels") and isinstance(each, int) and not isinstance(each, bool):
            settings[f"mm_{name}"] = each
        elif name == "do_image_splitting" and isinstance(each, bool):
            settings |= {"mm_detail": "high"} if each else {"mm_max_pixels": 1}  # one tile
        else:
            raise ConfigError(
                f"mm_processor_kwargs is {value!r}, but it must be an object with min_pixels, max_pixels (numbers) or "
                'do_image_splitting (true or false), such as {"max_pixels": 1048576}'
            )
    return settings


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaConfig:
    """Images of requests: from where they may come, and how much of them is kept."""

    allowed_media_domains: Annotated[
        tuple[str, ...],
        "Host from which images are fetched over http(s), HOST or HOST:PORT, several with commas; may be repeated. "
        "Without it nothing is fetched.",
    ] = ()
    allowed_local_media_path: Annotated[
        str | None,
        "Folder of images that requests may name by file: URLs; any client may then read any image below it.",
    ] = None
    mm_max_pixels: Annotated[
        int | Literal["auto"],
        "Most pixels of an image that the model sees, in all its tiles, but at least a tile; larger images are scaled "
        "down. auto: those of the model's processor, on a CPU as many as two seconds allow.",
        Alias("mm_processor_kwargs", translate=_mm_processor_kwargs, in_help=False),
    ] = "auto"
    mm_min_pixels: Annotated[
        int,
        "Least pixels of an image for models that see images of any size; smaller ones are scaled up. 0: those of the "
        "model's processor.",
    ] = 0
    mm_detail: Annotated[
        ImageDetail,
        "Detail of images whose requests state none: low is one tile, high as the model's processor does; auto: low on "
        "a CPU.",
    ] = "auto"
    mm_cache_gb: Annotated[
        float,
        "GiB of files with the pixels of images, those of running requests and of the last ones.",
        Alias("mm_processor_cache_gb"),
    ] = 1.0

    def __post_init__(self) -> None:
        check_at_least("mm_max_pixels", self.mm_max_pixels, 0)
        check_at_least("mm_min_pixels", self.mm_min_pixels, 0)
        if self.mm_max_pixels != "auto" and 0 < self.mm_max_pixels < self.mm_min_pixels:
            raise ConfigError(
                f"mm_min_pixels is {self.mm_min_pixels}, but it must be at most mm_max_pixels ({self.mm_max_pixels})"
            )
        check_finite("mm_cache_gb", self.mm_cache_gb, 0.0, open_end=True)
        folder = self.allowed_local_media_path
        if folder is not None and not os.path.isabs(folder):
            raise ConfigError(
                f"allowed_local_media_path is {folder!r}, but it must be an absolute path, as file: URLs have"
            )
        self.media_hosts()

    def media_hosts(self) -> frozenset[tuple[str, int | None]]:
        """Host and port of `allowed_media_domains`; None: the ports of http and https.

        Raises:
            ConfigError: one is no host.
        """
        entries = [entry for given in self.allowed_media_domains for entry in given.split(",")]
        return frozenset(_host_and_port(entry.strip()) for entry in entries)


def _host_and_port(entry: str) -> tuple[str, int | None]:
    host, port = "", None
    try:
        parts = urlsplit(f"//{entry}")
        host, port = parts.hostname or "", parts.port
        is_host = parts.netloc == entry and parts.username is None and port != 0
        if is_host and not _NAME.fullmatch(host):
            ipaddress.IPv6Address(host)
    except ValueError:
        is_host = False
    if not is_host:
        raise ConfigError(
            f"allowed_media_domains has {entry!r}, but it must be the exact name of a host, such as "
            "images.example.org, or images.example.org:8443 for another port than 80 and 443"
        )
    return host, port
