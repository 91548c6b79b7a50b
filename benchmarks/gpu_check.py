"""Is the engine right on this GPU? Kernels against float32, graphs against eager, overlap against plain, HTTP, memory.

    python3 benchmarks/gpu_path.py benchmarks.gpu_check [--only models,graphs] [--json check.json]

Under eight minutes on one Hopper GPU without network. `make gpu-check` is the same. With `--device cpu --tiny` it tests
itself. What each section has to show stands in its docstring.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from benchmarks.gpu_models import ARCHITECTURES, TINY_VOCAB, write_tiny_model
from benchmarks.gpu_sections import LoggedMessages, Report, Section, run_sections

if TYPE_CHECKING:
    from engine import LLM
    from engine.offline.outputs import GenerationOutput

BUDGET_S: Final = 470.0
ROOT: Final = Path(__file__).resolve().parent.parent
KERNEL_TESTS: Final = (
    "tests/model_runner/kernels",
    "tests/model_runner/attention",
    "tests/model_runner/weights",
    "tests/model_runner/test_sampler.py",
)
"""They compare with float32 over random shapes, and run on the GPU where there is one."""
TEST_PACKAGES: Final = ("pytest", "pytest_timeout", "xdist", "hypothesis")
TIE: Final = 0.25
"""Nats: bfloat16 moves log-probabilities of these models by 0.04 on average, so it may choose within this."""
EIGHT_BITS: Final = 0.4
"""Nats, mean: on the CPU keys and values of 8 bits cost 0.15, weights 0.22; a wrong scale costs several."""


# ---------------------------------------------------------------- kernels


def sgl_kernel(report: Report) -> None:
    """The kernel package loads, and FA3 attends over pages as float32 does: decode and prefill behind a prefix."""
    report.note(
        f"torch {torch.__version__}, {torch.cuda.get_device_name()}, {torch.cuda.get_device_capability()}"
    )
    try:
        from sgl_kernel.flash_attn import flash_attn_with_kvcache
    except (ImportError, OSError) as error:
        report.skip(f"sgl_kernel cannot be imported ({error}); Triton serves instead: make gpu-bundle")
    generator = torch.Generator("cuda").manual_seed(0)
    for name, head_dim, heads, kv_heads, page_size, prefixes, lengths in (
        ("decode", 128, 32, 8, 16, (700, 5, 99), (1, 1, 1)),
        ("decode, three heads to one", 64, 9, 3, 16, (130, 17), (1, 1)),
        ("prefill", 128, 16, 8, 16, (0, 0), (200, 33)),
        ("prefill behind a prefix", 128, 16, 8, 64, (128, 70), (40, 1)),
        ("head dim 256", 256, 4, 1, 16, (60,), (30,)),
    ):
        with report.part(f"FA3 {name}"):
            q, k, v, table = _paged(head_dim, heads, kv_heads, page_size, prefixes, lengths, generator)
            starts = torch.tensor([0, *lengths], device="cuda", dtype=torch.int32).cumsum(
                0, dtype=torch.int32
            )
            totals = torch.tensor([sum(pair) for pair in zip(prefixes, lengths, strict=True)])
            out = flash_attn_with_kvcache(
                q=q,
                k_cache=k,
                v_cache=v,
                cache_seqlens=totals.to("cuda", torch.int32),
                page_table=table,
                cu_seqlens_q=starts,
                max_seqlen_q=max(lengths),
                softmax_scale=head_dim**-0.5,
                causal=True,
            )
            expected = _attention(q, k, v, table, prefixes, lengths)
            torch.testing.assert_close(out.float(), expected, atol=2e-2, rtol=2e-2)


def _paged(
    head_dim: int,
    heads: int,
    kv_heads: int,
    page_size: int,
    prefixes: Sequence[int],
    lengths: Sequence[int],
    generator: torch.Generator,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random q [T, heads, D], pages of k and v [pages, page_size, kv_heads, D], and who has which: [B, max pages]."""
    most = -(-max(sum(pair) for pair in zip(prefixes, lengths, strict=True)) // page_size)
    num_pages = 1 + most * len(lengths)
    shape = (num_pages, page_size, kv_heads, head_dim)
    options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16, "generator": generator}
    pages = torch.randperm(num_pages - 1, device="cuda", generator=generator) + 1
    return (
        torch.randn(sum(lengths), heads, head_dim, **options),
        torch.randn(shape, **options),
        torch.randn(shape, **options),
        pages.view(len(lengths), most).to(torch.int32),
    )


