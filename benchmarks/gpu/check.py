"""Checks the engine on this GPU: kernels against float32, graphs against eager, overlap against plain, HTTP, memory.

    python3 benchmarks/gpu/path.py benchmarks.gpu.check [--only models,graphs] [--json check.json]

Under eight minutes on one Hopper GPU without network. `make gpu-check` is the same. With `--device cpu --tiny` it tests
itself. The docstring of each section states what it checks.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from typing import Final

import torch

from benchmarks.gpu.kernel_checks import gpu_tests, kernels, sgl_kernel
from benchmarks.gpu.model_checks import (
    Answer,
    chaos,
    differs,
    generate,
    graphs,
    make_llm,
    models,
    overlap,
    prompts_of,
)
from benchmarks.gpu.models import write_tiny_model
from benchmarks.gpu.sections import Report, Section, flags_of, run_sections, settings_that_passed

BUDGET_S: Final = 470.0


def out_of_memory(report: Report) -> None:
    """With all other device memory taken, all requests are answered, and later ones too."""
    with tempfile.TemporaryDirectory() as name:
        write_tiny_model(Path(name), "llama", "bfloat16")
        with make_llm(Path(name), report, dtype="bfloat16", max_total_tokens=8192) as llm:
            prompts = prompts_of([400] * 24)
            expected = [output.token_ids for output in generate(llm, prompts, num=8)]
            llm.flush_cache()
            hog = _take_all_memory()
            report.note(f"took {sum(part.nbytes for part in hog) / (1 << 20):.0f} MiB")
            crowded = [output.token_ids for output in generate(llm, prompts, num=8)]
            hog.clear()
            torch.cuda.empty_cache()
            llm.flush_cache()
            after = [output.token_ids for output in generate(llm, prompts, num=8)]
    equal = sum(a == b for a, b in zip(expected, crowded, strict=True))
    report.note(f"{equal} of {len(prompts)} requests have the same tokens as with enough memory")
    assert [len(tokens) for tokens in crowded] == [8] * len(prompts)
    assert [len(tokens) for tokens in after] == [8] * len(prompts)


def _take_all_memory() -> list[torch.Tensor]:
    """Allocate all free device memory, in blocks down to 2 MiB."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    hog, size = [], torch.cuda.mem_get_info()[0]
    while size >= 2 << 20:
        try:
            hog.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
        except torch.OutOfMemoryError:
            size //= 2
    return hog


def http(report: Report) -> None:
    """`engine serve`: concurrent clients get the answers of a single one, streams too; SIGTERM ends it with code 0."""
    with tempfile.TemporaryDirectory() as name:
        write_tiny_model(Path(name), "llama", "float32")
        command = [sys.executable, "-P", "-m", "engine", "serve", name, "--device", report.device]
        # In bfloat16 every twelfth token of a random model is a near tie, which the rounding of a batch would decide.
        command += ["--dtype", "float32", *flags_of(settings_that_passed())]
        command += ["--port", "0", "--max-model-len", "512", "--max-total-tokens", "16384"]
        with open(Path(name) / "log", "w+") as log:
            server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
            try:
                url = _wait_until_ready(server)
                _ask_server(report, url)
                server.send_signal(signal.SIGTERM)
                code = server.wait(60)
                assert code == 0, f"exit code {code}"
            except BaseException:
                log.seek(0)
                print(log.read()[-6000:])
                raise
            finally:
                server.kill()
                server.wait()


def _wait_until_ready(server: subprocess.Popen[str]) -> str:
    assert server.stdout is not None
    for line in server.stdout:
        print(line, end="")
        if line.startswith("Ready after"):
            url = line.split(" at ")[1].strip()
            # Read the later output, so that it does not fill the pipe.
            threading.Thread(target=server.stdout.read, daemon=True).start()
            return url
    raise AssertionError(f"it ended with {server.wait()} before it was ready")


def _ask_server(report: Report, url: str) -> None:
    started_s = time.perf_counter()
    prompts = prompts_of([5, 40, 200, 90] * (2 if report.tiny else 12))
    answers: list[Answer | None] = [None] * len(prompts)

    def ask(n: int) -> None:
        answers[n] = _complete(url, prompts[n], stream=n % 2 == 1)

    clients = [threading.Thread(target=ask, args=(n,)) for n in range(len(prompts))]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    flush = urllib.request.Request(
        f"{url}/flush_cache", b""
    )  # otherwise the keys would come from the concurrent run
    with urllib.request.urlopen(flush, timeout=30):
        pass
    differing = []
    for n, prompt in enumerate(prompts):
        alone, crowded = _complete(url, prompt), answers[n]
        assert crowded is not None, f"client {n} has no answer"
        if differs(alone, crowded):
            differing.append(f"client {n}: {crowded.tokens} is not {alone.tokens}")
    assert not differing, f"{len(differing)} of {len(prompts)} answers differ, first of {differing[0]}"
    report.note(f"{2 * len(prompts)} answers in {time.perf_counter() - started_s:.1f} s")


def _complete(url: str, prompt: list[int], *, stream: bool = False) -> Answer:
    """The answer as token ids, which only `/generate` returns: most tokens of a tiny model have no text."""
    params = {"max_new_tokens": 16, "temperature": 0, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": params, "return_logprob": True, "top_logprobs_num": 5}
    body |= {"stream": True, "incremental": True} if stream else {}
    request = urllib.request.Request(
        f"{url}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        if stream:
            events = [line[6:] for line in answer.read().decode().splitlines() if line.startswith("data: ")]
            assert events.pop() == "[DONE]", events
            chunks = [json.loads(event) for event in events]
        else:
            chunks = [json.load(answer)]
    tops = []
    for meta in (chunk["meta_info"] for chunk in chunks if chunk["output_ids"]):  # a last chunk may have none
        rows = zip(meta["output_token_logprobs"], meta["output_top_logprobs"], strict=True)
        tops += [{token: logprob for logprob, token, _ in (own, *top)} for own, top in rows]
    found = Answer(
        [token for chunk in chunks for token in chunk["output_ids"]],
        tops,
        "".join(chunk["text"] for chunk in chunks),
    )
    assert len(found.tokens) == len(tops) == params["max_new_tokens"], found
    return found


SECTIONS: Final = (  # most important first, because a run may be cut off
    Section("sgl_kernel", sgl_kernel, 60, needs_cuda=True),
    Section("models", models, 150),
    Section("graphs", graphs, 90, needs_cuda=True),
    Section("overlap", overlap, 60),
    Section("http", http, 90),
    Section("out_of_memory", out_of_memory, 60, needs_cuda=True),
    Section("kernels", kernels, 150),
    Section("gpu_tests", gpu_tests, 120, needs_cuda=True),
    Section("chaos", chaos, 60),
)

if __name__ == "__main__":
    run_sections("benchmarks.gpu.check", "Checks the engine on this GPU", SECTIONS, BUDGET_S)
