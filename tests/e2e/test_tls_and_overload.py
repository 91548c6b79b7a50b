"""HTTPS, and requests that wait instead of being refused, on real servers."""

from __future__ import annotations

import json
import socket
import ssl
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from .certificate import write_tls_files
from .serving import DEADLINE_S, run_engine

pytestmark = pytest.mark.real_process


@pytest.mark.slow
def test_https_is_served_and_checked_and_plain_http_is_not(start_serve, model, tmp_path):
    tls = write_tls_files(tmp_path)
    engine = start_serve(str(model), "--dtype", "float32", *tls.flags)
    engine.wait_until_ready()
    assert engine.url.startswith("https://127.0.0.1:")
    port = int(engine.url.rpartition(":")[2])

    trusting = ssl.create_default_context(cafile=str(tls.certificate))
    with httpx.Client(base_url=engine.url, verify=trusting, timeout=DEADLINE_S) as client:
        body = {"prompt": "x", "max_tokens": 3, "ignore_eos": True}
        assert client.post("/v1/completions", json=body).json()["usage"]["completion_tokens"] == 3
        events = client.post("/v1/completions", json=body | {"stream": True}).text
        assert events.endswith("data: [DONE]\n\n")
    with pytest.raises(httpx.ConnectError, match="certificate verify failed"):
        httpx.get(f"{engine.url}/health", timeout=DEADLINE_S)
    with socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S) as plain:
        plain.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert not plain.recv(4096).startswith(b"HTTP/")

    done = run_engine(tmp_path, "top", engine.url, "--once", "--json", "--cacert", str(tls.certificate))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["num_requests"] == 0
    done = run_engine(tmp_path, "top", engine.url, "--once")
    assert done.returncode == 3
    assert (
        "the certificate of https:" in done.stderr
        and "self-signed" in done.stderr
        and "Traceback" not in done.stderr
    )
    done = run_engine(tmp_path, "top", engine.url, "--once", "--cacert", str(tls.key))
    assert done.returncode != 0
    assert f"--cacert {tls.key} cannot be used" in done.stderr
    assert engine.stop() == 0, engine.log


@pytest.mark.slow
def test_under_overload_queue_all_wait_and_all_are_answered(start_serve, model):
    flags = ("--overload", "queue", "--max-queued-requests", "1", "--max-running-requests", "1")
    engine = start_serve(str(model), "--dtype", "float32", *flags).wait_until_ready()
    body = {"prompt": "x", "max_tokens": 2, "ignore_eos": True}
    with (
        httpx.Client(base_url=engine.url, timeout=DEADLINE_S) as client,
        ThreadPoolExecutor(12) as threads,
    ):
        with engine.stopped():  # nobody is answered until all are there
            waiting = [threads.submit(client.post, "/v1/completions", json=body) for _ in range(11)]
            late = threads.submit(client.post, "/v1/completions", json=body | {"queue_timeout": 0.05})
            refused = late.result(DEADLINE_S)
        answers = [each.result(DEADLINE_S) for each in waiting]
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "queue_timeout")
    assert [answer.status_code for answer in answers] == [200] * 11
    assert all(answer.json()["usage"]["completion_tokens"] == 2 for answer in answers)
    engine.idle_metrics()
    assert engine.stop() == 0, engine.log