def _attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    table: torch.Tensor,
    prefixes: Sequence[int],
    lengths: Sequence[int],
) -> torch.Tensor:
    """In float32, one request after the other."""
    outs, start, group = [], 0, q.shape[1] // k.shape[2]
    for n, (prefix, length) in enumerate(zip(prefixes, lengths, strict=True)):
        keys, values = (
            pool[table[n].long()].flatten(0, 1)[: prefix + length].float().repeat_interleave(group, dim=1)
            for pool in (k, v)
        )
        scores = torch.einsum("qhd,khd->hqk", q[start : start + length].float(), keys) * q.shape[2] ** -0.5
        later = torch.arange(prefix + length, device=q.device) > (
            torch.arange(length, device=q.device)[:, None] + prefix
        )
        weights = scores.masked_fill(later, -torch.inf).softmax(-1)
        outs.append(torch.einsum("hqk,khd->qhd", weights, values))
        start += length
    return torch.cat(outs)


def kernels(report: Report) -> None:
    """Our kernels' own tests, on this device."""
    tests = ["tests/model_runner/test_device_timer.py"] if report.tiny else list(KERNEL_TESTS)
    tests += (
        []
        if report.tiny
        else [str(p.relative_to(ROOT)) for p in ROOT.glob("tests/model_runner/test_sampl*.py")]
    )
    _pytest(report, ["-m", "not slow and not model", *dict.fromkeys(tests)], workers=0 if report.tiny else 6)


def gpu_tests(report: Report) -> None:
    """All tests that need a GPU."""
    _pytest(report, ["-m", "gpu", "tests/model_runner", "tests/scheduler", "tests/offline"], workers=4)


def _need_tests(report: Report) -> None:
    """Not skipped without them: whoever asks whether the kernels are right has no answer then."""
    if missing := [name for name in TEST_PACKAGES if importlib.util.find_spec(name) is None]:
        report.fail(
            f"the tests need {', '.join(missing)}: make gpu-bundle, or pip install them into that Python"
        )


