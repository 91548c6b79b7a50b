"""`HttpServer`: uvicorn with our `Connection` for each client."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterator
from typing import Final

import uvicorn

from ...runtime.config.server_config import ServerConfig
from .connection import Connection
from .exchange import AsgiApp
from .port import BACKLOG

_LAST_WORDS_S: Final = 2  # for clients to read their error events at shutdown


class HttpServer(uvicorn.Server):
    """uvicorn without signal handlers: the supervisor decides when to stop, and in what order."""

    def __init__(self, app: AsgiApp, config: ServerConfig) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=functools.partial(Connection, config),  # type: ignore[arg-type]  # only ever called
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                backlog=BACKLOG,
                timeout_keep_alive=config.keep_alive_timeout,  # type: ignore[arg-type]  # for loop.call_later
                timeout_graceful_shutdown=_LAST_WORDS_S,
                ssl_certfile=config.ssl_certfile,
                ssl_keyfile=config.ssl_keyfile,
            )
        )
        logging.getLogger("uvicorn.error").setLevel(logging.WARNING)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture no signals."""
        yield
