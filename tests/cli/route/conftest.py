"""`StandIn`: what a router asks of a worker, as the test scripts it."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest


class StandIn:
    """Answers each path with a status and a JSON body.

    Attributes:
        replies: path -> status and body; other paths are a 404.
        not_ready: how often `/health` still answers 503.
        keys: the Authorization headers that came.
    """

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.replies: dict[str, tuple[int, Any]] = {"/health": (200, {"status": "ok"})}
        self.not_ready = 0
        self.keys: list[str | None] = []

    def serves(
        self, model: str = "m", *, mode: str = "null", length: int = 64, tokenizer: str = ""
    ) -> StandIn:
        """It serves this model."""
        self.replies["/v1/models"] = 200, {"data": [{"id": model, "max_model_len": length}]}
        self.replies["/model_info"] = 200, {"tokenizer_path": tokenizer}
        self.replies["/server_info"] = 200, {"disaggregation_mode": mode}
        return self

    def answer(self, path: str) -> tuple[int, Any]:
        """The answer to a GET."""
        if path == "/health" and self.not_ready:
            self.not_ready -= 1
            return 503, {"error": {"message": "the model is being loaded"}}
        return self.replies.get(path, (404, {}))


MakeWorker = Callable[[], StandIn]


@pytest.fixture
def make_worker() -> Iterator[MakeWorker]:
    """Starts workers that serve the model m."""
    with ExitStack() as stack:

        def make() -> StandIn:
            class Handler(http.server.BaseHTTPRequestHandler):
                def do_GET(self) -> None:
                    worker.keys.append(self.headers.get("authorization"))
                    status, body = worker.answer(self.path)
                    data = json.dumps(body).encode()
                    self.send_response(status)
                    self.send_header("content-length", str(len(data)))
                    self.end_headers()
                    self.wfile.write(data)

                def log_message(self, *_args: object) -> None:
                    return

            server = stack.enter_context(http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler))
            worker = StandIn(server.server_port).serves()
            threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
            stack.callback(server.shutdown)
            return worker

        yield make
