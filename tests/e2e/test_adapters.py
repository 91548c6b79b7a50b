"""LoRA adapters in real processes, with peft's output as the reference: many at once, reloads, kills, broken files."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx
import openai
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine import LLM, SamplingParams
from tests.model_runner.adapters.peft_adapters import PeftAdapter, make_adapter

from .conftest import StartServe, openai_client
from .serving import DEADLINE_S, SLOW, EngineServe, run_engine

# In one process: `tests/offline/test_adapters.py` and `tests/tokenizer_manager/adapters`.
pytestmark = [pytest.mark.real_process, pytest.mark.slow]

NUM: Final = 8
NUM_TOKENS: Final = 12
WEIGHTS: Final = "adapter_model.safetensors"
PROMPT: Final = "the quick brown fox jumps over the lazy dog, and then a request waits and is answered"


@dataclass(frozen=True)
class Reference:
    """What peft computes.

    Attributes:
        root: folder of the adapters a0, a1, ...
    """

    root: Path
    tokenizer: Any
    adapters: list[PeftAdapter]

    def text(self, number: int, prompt: str = PROMPT, num_tokens: int = NUM_TOKENS) -> str:
        """The greedy continuation by an adapter."""
        tokens = self.tokenizer.encode(prompt)
        begin = len(tokens)
        for _ in range(num_tokens):
            tokens.append(int(self.adapters[number].logits(tokens)[-1].argmax()))
        return str(self.tokenizer.decode(tokens[begin:], skip_special_tokens=True))


@pytest.fixture(scope="module")
def reference(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """Eight adapters of ranks 2 to 9."""
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    root = tmp_path_factory.mktemp("adapters")
    base = AutoModelForCausalLM.from_pretrained(str(model), dtype=torch.float32)
    adapters = [make_adapter(base, root / f"a{n}", seed=n, r=n + 2, size=0.7) for n in range(NUM)]
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(model / "tokenizer.json"))
    return Reference(root, tokenizer, adapters)


def arguments(model: Path, reference: Reference, *more: str) -> tuple[str, ...]:
    """Of a server with all adapters, and two slots for them."""
    loras = [word for n in range(NUM) for word in ("--lora", f"a{n}={reference.root / f'a{n}'}")]
    return (
        *(str(model), "--dtype", "float32", "--max-loras-per-batch", "2"),
        *("--allow-runtime-lora", "--lora-root", str(reference.root), *loras, *more),
    )


@pytest.fixture(scope="module")
def server(model: Path, reference: Reference) -> Iterator[EngineServe]:
    with EngineServe(*arguments(model, reference)) as engine:
        yield engine.wait_until_ready()
        engine.idle_metrics()
        assert engine.stop() == 0, engine.log
        assert engine.leftovers() == []
        assert "Traceback" not in engine.log


@pytest.fixture(scope="module")
def client(server: EngineServe) -> Iterator[openai.OpenAI]:
    with openai_client(server) as client:
        yield client


def complete(client: openai.OpenAI, model: str, prompt: str = PROMPT) -> Any:
    return client.completions.create(
        model=model, prompt=prompt, max_tokens=NUM_TOKENS, temperature=0, extra_body={"ignore_eos": True}
    )


def load(url: str, name: str, path: str, **fields: Any) -> httpx.Response:
    body = {"lora_name": name, "lora_path": path, **fields}
    return httpx.post(f"{url}/v1/load_lora_adapter", json=body, timeout=DEADLINE_S)


def unload(url: str, name: str, **fields: Any) -> httpx.Response:
    body = {"lora_name": name, **fields}
    return httpx.post(f"{url}/v1/unload_lora_adapter", json=body, timeout=DEADLINE_S)


def names(url: str) -> list[str]:
    _, *adapters = httpx.get(f"{url}/v1/models", timeout=DEADLINE_S).json()["data"]
    return [adapter["id"] for adapter in adapters]


# ---------------------------------------------------------------- right texts


def test_eight_adapters_and_the_base_at_once_are_each_what_peft_computes(
    client: openai.OpenAI, reference: Reference, server: EngineServe
):
    with ThreadPoolExecutor(18) as threads:
        jobs = [(n, threads.submit(complete, client, f"a{n}")) for n in range(NUM) for _ in range(2)]
        base = threads.submit(complete, client, server.model)
        answers = [(n, job.result()) for n, job in jobs]

    texts = [reference.text(n) for n in range(NUM)]
    assert len(set(texts)) == NUM  # else this test would see no mistake
    assert [answer.choices[0].text for _, answer in answers] == [texts[n] for n, _ in answers]
    assert [answer.model for _, answer in answers] == [f"a{n}" for n, _ in answers]
    assert base.result().choices[0].text not in texts
    assert base.result().model == server.model


def test_names_in_the_list_and_in_langchain(client: openai.OpenAI, reference: Reference, server: EngineServe):
    from langchain_openai import OpenAI
    from pydantic import SecretStr

    assert [each.id for each in client.models.list()] == [server.model, *(f"a{n}" for n in range(NUM))]
    llm = OpenAI(
        model="a3",
        base_url=f"{server.url}/v1",
        api_key=SecretStr("unused"),
        temperature=0,
        max_tokens=NUM_TOKENS,
        extra_body={"ignore_eos": True},
        max_retries=0,
    )
    assert llm.invoke(PROMPT) == reference.text(3)


def test_generate_with_one_adapter_for_each_prompt(server: EngineServe, reference: Reference):
    sampling = {"temperature": 0, "max_new_tokens": NUM_TOKENS, "ignore_eos": True}
    body = {"text": [PROMPT] * 3, "lora_path": ["a5", "a6", "a5"], "sampling_params": sampling}
    answers = httpx.post(f"{server.url}/generate", json=body, timeout=DEADLINE_S).json()
    assert [answer["text"] for answer in answers] == [reference.text(n) for n in (5, 6, 5)]


def test_an_llm_computes_the_same(model: Path, reference: Reference):
    lora = [f"a{n}={reference.root / f'a{n}'}" for n in range(3)]
    sampling = SamplingParams(temperature=0, max_new_tokens=NUM_TOKENS, ignore_eos=True)
    with LLM(str(model), dtype="float32", num_threads=1, show_progress=False, lora=lora) as llm:
        for n in range(3):
            assert llm.generate(PROMPT, sampling, lora=f"a{n}").text == reference.text(n)


# ---------------------------------------------------------------- loads and unloads


def test_a_name_with_other_weights_shares_nothing_with_the_old_ones(
    client: openai.OpenAI, reference: Reference, server: EngineServe
):
    prompt = f"once more: {PROMPT}"
    for number in (0, 1, 2):
        assert load(server.url, "v", f"a{number}", load_inplace=True).status_code == 200
        answer = complete(client, "v", prompt)
        assert answer.choices[0].text == reference.text(number, prompt)
        assert answer.usage.prompt_tokens_details.cached_tokens == 0
    assert load(server.url, "v", "a0", load_inplace=True).status_code == 200
    answer = complete(client, "v", prompt)
    assert answer.choices[0].text == reference.text(0, prompt)
    assert answer.usage.prompt_tokens_details.cached_tokens > 0  # equal weights: the same pages
    assert unload(server.url, "v").status_code == 200
    with pytest.raises(openai.NotFoundError, match='"v" is not served here'):
        complete(client, "v")


def test_changed_files_under_one_name_and_path(
    client: openai.OpenAI, reference: Reference, server: EngineServe
):
    folder = reference.root / "changing"
    shutil.copytree(reference.root / "a4", folder)
    assert load(server.url, "changing", "changing").status_code == 200
    before = complete(client, "changing", f"{PROMPT} x")
    tensors = load_file(folder / WEIGHTS)
    save_file({name: tensor * 1.5 for name, tensor in tensors.items()}, folder / WEIGHTS)

    assert load(server.url, "changing", "changing", load_inplace=True).status_code == 200

    after = complete(client, "changing", f"{PROMPT} x")
    assert after.usage.prompt_tokens_details.cached_tokens == 0
    assert after.choices[0].text != before.choices[0].text
    assert complete(client, "changing", f"{PROMPT} x").usage.prompt_tokens_details.cached_tokens > 0
    assert unload(server.url, "changing").status_code == 200


@pytest.mark.parametrize("kind", ["truncated", "nan", "swapped", "absurd", "link", "name", "outside", "rank"])
def test_a_broken_adapter_fails_alone(
    client: openai.OpenAI, reference: Reference, server: EngineServe, tmp_path: Path, kind: str
):
    folder = reference.root / f"bad-{kind}"
    if kind == "link":
        shutil.copytree(reference.root / "a1", tmp_path / "elsewhere")
        folder.symlink_to(tmp_path / "elsewhere")
    else:
        shutil.copytree(reference.root / "a1", folder)
    file = folder / WEIGHTS
    name, path = ("a/b" if kind == "name" else "bad"), folder.name
    match kind:
        case "truncated":
            file.write_bytes(file.read_bytes()[:-100])
        case "absurd":
            file.write_bytes((2**60).to_bytes(8, "little") + file.read_bytes()[8:])
        case "nan":
            tensors = load_file(file)
            tensors[min(tensors)][0, 0] = float("nan")
            save_file(tensors, file)
        case "swapped":
            tensors = load_file(file)
            other = {"lora_A": "lora_B", "lora_B": "lora_A"}
            save_file(
                {
                    key.replace(part, other[part]): t
                    for key, t in tensors.items()
                    for part in other
                    if part in key
                },
                file,
            )
        case "outside":
            path = "../" * 20 + "etc/passwd"
        case "rank":
            shutil.rmtree(folder)
            make_adapter(reference.adapters[0].reference.get_base_model(), folder, r=100)

    answer = load(server.url, name, path)

    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == ("lora_name" if kind == "name" else "lora_path")
    assert "\n" not in error["message"]
    assert names(server.url) == [f"a{n}" for n in range(NUM)]
    assert complete(client, "a1").choices[0].text == reference.text(1)


def test_an_unload_in_the_middle_of_sixteen_answers(
    start_serve: StartServe, model: Path, reference: Reference
):
    engine = start_serve(*arguments(model, reference, *SLOW)).wait_until_ready()
    folder = reference.root / "own"  # weights without another name, whose requests would go on
    shutil.copytree(reference.root / "a0", folder)
    save_file({name: tensor * 0.5 for name, tensor in load_file(folder / WEIGHTS).items()}, folder / WEIGHTS)
    assert load(engine.url, "v", "own").status_code == 200
    body = {"model": "v", "prompt": PROMPT, "n": 16, "max_tokens": 1000, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{engine.url}/v1/completions", json=body, timeout=DEADLINE_S) as stream:
        lines = stream.iter_lines()
        next(lines)
        refused = unload(engine.url, "v", timeout=0.01)
        assert refused.status_code == 409
        assert refused.json()["error"]["message"].startswith("16 requests still use the adapter 'v'")
        assert "v" in names(engine.url)
        assert unload(engine.url, "v", force=True).status_code == 200
        *_, kind, data = [line for line in lines if line]
    assert kind == "event: error"
    assert json.loads(data.removeprefix("data: "))["error"]["message"] == "the adapter v was unloaded"
    assert "v" not in names(engine.url)
    with openai_client(engine) as client:
        assert complete(client, "a2").choices[0].text == reference.text(2)
        assert load(engine.url, "v", "a0").status_code == 200
        assert complete(client, "v").choices[0].text == reference.text(0)
    engine.idle_metrics()
    assert engine.stop() == 0, engine.log


# ---------------------------------------------------------------- lost processes


def test_streams_of_three_adapters_survive_a_killed_scheduler(
    start_serve: StartServe, model: Path, reference: Reference
):
    engine = start_serve(
        *arguments(model, reference, *SLOW, "--max-running-requests", "8")
    ).wait_until_ready()
    assert load(engine.url, "hot", "a2").status_code == 200
    served = {"a0": 0, "a1": 1, "hot": 2}
    num_tokens = 40

    def stream(name: str) -> str:
        body = {
            "model": name,
            "prompt": PROMPT,
            "max_tokens": num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        text = ""
        with httpx.stream("POST", f"{engine.url}/v1/completions", json=body, timeout=DEADLINE_S) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    document = json.loads(line.removeprefix("data: "))
                    assert "error" not in document, document
                    text += document["choices"][0]["text"]
        return text

    with ThreadPoolExecutor(3) as threads:
        jobs = {name: threads.submit(stream, name) for name in served}
        engine.metrics_when(lambda metrics: metrics["num_running_reqs"] >= 2)
        os.kill(engine.pids["scheduler"], signal.SIGKILL)
        texts = {name: job.result() for name, job in jobs.items()}

    engine.wait_for_log("recovered restart=1")
    metrics = engine.idle_metrics()
    assert (metrics["num_adapters"], metrics["num_adapter_slots_used"]) == (NUM, 0)  # a2 has two names
    assert texts == {name: reference.text(n, num_tokens=num_tokens) for name, n in served.items()}
    engine.idle_metrics()
    assert engine.stop() == 0, engine.log
    assert engine.leftovers() == []


def test_a_killed_tokenizer_manager_comes_back_with_all_names(
    start_serve: StartServe, model: Path, reference: Reference
):
    engine = start_serve(*arguments(model, reference)).wait_until_ready()
    assert load(engine.url, "hot", "a2", pinned=True).status_code == 200
    assert unload(engine.url, "a7", force=True).status_code == 200
    known = names(engine.url)
    os.kill(engine.pids["tokenizer_manager"], signal.SIGKILL)
    engine.wait_for_log("recovered restart=1")

    assert names(engine.url) == known
    with openai_client(engine) as client:
        assert complete(client, "hot").choices[0].text == reference.text(2)
        assert load(engine.url, "again", "a7").status_code == 200
        assert complete(client, "again").choices[0].text == reference.text(7)
        os.kill(engine.pids["scheduler"], signal.SIGKILL)
        engine.wait_for_log("recovered restart=2")
        assert complete(client, "again").choices[0].text == reference.text(7)
        assert complete(client, "hot").choices[0].text == reference.text(2)
    assert names(engine.url) == [*known, "again"]
    assert engine.stop() == 0, engine.log


# ---------------------------------------------------------------- decisions


def test_decisions_about_adapters_are_explained_and_replayed(
    start_serve: StartServe, model: Path, reference: Reference, tmp_path: Path
):
    log = tmp_path / "decisions.edl"
    engine = start_serve(*arguments(model, reference, "--decision-log", str(log))).wait_until_ready()
    with openai_client(engine) as client, ThreadPoolExecutor(16) as threads:
        answers = list(threads.map(lambda n: complete(client, f"a{n % NUM}"), range(24)))
        assert load(engine.url, "v", "a0").status_code == 200
        complete(client, "v")
        assert unload(engine.url, "v").status_code == 200
        whys = (
            run_engine(tmp_path, "why", answer.id, "--url", engine.url).stdout for answer in answers[:NUM]
        )
        assert any("adapter" in why for why in whys)
    assert engine.stop() == 0, engine.log
    done = run_engine(tmp_path, "replay", str(log))
    assert (done.returncode, done.stderr) == (0, "")
    assert "equal (100 %)" in done.stdout