def _pytest(report: Report, arguments: list[str], *, workers: int) -> None:
    _need_tests(report)
    command = [
        sys.executable,
        "-P",
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--import-mode=importlib",
    ]
    command += ["-n", str(workers)] if workers else []
    run = subprocess.run([*command, *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    print(run.stdout[-6000:])
    lines = [line for line in run.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    for line in lines[:10]:
        report.note(line[:200])
    last = _last_line(run.stdout)
    if run.returncode:
        report.fail(f"pytest ended with {run.returncode}: {last}")
    report.note(last)


def _last_line(output: str) -> str:
    return (output.strip().splitlines() or ["it printed nothing"])[-1]


def sanitizer(report: Report) -> None:
    """No kernel of ours touches memory that is not its own, says compute-sanitizer."""
    binary = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(binary).exists():
        report.skip("compute-sanitizer is not installed")
    _need_tests(report)
    command = [binary, "--tool", "memcheck", "--error-exitcode", "9", "--target-processes", "all"]
    command += [sys.executable, "-P", "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    command += ["--import-mode=importlib", "--hypothesis-profile=engine", "-o", "timeout=0", "--maxfail=3"]
    command += ["tests/model_runner/kernels/test_triton_ops.py"]
    environment = os.environ | {
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"
    }  # every tensor is an allocation of its own
    run = subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    print(run.stdout[-6000:])
    if "Device not supported" in run.stdout:
        report.skip("compute-sanitizer does not support this device here")
    last = _last_line(run.stdout)
    if run.returncode:
        report.fail(f"compute-sanitizer ended with {run.returncode}: {last}")
    report.note(last)


# ---------------------------------------------------------------- models


def models(report: Report) -> None:
    """Every architecture, in float32 and bfloat16, is as close to exact as transformers is; chunks and mixed steps."""
    names = ["gemma3_text", "olmo2"] if report.tiny else list(ARCHITECTURES)
    for model_type in names:
        for dtype in ("float32", "bfloat16"):
            with_all = report.device == "cuda" and dtype == "bfloat16"
            backends = ["", "triton", "torch_native"] if with_all else [""]
            with tempfile.TemporaryDirectory() as name:
                reference = write_tiny_model(Path(name), model_type, dtype).to(report.device)
                for backend in backends:
                    with report.part(f"{model_type} {dtype} attention={backend or 'auto'}"):
                        settings = {"attention_backend": backend} if backend else {}
                        _compare_with(reference, Path(name), dtype, report, settings)
    if report.device == "cuda":
        _eight_bits(report)


def _eight_bits(report: Report) -> None:
    """Keys, values or weights of 8 bits: further from exact, but not far."""
    with tempfile.TemporaryDirectory() as name:
        reference = write_tiny_model(Path(name), "llama", "bfloat16").to(report.device)
        for settings in ({"kv_cache_dtype": "fp8"}, {"quantization": "fp8"}):
            with report.part(f"llama bfloat16 {settings}"):
                _compare_with(reference, Path(name), "bfloat16", report, settings, slack=EIGHT_BITS)


def _compare_with(
    reference: Any, folder: Path, dtype: str, report: Report, settings: dict[str, str], slack: float = 0.0
) -> None:
    prompts = _prompts((3, 200, 60, 130, 9))
    with (
        LoggedMessages() as log,
        _llm(folder, report, dtype=dtype, chunked_prefill_size=64, **settings) as llm,
    ):
        outputs = _generate(llm, prompts, num=16)
    print(*log.messages, sep="\n")
    rounded = getattr(torch, dtype)
    ours, theirs, slack = 0.0, 0.0, slack + (1e-2 if dtype == "float32" else 2e-2)  # Triton may use TF32
    for prompt, output in zip(prompts, outputs, strict=True):
        exact = _logprobs(reference.float(), prompt, output.token_ids)
        rough = _logprobs(reference.to(rounded), prompt, output.token_ids)
        assert output.logprobs is not None
        found = torch.tensor([token.logprob for token in output.logprobs])
        ours += float((found - exact).abs().mean()) / len(prompts)
        theirs += float((rough - exact).abs().mean()) / len(prompts)
    reference.float()
    assert ours <= 1.5 * theirs + slack, (
        f"log-probabilities are off by {ours:.4f}, transformers' by {theirs:.4f}"
    )


@torch.inference_mode()
def _logprobs(model: Any, prompt: list[int], output: Sequence[int]) -> torch.Tensor:
    """Of each output token, by the model alone and without a cache."""
    tokens = torch.tensor([[*prompt, *output]], device=next(model.parameters()).device)
    logprobs: torch.Tensor = model(tokens).logits[0].float().log_softmax(-1)[len(prompt) - 1 : -1]
    return logprobs.gather(1, tokens[0, len(prompt) :, None])[:, 0].cpu()


def graphs(report: Report) -> None:
    """Recorded decodes choose what the same decodes choose without recording."""
    for model_type in ("llama", "qwen3_moe"):
        with LoggedMessages() as log:
            _same(report, model_type, {"cuda_graph": False}, {"cuda_graph": True})
        with report.part(f"{model_type}: something was recorded"):
            recorded = [line for line in log.starting_with("decode_graphs=") if "decode_graphs=0" not in line]
            assert recorded, log.starting_with("decode_graphs=", "attention_backend=")
            report.note(recorded[0])


def overlap(report: Report) -> None:
    """Planning a step while the one before runs changes no token."""
    _same(report, "llama", {"overlap": False}, {"overlap": True})


def chaos(report: Report) -> None:
    """Requests thrown out and steps that lack memory, at random: everything ends as if nothing had been."""
    for fault in ("retract=0.2:100", "oom=0.2:50"):
        _same(report, "llama", {}, {"chaos": fault})


def _same(report: Report, model_type: str, plain: dict[str, Any], other: dict[str, Any]) -> None:
    """The same requests under two configurations; a token may differ where two were as good but for rounding."""
    name, value = next(iter(other.items()))
    with report.part(f"{model_type}: {name}={value}"), tempfile.TemporaryDirectory() as folder:
        write_tiny_model(Path(folder), model_type, "bfloat16")
        prompts = _prompts(range(2, 60 if report.tiny else 130, 7))
        answers = []
        for settings in (plain, other):
            with _llm(Path(folder), report, dtype="bfloat16", chunked_prefill_size=64, **settings) as llm:
                outputs = _generate(llm, prompts, num=12 if report.tiny else 40)
                answers.append([_answer_of(output) for output in outputs])
        differing = sum(_differs(one, two) for one, two in zip(*answers, strict=True))
        assert not differing, f"{differing} of {len(prompts)} requests have other tokens"
        report.note(f"same tokens for {len(prompts)} requests")


class Answer(NamedTuple):
    """What was chosen, and for each token the log-probabilities of the best few, itself among them."""

    tokens: list[int]
    tops: list[dict[int, float]]
    text: str = ""


def _answer_of(output: GenerationOutput) -> Answer:
    assert output.logprobs is not None
    tops = [{token.token_id: token.logprob, **token.top} for token in output.logprobs]
    return Answer(list(output.token_ids), tops)


def _differs(one: Answer, two: Answer) -> bool:
    """Whether the first token in which they differ was clearly better than the other's; what follows is free."""
    for a, b, top in zip(one.tokens, two.tokens, one.tops, strict=True):
        if a != b:
            return b not in top or top[a] - top[b] > TIE
    return one.text != two.text


def _prompts(lengths: Sequence[int]) -> list[list[int]]:
    source = random.Random(0)
    return [[source.randrange(3, TINY_VOCAB) for _ in range(length)] for length in lengths]


def _llm(folder: Path, report: Report, **settings: Any) -> LLM:
    from engine import LLM

    defaults: dict[str, Any] = {
        "device": report.device,
        "max_model_len": 512,
        "max_total_tokens": 16384,
        "max_running_requests": 32,
        "cuda_graph_max_bs": 8,
        "seed": 1,
    }
    return LLM(str(folder), **{**defaults, **settings})


def _generate(llm: LLM, prompts: list[list[int]], num: int) -> list[GenerationOutput]:
    from engine import SamplingParams

    params = SamplingParams(temperature=0.0, max_new_tokens=num, ignore_eos=True, logprobs=5)
    outputs = llm.generate(prompts, params)
    for output in outputs:
        assert output.finish_reason == "length" and len(output.token_ids) == num, output
    return outputs


# ---------------------------------------------------------------- the whole engine


def out_of_memory(report: Report) -> None:
    """With all other memory of the device taken, everybody is still answered, and so is who comes after."""
    with tempfile.TemporaryDirectory() as name:
        write_tiny_model(Path(name), "llama", "bfloat16")
        with _llm(Path(name), report, dtype="bfloat16", max_total_tokens=8192) as llm:
            prompts = _prompts([400] * 24)
            expected = [output.token_ids for output in _generate(llm, prompts, num=8)]
            llm.flush_cache()
            hog = _take_all_memory()
            report.note(f"took {sum(part.nbytes for part in hog) / (1 << 20):.0f} MiB")
            crowded = [output.token_ids for output in _generate(llm, prompts, num=8)]
            hog.clear()
            torch.cuda.empty_cache()
            llm.flush_cache()
            after = [output.token_ids for output in _generate(llm, prompts, num=8)]
    equal = sum(a == b for a, b in zip(expected, crowded, strict=True))
    report.note(f"{equal} of {len(prompts)} requests have the same tokens as with memory to spare")
    assert [len(tokens) for tokens in crowded] == [8] * len(prompts)
    assert [len(tokens) for tokens in after] == [8] * len(prompts)


def _take_all_memory() -> list[torch.Tensor]:
    """Every block that can be had, down to 2 MiB."""
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
    """`engine serve`: many clients at once get what one alone gets, streams too, and SIGTERM ends it with 0."""
    with tempfile.TemporaryDirectory() as name:
        write_tiny_model(Path(name), "llama", "float32")
        command = [sys.executable, "-P", "-m", "engine", "serve", name, "--device", report.device]
        # In bfloat16 every twelfth token of a random model is as good as another: rounding in a batch would choose.
        command += ["--dtype", "float32"]
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
            # Nobody reads on: what it prints later must not fill the pipe.
            threading.Thread(target=server.stdout.read, daemon=True).start()
            return url
    raise AssertionError(f"it ended with {server.wait()} before it was ready")


def _ask_server(report: Report, url: str) -> None:
    started_s = time.perf_counter()
    prompts = _prompts([5, 40, 200, 90] * (2 if report.tiny else 12))
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
    )  # else each prompt's keys would be those of the crowd
    with urllib.request.urlopen(flush, timeout=30):
        pass
    differing = []
    for n, prompt in enumerate(prompts):
        alone, crowded = _complete(url, prompt), answers[n]
        assert crowded is not None, f"client {n} has no answer"
        if _differs(alone, crowded):
            differing.append(f"client {n}: {crowded.tokens} is not {alone.tokens}")
    assert not differing, f"{len(differing)} of {len(prompts)} answers differ, first of {differing[0]}"
    report.note(f"{2 * len(prompts)} answers in {time.perf_counter() - started_s:.1f} s")


def _complete(url: str, prompt: list[int], *, stream: bool = False) -> Answer:
    """With token ids, which only our own route returns: most tokens of a tiny model have no text."""
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


SECTIONS: Final = (  # what matters most first: a run may be cut off
    Section("sgl_kernel", sgl_kernel, 60, needs_cuda=True),
    Section("models", models, 150),
    Section("graphs", graphs, 60, needs_cuda=True),
    Section("overlap", overlap, 60),
    Section("http", http, 90),
    Section("out_of_memory", out_of_memory, 60, needs_cuda=True),
    Section("kernels", kernels, 150),
    Section("gpu_tests", gpu_tests, 120, needs_cuda=True),
    Section("chaos", chaos, 60),
    Section("sanitizer", sanitizer, 100, needs_cuda=True),
)

if __name__ == "__main__":
    run_sections("benchmarks.gpu_check", "Is the engine right on this GPU?", SECTIONS, BUDGET_S)
