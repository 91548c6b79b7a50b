"""Servers of benchmarks end with the benchmark, whichever signal ends that."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

_SERVER = """
import http.server, os, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.do_GET()
with http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler) as server:
    server.serve_forever()
"""
_BENCHMARK = """
import signal, socket, sys
from pathlib import Path
from benchmarks.peers.server import Side, running
with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    port = probe.getsockname()[1]
with running(Side("one", (sys.executable, "-c", sys.argv[1], str(port)), port), Path(sys.argv[2])) as server:
    print(server.pid, flush=True)
    signal.pause()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_signal_that_ends_a_benchmark_ends_its_servers(tmp_path: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-c", _BENCHMARK, _SERVER, str(tmp_path / "log")]
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
    ) as benchmark:
        assert benchmark.stdout is not None
        server = int(benchmark.stdout.readline())
        try:
            os.kill(server, 0)
            benchmark.send_signal(number)

            assert benchmark.wait(30) == (128 + number if number == signal.SIGTERM else -number)
            with pytest.raises(ProcessLookupError):
                os.kill(server, 0)
        finally:
            benchmark.kill()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server, signal.SIGKILL)
