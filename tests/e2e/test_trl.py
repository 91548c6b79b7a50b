"""TRL's own client of vLLM servers against the engine: token ids in, token ids and log-probabilities out.

The client runs in a process of its own. It refuses to be made unless vLLM is installed, of which it needs nothing but
to send weights, so the test says that it is.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from .model import MAX_MODEL_LEN
from .serving import DEADLINE_S, EngineServe

INSTALLED: Final = Path(__file__).parents[2] / "build" / "trl"
ASYNC_FOLDER: Final = INSTALLED / "trl" / "experimental" / "async_grpo"

pytestmark = [
    pytest.mark.real_process,
    pytest.mark.slow,
    pytest.mark.skipif(
        not (INSTALLED / "trl").is_dir() or importlib.util.find_spec("transformers") is None,
        reason=f"TRL is not installed in {INSTALLED}: `make trl` installs it, from the package index",
    ),
]


@pytest.fixture
def run(serve: EngineServe) -> Any:
    """Runs lines of Python with `client`, and returns the JSON of `result`."""

    def run(lines: str) -> Any:
        script = (
            "import json\nfrom trl.generation import vllm_client\nvllm_client.is_vllm_available = lambda: True\n"
            f"client = vllm_client.VLLMClient({serve.url!r})\n{textwrap.dedent(lines)}\nprint(json.dumps(result))"
        )
        done = subprocess.run(
            [sys.executable, "-c", script],
            env=os.environ | {"PYTHONPATH": str(INSTALLED)},
            capture_output=True,
            text=True,
            check=False,
            timeout=DEADLINE_S,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return run


def test_tokens_in_and_out(run: Any, serve: EngineServe) -> None:
    found = run("result = client.generate([[5, 6, 7, 8], [9, 10]], n=2, max_tokens=6, logprobs=2, top_k=0)")
    assert found["prompt_ids"] == [[5, 6, 7, 8], [9, 10]]
    assert [len(ids) for ids in found["completion_ids"]] == [len(each) for each in found["logprobs"]]
    for ids, listed, values in zip(
        found["completion_ids"], found["logprob_token_ids"], found["logprobs"], strict=True
    ):
        for token_id, names, logprobs in zip(ids, listed, values, strict=True):
            assert token_id in names and len(names) in (2, 3)  # the likeliest two, and the token itself
            assert logprobs == sorted(logprobs, reverse=True)


def test_a_sampled_answer_has_the_logprobs_of_a_prompt(run: Any) -> None:
    """The answer of one request, sent as a prompt: the log-probability of each of its tokens is the same."""
    found = run(
        """
        prompt = list(range(20, 40))
        answer = client.generate([prompt], max_tokens=8, logprobs=0, generation_kwargs={"ignore_eos": True})
        whole = prompt + answer["completion_ids"][0]
        client.reset_prefix_cache()
        scored = client.get_sequence_logprobs([whole], [len(prompt)], top_logprobs=20)
        result = [answer["logprobs"][0], scored["actual_logprobs"][0], scored["logprobs"][0]]
        """
    )
    answered, scored, likeliest = found
    assert len(answered) == len(scored) == len(likeliest) == 8
    for [value], [again], top in zip(answered, scored, likeliest, strict=True):
        assert top == sorted(top, reverse=True) and len(top) == 20
        if again != float("-inf"):  # among the twenty likeliest
            assert again == pytest.approx(value, abs=1e-4)


def test_chats(run: Any, serve: EngineServe) -> None:
    found = run(
        """
        chats = [[{"role": "user", "content": "one two"}], [{"role": "user", "content": "three"}]]
        result = client.chat(chats, n=2, max_tokens=5)
        """
    )
    assert len(found["prompt_ids"]) == 2 and len(found["completion_ids"]) == 4
    rendered = httpx.post(
        f"{serve.url}/v1/chat/completions/render",
        json={"messages": [{"role": "user", "content": "three"}]},
        timeout=DEADLINE_S,
    ).json()
    assert found["prompt_ids"][1] == rendered["token_ids"]


def test_what_a_trainer_asks_first(run: Any) -> None:
    info, size = run("result = [client.get_server_info(), client.get_world_size()]")
    assert size == 1
    assert info["weight_transfer_config"] is None and info["lora_config"] is None
    assert info["model_config"]["dtype"] == "torch.float32"


def test_a_trainer_pauses_a_running_answer(run: Any, serve: EngineServe) -> None:
    """The client of asynchronous training: nothing is generated in the pause, and the answer is whole after it."""
    found = run(
        f"""
        import sys, threading, types
        import requests
        package = sys.modules["trl.experimental.async_grpo"] = types.ModuleType("trl.experimental.async_grpo")
        package.__path__ = [{str(ASYNC_FOLDER)!r}]  # its own __init__ imports what only training needs
        from trl.experimental.async_grpo.vllm_client import VLLMClient
        trainer = VLLMClient({serve.url!r})
        prompt, greedy = [list(range(20, 40))], {{"ignore_eos": True}}
        expected = client.generate(prompt, max_tokens=200, temperature=0, generation_kwargs=greedy)
        answers = []
        def generate():
            answers.append(client.generate(prompt, max_tokens=200, temperature=0, generation_kwargs=greedy))
        trainer.pause()
        thread = threading.Thread(target=generate)
        thread.start()
        state = requests.get({serve.url!r} + "/is_paused").json(), requests.get({serve.url!r} + "/health").json()
        while requests.get({serve.url!r} + "/v1/requests").json()["total"] == 0:
            pass
        waits = thread.is_alive() and not answers
        trainer.resume()
        thread.join()
        same = answers[0]["completion_ids"] == expected["completion_ids"]
        result = [state, waits, same, trainer.get_dtype(), trainer.get_max_model_len(), trainer.get_world_size()]
        """
    )
    state, waits, same, dtype, max_model_len, world_size = found
    assert state == [{"is_paused": True}, {"status": "paused"}]
    assert waits and same
    assert (dtype, max_model_len, world_size) == ("torch.float32", MAX_MODEL_LEN, 1)
