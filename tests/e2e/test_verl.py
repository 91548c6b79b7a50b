"""verl's own HTTP client of SGLang servers against the engine: rollouts, flush, abort and pause.

The client is one file of verl, run in a process of its own. Of SGLang, which it imports to start servers, it gets empty
stubs: the server is here already.
"""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from .serving import DEADLINE_S, EngineServe

CLIENT: Final = (
    Path(__file__).parents[2] / "build/verl/verl/workers/rollout/sglang_rollout/http_server_engine.py"
)
STUBBED: Final = """
import asyncio, importlib.util, json, sys, threading, types
import requests
STUBS = {
    "entrypoints.EngineBase": "EngineBase", "entrypoints.http_server": "launch_server",
    "managers.io_struct": "UpdateWeightsFromTensorReqInput", "server_args": "ServerArgs", "utils": "kill_process_tree",
}
for path, name in STUBS.items():
    module = sys.modules["sglang.srt." + path] = types.ModuleType(path)
    setattr(module, name, type(name, (), {}))
for path in ("sglang", "sglang.srt", "sglang.srt.entrypoints", "sglang.srt.managers"):
    sys.modules[path] = types.ModuleType(path)
sys.modules["sglang.srt.server_args"].ServerArgs = lambda **given: types.SimpleNamespace(node_rank=0, **given)
"""

pytestmark = [
    pytest.mark.real_process,
    pytest.mark.slow,
    pytest.mark.skipif(
        not CLIENT.is_file(), reason=f"{CLIENT} is missing: `make verl` installs verl, from the package index"
    ),
]


@pytest.fixture
def run(serve: EngineServe) -> Any:
    """Runs lines of Python with both clients, `client` and `later` (asyncio), and returns the JSON of `result`."""
    url = httpx.URL(serve.url)
    begin = f"""
spec = importlib.util.spec_from_file_location("http_server_engine", {str(CLIENT)!r})
verl = importlib.util.module_from_spec(spec)
spec.loader.exec_module(verl)
options = dict(launch_server=False, host={url.host!r}, port={url.port!r}, max_attempts=1)
client, later = verl.HttpServerAdapter(**options), verl.AsyncHttpServerAdapter(**options)
"""

    def run(lines: str) -> Any:
        done = subprocess.run(
            [sys.executable, "-c", f"{STUBBED}{begin}{textwrap.dedent(lines)}\nprint(json.dumps(result))"],
            capture_output=True,
            text=True,
            check=False,
            timeout=DEADLINE_S,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return run


def test_rollouts(run: Any) -> None:
    """Several at once with the sampling parameters of verl, then one whose answer is scored as a prompt."""
    rollouts, answer, scored = run(
        """
        asked = {"max_new_tokens": 6, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0}
        async def roll_out():
            prompts = [[5, 6, 7, 8 + n] for n in range(4)]
            return await asyncio.gather(
                *(later.async_generate(sampling_params=asked, input_ids=ids, return_logprob=True) for ids in prompts)
            )
        rollouts = asyncio.run(roll_out())
        prompt = list(range(20, 40))
        greedy = {"max_new_tokens": 8, "temperature": 0.0, "ignore_eos": True}
        answer = client.generate(
            input_ids=prompt, sampling_params=greedy, return_logprob=True, top_logprobs_num=2, token_ids_logprob=[7]
        )
        whole = prompt + answer["output_ids"]
        one = {"max_new_tokens": 1}
        scored = client.generate(
            input_ids=whole, sampling_params=one, return_logprob=True, logprob_start_len=len(prompt) - 1
        )
        result = [rollouts, answer, scored]
        """
    )
    for each in rollouts:
        tokens = [
            token_id for _, token_id, _ in each["meta_info"]["output_token_logprobs"]
        ]  # as verl reads them
        assert tokens == each["output_ids"] and 1 <= len(tokens) <= 6
    meta = answer["meta_info"]
    values = [logprob for logprob, _, _ in meta["output_token_logprobs"]]
    assert [top[0][0] for top in meta["output_top_logprobs"]] == values  # greedy: the likeliest
    assert [[entry[1] for entry in chosen] for chosen in meta["output_token_ids_logprobs"]] == [[7]] * 8
    again = [logprob for logprob, _, _ in scored["meta_info"]["input_token_logprobs"][1:]]
    assert again == pytest.approx(values, abs=1e-4)


def test_flush_and_models(run: Any, serve: EngineServe) -> None:
    flushed, flushed_later, models = run(
        """
        async def ask():
            return [await later.flush_cache(), await later.available_models()]
        result = [client.flush_cache(), *asyncio.run(ask())]
        """
    )
    assert flushed["success"] and flushed_later["success"]
    assert models["data"][0]["id"] == serve.model


def test_a_pause_and_an_abort_within_it(run: Any) -> None:
    """The client has no method for pauses, as the trainer calls them in SGLang's process; its requests go there."""
    expected, continued, num_aborted, aborted = run(
        """
        greedy = {"max_new_tokens": 100, "temperature": 0.0, "ignore_eos": True}
        answers = []
        def generate():
            answers.append(client.generate(input_ids=list(range(20, 40)), sampling_params=greedy))
        generate()
        def while_paused(deed):
            client._make_request("pause_generation", {"mode": "retract"})
            thread = threading.Thread(target=generate)
            thread.start()
            while requests.get(f"http://{options['host']}:{options['port']}/v1/requests").json()["total"] == 0:
                pass
            done = deed()
            client._make_request("continue_generation")
            thread.join()
            return done
        while_paused(lambda: None)
        num_aborted = while_paused(lambda: client.abort_request(abort_all=True))["aborted"]
        result = [answers[0], answers[1], num_aborted, answers[2]]
        """
    )
    assert continued["output_ids"] == expected["output_ids"] and len(expected["output_ids"]) == 100
    assert num_aborted == 1
    assert aborted["meta_info"]["finish_reason"]["type"] == "abort" and aborted["output_ids"] == []


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        ("release_memory_occupation(['kv_cache'])", "a running server keeps its memory"),
        ("resume_memory_occupation(['weights'])", "a running server keeps its memory"),
        (
            "update_weights_from_tensor(types.SimpleNamespace("
            "serialized_named_tensors=[b'x'], load_format=None, flush_cache=True))",
            "the weights of a running server do not change",
        ),
    ],
)
def test_what_is_not_here_is_refused_by_name(run: Any, call: str, reason: str) -> None:
    status, body = run(
        f"""
        try:
            client.{call}
        except requests.HTTPError as error:
            result = [error.response.status_code, error.response.json()]
        """
    )
    assert status == 404
    assert reason in body["error"]["message"]
